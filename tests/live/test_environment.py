"""What the pipeline tells vLLM by environment variables is what vLLM reads."""

import pytest
from vllm import envs

from spec_compat.pipeline.runner import ENVIRONMENT

pytestmark = pytest.mark.live


def test_vllm_knows_every_variable_that_its_stages_are_given() -> None:
    given = {name for name in ENVIRONMENT if name.startswith("VLLM_")}
    assert given
    assert given <= envs.environment_variables.keys()
