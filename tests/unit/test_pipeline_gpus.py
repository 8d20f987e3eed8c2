"""The GPUs that CUDA would see: how many there are, and how much memory each has."""

import inspect

import pynvml
import pytest

from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.stages import TRAIN
from spec_compat.pipeline.system import gpus
from spec_compat.pipeline.system.gpus import Gpu
from tests.unit.nvml import FakeNvml

A, B, C = Gpu(80, 1), Gpu(80, 2), Gpu(40, 3)
UUIDS = ("GPU-a1b2", "GPU-a1c3", "GPU-d4e5")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", [C, A]),
        (" 1 , 2", [B, C]),
        ("0,-1,2", [A]),
        ("1,3,0", [B]),
        ("0,,1", [A]),
        ("0,0", []),
        ("GPU-d4e5,GPU-a1b2", [C, A]),
        ("GPU-d,GPU-a1c", [C, B]),
        ("GPU-d,GPU-a1,GPU-a1b2", [C]),  # two begin so
        ("GPU-f,0", []),
        ("d4e5", []),
        ("0,GPU-a1b2", []),
    ],
)
def test_the_gpus_are_those_that_cuda_would_see(
    devices: str | None, expected: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNvml(A, B, C, uuids=UUIDS).install(monkeypatch, devices)
    assert gpus.visible() == expected
    assert gpus.count() == len(expected)


@pytest.mark.parametrize(
    ("nvml", "devices", "count"),
    [
        (FakeNvml(A, B, mig=(1,)), None, 2),
        (FakeNvml(A, B, mig=(1,)), "1", 1),
        (FakeNvml(A, B, mig=(1,)), "MIG-x,MIG-y", 2),
        (FakeNvml(A, B, mig=(1,)), "MIG-x,MIG-x", 0),
        (FakeNvml(None), None, 1),
        (FakeNvml(driver=False), "0,1", 0),
    ],
)
def test_where_memory_is_unknown_gpus_are_counted_all_the_same(
    nvml: FakeNvml, devices: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.install(monkeypatch, devices)
    assert gpus.visible() == []
    assert gpus.count() == count


def test_without_mig_on_the_visible_gpu_its_memory_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeNvml(A, B, mig=(1,)).install(monkeypatch, "0")
    assert gpus.visible() == [A]


@pytest.mark.parametrize(("devices", "ranks"), [("0", 1), ("0,2", 2), (None, 3)])
def test_training_takes_a_rank_for_each_gpu(
    devices: str | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNvml(A, B, C).install(monkeypatch, devices)
    given = {"model": "m", "data": ["d.jsonl"], "output": "run", "seq_length": 8}
    config = ResolvedConfig.model_validate({**given, "layer_ids": [2], "draft_vocab_size": 8})
    assert TRAIN.ranks(config) == ranks
    assert TRAIN.ranks(config.model_copy(update={"train_gpus": 7})) == 7


def test_the_stand_in_has_what_nvml_has() -> None:
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    for name in names:
        real, fake = getattr(pynvml, name), getattr(FakeNvml(), name)
        if inspect.isfunction(real):
            ours = inspect.signature(fake)
            assert [*inspect.signature(real).parameters] == [*ours.parameters]
    assert pynvml.NVML_DEVICE_MIG_ENABLE == FakeNvml.NVML_DEVICE_MIG_ENABLE
    assert issubclass(pynvml.NVMLError, Exception)
