"""What happens without each patch: the reason it exists, and the sign when it can go."""

from pathlib import Path

import pytest

from spec_compat import registry, versions
from tests.conftest import Script

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROWS = [list(range(3, 500))] * 20  # more tokens than a step takes

SYMPTOMS = {
    "1": "is_encoder_decoder",
    "extract/scheduler-config": "is_encoder_decoder",
    "extract/kv-cache-config": "unexpected keyword argument 'kv_cache_specs'",
    "extract/scheduler": "missing 1 required positional argument: 'block_size'",
    "extract/host-memory": "NVIDIA driver",
    "extract/cache-config": "assert len(request.block_hashes) >= num_full_blocks",
    "extract/executor,extract/capture": "has no attribute 'get_input_embeddings'",
    "extract/capture": "the patch extract/capture is not in place in vLLM worker [0]",
    # What is left of generate() and of the worker are two halves that do not know each other.
    "extract/executor": "Must call _setup_hidden_states_capture before capturing states",
}
# Shown by verifiers that need them: in test_zoo.py, and in test_kimi_walls.py.
ELSEWHERE = {"extract/layer-count", "extract/sliding-window", "extract/trust-remote-code"}


@pytest.mark.parametrize(("disabled", "symptom"), SYMPTOMS.items())
def test_without_a_patch_its_symptom_shows(
    disabled: str, symptom: str, generate: Script, tiny_llama: Path
) -> None:
    env = {"SPEC_COMPAT_DISABLE": disabled}
    process = generate(tiny_llama, ROWS, layer_ids=[2, 4, 5, 7], max_model_len=512, env=env)
    assert process.returncode != 0
    assert symptom in process.stderr + process.stdout


def test_every_extract_patch_that_applies_has_its_symptom_here() -> None:
    covered = ELSEWHERE | {patch_id for ids in SYMPTOMS for patch_id in ids.split(",")}
    planned = registry.plan(versions.detect())
    applied = {item.patch.id for item in planned if item.applies and item.patch.stage == "extract"}
    assert applied <= covered
    assert len(applied) > 5
