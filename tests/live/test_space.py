"""What is refused or said before the verifier is loaded."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from spec_compat.errors import UserError
from spec_compat.pipeline.stages import extraction as extract
from spec_compat.pipeline.run import plan as plans
from spec_compat.pipeline.run.config import RunConfig
from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.manifest import begin
from spec_compat.pipeline.run.stage import Job
from tests.unit.pipeline_inputs import make_data, make_verifier

pytestmark = [pytest.mark.live]

TOKENS, HIDDEN = 1000, 7168
Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("asked", "free", "message"),
    [
        ({"max_disk": "50MB"}, 1 << 40, r"--max-disk 50.0 MB: .* take 60.2 MB"),
        ({}, 50_000_000, r"1,000 tokens need 60.2 MB, 50.0 MB are free"),
        ({"sink_buffers": 10**5}, 1 << 40, r"--sink-buffers 100000: .*8,192 tokens take 47.0 TB"),
        ({}, 1 << 40, None),
    ],
)
def test_of_a_kimi_a_token_takes_57_kilobytes(
    asked: dict[str, Any], free: int, message: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded: list[str] = []

    def load(**options: Any) -> None:
        loaded.append(options["model_path"])
        raise LookupError

    monkeypatch.setattr(extract, "VllmHiddenStatesGenerator", load)
    monkeypatch.setattr(extract.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))
    model = make_verifier(tmp_path / "model", hidden_size=HIDDEN)
    data = make_data(tmp_path / "talks.jsonl")
    given = {"model": str(model), "data": [str(data)], "output": tmp_path / "run"}
    plan = plans.make(RunConfig.model_validate({**given, **asked}))
    layout = Layout(tmp_path / "run")
    weights = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight_packed")
    save_file({name: torch.zeros(1) for name in weights}, model / "model.safetensors")
    rows = {"input_ids": [list(range(TOKENS))], "loss_mask": [[1] * TOKENS]}
    Dataset.from_dict(rows).save_to_disk(layout.prepared("talks"))
    said: list[str] = []
    events = Events()
    monkeypatch.setattr(events, "note", said.append)
    job = Job(plan.config, layout, plan.datasets, begin(plan), events)
    with pytest.raises(UserError if message else LookupError, match=message):
        extract.run(job)
    assert bool(loaded) is (message is None)
    if loaded:
        ahead = f"the train stage will stop: --model {model}: its lm_head is quantised"
        assert said == [f"{ahead}; one in bfloat16 is needed"]
