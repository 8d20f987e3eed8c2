"""A config.json that transformers 5 wrote loses its rope_theta in vLLM 0.16 without a word."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier

pytestmark = [pytest.mark.live]


def taken(model: Path) -> Any:
    """The rope_theta that vLLM computes with."""
    from vllm.transformers_utils.config import get_config

    return get_config(str(model), trust_remote_code=False).rope_parameters["rope_theta"]


def rewritten(model: Path, path: Path, *kept: str) -> Path:
    """A copy whose config.json has rope_theta where transformers 5 writes it."""
    shutil.copytree(model, path)
    config = json.loads((path / "config.json").read_text())
    theta = config.pop("rope_theta")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config |= dict.fromkeys(kept, theta)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_rope_theta_that_vllm_would_not_see_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    assert taken(tiny_llama) == 50_000
    Verifier(str(tiny_llama)).check()
    lost = rewritten(tiny_llama, tmp_path / "lost")
    assert taken(lost) == 10_000
    with pytest.raises(UserError, match="write it beside them as rope_theta"):
        Verifier(str(lost)).check()
    mended = rewritten(tiny_llama, tmp_path / "mended", "rope_theta")
    assert taken(mended) == 50_000
    Verifier(str(mended)).check()
