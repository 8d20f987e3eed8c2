"""Targets are computed without the verifier's final norm.

Symptom  None: training reports a high accuracy (50.8 % at step 0 for SmolLM2-135M) and vLLM accepts
         next to nothing of what the head proposes (0.4 %).
Cause    The last captured state is taken before the final norm, and 0.3.0 feeds it to the
         verifier's lm_head as it is (vllm-project/speculators#313, fixed in 0.4.0).
Fix      The verifier's own norm module, with its class, epsilon and weight, runs before lm_head.
Remove when speculators 0.3 is no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(
    module="speculators.models.eagle3.core",
    when={"speculators": ">=0.3,<0.4"},
    upstream="vllm-project/speculators#313",
    after=("train/verifier-weights",),
)

NORM_WEIGHT = "model.norm.weight"


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "verifier_norm" in unwrap(module.Eagle3DraftModel.forward).__code__.co_names:
        return already_fixed("the forward applies verifier_norm")
    return NEEDED


@patch.replace("Eagle3DraftModel._setup_embeddings_and_lm_heads")
def setup(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def _setup_embeddings_and_lm_heads(self: Any, config: Any, t2d: Any) -> None:
        original(self, config, t2d)
        head = self.verifier_lm_head
        head.norm = final_norm(module, config.name_or_path)
        head.register_forward_pre_hook(lambda head, inputs: (head.norm(inputs[0]), *inputs[1:]))

    return _setup_embeddings_and_lm_heads


def final_norm(module: ModuleType, verifier: str) -> Any:
    """The verifier's final norm with its weight as a buffer, so that no checkpoint contains it."""
    from transformers import AutoModel

    # The language model's config and names, by train/verifier-weights.
    config = module.AutoConfig.from_pretrained(verifier)
    config.num_hidden_layers = 1
    with module.torch.device("meta"):
        norm = AutoModel.from_config(config).norm
    weights = module.load_model_layers([NORM_WEIGHT], verifier)
    if NORM_WEIGHT not in weights:
        raise ValueError(f"{verifier}: no {NORM_WEIGHT} among the verifier's weights")
    del norm.weight
    norm.register_buffer("weight", weights[NORM_WEIGHT].float(), persistent=False)
    return norm
