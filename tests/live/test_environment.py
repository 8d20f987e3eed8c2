"""What the pipeline tells vLLM and torchrun is what they understand."""

from pathlib import Path

import pytest
from torch.distributed import run as torchrun
from vllm import envs

from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.process import ENVIRONMENT, command
from spec_compat.pipeline.stages import TRAIN

pytestmark = pytest.mark.live


def test_vllm_knows_every_variable_that_its_stages_are_given() -> None:
    given = {name for name in ENVIRONMENT if name.startswith("VLLM_")}
    assert given
    assert given <= envs.environment_variables.keys()


def test_torchrun_leaves_a_stage_its_options() -> None:
    given = {"model": "m", "data": ["d.jsonl"], "output": "run", "seq_length": 8}
    resolved = {"layer_ids": [2, 4, 5, 7], "draft_vocab_size": 8, "train_gpus": 2}
    config = ResolvedConfig.model_validate({**given, **resolved})
    _python, _m, module, *words = command(TRAIN, config, Path("run"), Path("events"))
    assert module == torchrun.__name__
    parsed = torchrun.parse_args(words)
    assert (parsed.nproc_per_node, parsed.training_script) == ("2", "spec_compat.pipeline")
    assert parsed.training_script_args == [
        "train", "--directory", "run", "--events", "events",
    ]  # fmt: skip
