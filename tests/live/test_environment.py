"""What the pipeline tells vLLM and torchrun is what they understand."""

from pathlib import Path

import pytest
from torch.distributed import run as torchrun
from vllm import envs

from spec_compat.pipeline.run.runner import ENVIRONMENT, command

pytestmark = pytest.mark.live


def test_vllm_knows_every_variable_that_its_stages_are_given() -> None:
    given = {name for name in ENVIRONMENT if name.startswith("VLLM_")}
    assert given
    assert given <= envs.environment_variables.keys()


def test_torchrun_leaves_a_stage_its_options() -> None:
    _python, _m, module, *words = command("train", 2, Path("run"), Path("events"))
    assert module == torchrun.__name__
    parsed = torchrun.parse_args(words)
    assert (parsed.nproc_per_node, parsed.training_script) == ("2", "spec_compat.pipeline.stages")
    assert parsed.training_script_args == [
        "train", "--directory", "run", "--events", "events",
    ]  # fmt: skip
