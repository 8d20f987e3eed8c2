"""A verifier whose states are right gets a head; or one line, before states are extracted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spec_compat.errors import UserError
from spec_compat.pipeline.run import plan as plans
from spec_compat.pipeline import verify
from spec_compat.pipeline.head import targets
from spec_compat.pipeline.stages import training as train
from spec_compat.pipeline.run.config import RunConfig
from tests.live.zoo import VOCABULARY, ZOO
from tests.unit.pipeline_inputs import make_data

pytestmark = [pytest.mark.live, pytest.mark.slow]

# Wrappers whose language model transformers lists under no AutoModelForCausalLM, and one whose
# config has the language model's under another name.
TRAINED = ("Qwen2.5-VL", "Qwen3-VL", "GLM-4V", "InternVL, its own code", "LLaVA")
REFUSED = {
    "StableLM": "its final norm is no RMSNorm",
    "GPT-NeoX": "its final norm is no RMSNorm",
    "MiniCPM": r"transformers has no class for its language model \(minicpm\)",
    "Qwen2.5-Omni": r"transformers has no class for its language model \(qwen2_5_omni_text\)",
}
DRAFTED = range(100, 164)


def job(family: str, root: Path) -> Any:
    """What the train stage would be given, after the map stage."""
    member = ZOO[family]
    given = {"model": str(member.build(root / "model")), "output": root / "run"}
    data = [str(make_data(root / "data.jsonl"))]
    trusted = {"trust_remote_code": bool(member.remote), "draft_vocab_size": len(DRAFTED)}
    plan = plans.make(RunConfig.model_validate({**given, "data": data, **trusted}))
    marks = np.zeros(VOCABULARY, bool)
    marks[list(DRAFTED)] = True
    np.save(root / "t2d.npy", marks)
    np.save(root / "d2t.npy", np.full(len(DRAFTED), DRAFTED[0]))
    layout = SimpleNamespace(vocab_mapping=root)
    return SimpleNamespace(config=plan.config, layout=layout, verifier=plan.verifier)


@pytest.fixture(autouse=True)
def trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPAT_TRUST_REMOTE_CODE", "1")


@pytest.mark.parametrize("family", TRAINED)
def test_a_head_is_made_and_its_rows_can_be_recomputed(family: str, tmp_path: Path) -> None:
    given = job(family, tmp_path)
    head = train.draft_head(given)
    targets.check(head, targets.GreedyVerifier(given.verifier), torch.randn(50, 128).bfloat16())
    ids = torch.arange(20, 60)
    states = verify.Oracle(given.verifier).states(ids, (2, 7))
    assert [tuple(state.shape) for state in states] == [(40, 128)] * 2
    assert all(state.isfinite().all() for state in states)


@pytest.mark.parametrize("family", REFUSED)
def test_a_verifier_that_no_head_can_be_trained_for(family: str, tmp_path: Path) -> None:
    given = job(family, tmp_path)
    with pytest.raises(UserError, match=f"no head can be trained for it, {REFUSED[family]}"):
        targets.GreedyVerifier(given.verifier)
