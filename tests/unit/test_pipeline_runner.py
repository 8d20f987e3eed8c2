"""What the runner decides before it starts a process: stages, environment, devices."""

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline import runner


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (None, None, "prepare extract map train export"),
        ("extract", "map", "extract map"),
        ("train", "train", "train export"),
        (None, "prepare", "prepare"),
    ],
)
def test_the_head_is_exported_whenever_it_is_trained(
    first: str | None, last: str | None, expected: str
) -> None:
    assert " ".join(runner.selected(first, last)) == expected  # type: ignore[arg-type]


def test_stages_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(UserError, match="--from train comes after --to map"):
        runner.selected("train", "map")


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [(None, None), ("", "spec_compat"), ("a,b", "a,b,spec_compat"), ("spec_compat", "spec_compat")],
)
def test_vllm_always_loads_our_plugin(plugins: str | None, expected: str | None) -> None:
    own = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    assert runner._environment(own, reports="r").get("VLLM_PLUGINS") == expected


def test_what_the_user_has_set_stays() -> None:
    own = {"VLLM_NO_USAGE_STATS": "0", "SPEC_COMPAT_REPORT_DIR": "elsewhere"}
    environment = runner._environment(own, reports="here")
    assert environment["VLLM_NO_USAGE_STATS"] == "0"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environment["SPEC_COMPAT_REPORT_DIR"] == "here"


def test_several_workers_on_a_cpu_share_its_cores() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in runner._environment({}, reports="r")
    environment = runner._environment({}, reports="r", workers=2)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize(("devices", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,3", 2)])
def test_gpus_are_counted_as_cuda_would(
    devices: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert runner._visible_gpus() == count


def test_no_stage_unpickles_whatever_the_user_has_set() -> None:
    own = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "0"}
    environment = runner._environment(own, reports="r")
    assert environment["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in environment
