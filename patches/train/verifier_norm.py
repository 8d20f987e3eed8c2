"""Targets are computed without the verifier's final norm, or with a norm of another kind.

Symptom  None: training reports a high accuracy (0.3.0: 50.8 % at step 0 for SmolLM2-135M) and vLLM
         accepts next to nothing of what the head proposes (0.4 %).
Cause    The last captured state is taken before the final norm. 0.3 feeds it to the verifier's
         lm_head as it is (vllm-project/speculators#313). 0.4 has a norm, but always Llama's, which
         for verifiers of the Gemma kind (they scale by 1 + weight) is another function; and where
         it finds no weight it warns, and goes on with ones.
Fix      The verifier's own norm module, with its class, epsilon and weight, runs before lm_head. No
         weight is an error.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import (
    NEEDED,
    Patch,
    Probe,
    mentions,
    moved,
    trusts_remote_code,
)

patch = Patch(
    module="speculators.models.eagle3.core",
    when={"speculators": ">=0.3,<0.5"},
    upstream="vllm-project/speculators#313",
    after=("train/verifier-weights",),
)

NORM_WEIGHT = "model.norm.weight"


@patch.probe
def needed(module: ModuleType) -> Probe:
    head = module.Eagle3DraftModel
    names, used = mentions(head._setup_embeddings_and_lm_heads), mentions(head.forward)
    if "verifier_lm_head" not in names:
        return moved("the verifier's lm_head is not set up there")
    if ("verifier_norm" in names) != ("verifier_norm" in used):
        return moved("verifier_norm is set up and not used, or used and not set up")
    norms = [name for name in names if name.isidentifier() and "norm" in name.lower()]
    if norms and "verifier_norm" not in names:
        return moved(f"the verifier's norm has another name: {', '.join(sorted(norms))}")
    return NEEDED


@patch.replace("Eagle3DraftModel._setup_embeddings_and_lm_heads")
def setup(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def _setup_embeddings_and_lm_heads(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        # Before the original, which only warns.
        norm = final_norm(module, config.name_or_path)
        original(self, config, *args, **kwargs)
        if hasattr(self, "verifier_norm"):
            self.verifier_norm = norm
            return
        head = self.verifier_lm_head
        head.norm = norm
        head.register_forward_pre_hook(lambda head, inputs: (head.norm(inputs[0]), *inputs[1:]))

    return _setup_embeddings_and_lm_heads


def final_norm(module: ModuleType, verifier: str) -> Any:
    """The verifier's final norm with its weight as a buffer, so that no checkpoint contains it."""
    from transformers import AutoModel

    # The language model's config and names, by train/verifier-weights.
    config = module.AutoConfig.from_pretrained(verifier)
    config.num_hidden_layers = 1
    with module.torch.device("meta"):
        norm = AutoModel.from_config(config, trust_remote_code=trusts_remote_code()).norm
    weights = module.load_model_layers([NORM_WEIGHT], verifier)
    if NORM_WEIGHT not in weights:
        raise ValueError(f"{verifier}: no {NORM_WEIGHT} among the verifier's weights")
    del norm.weight
    norm.register_buffer("weight", weights[NORM_WEIGHT].float(), persistent=False)
    # Its weight stays float32 where FSDP makes lm_head and what it is given bfloat16.
    norm.register_forward_hook(lambda norm, inputs, normed: normed.to(inputs[0].dtype))
    return norm
