"""Targets have another temperature than the verifier.

Symptom  None: the head learns distributions that are too sharp or too flat (Granite divides its
         logits by up to 16, Cohere multiplies them by 0.0625, Gemma 2 caps them at 30). The
         likeliest token is the same, so no comparison of choices notices.
Cause    The trainer's targets are lm_head's output; what the verifier does to its logits after that
         is left out.
Fix      lm_head's output goes through the same scale and cap, as the verifier's config has them.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed, mentions, moved

patch = Patch(
    module="speculators.models.eagle3.core",
    when={"speculators": ">=0.3,<0.5"},
    after=("train/verifier-norm",),
)


FIELDS = {"logit_scale", "logits_scaling", "dim_model_base", "final_logit_softcapping"}


@patch.probe
def needed(module: ModuleType) -> Probe:
    head = module.Eagle3DraftModel
    setup, forward = mentions(head._setup_embeddings_and_lm_heads), mentions(head.forward)
    known = sorted(FIELDS & (setup | forward))
    if set(known) == FIELDS:
        return already_fixed("the verifier's logits are scaled and capped")
    if known:
        return moved(f"of what changes the verifier's logits, {', '.join(known)} is looked at")
    if "verifier_lm_head" not in forward:
        return moved("targets are no output of verifier_lm_head")
    return NEEDED


@patch.replace("Eagle3DraftModel._setup_embeddings_and_lm_heads")
def setup(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def _setup_embeddings_and_lm_heads(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        # The language model's config, by train/verifier-weights.
        verifier = module.AutoConfig.from_pretrained(config.name_or_path)
        scale, cap = scale_of(verifier), getattr(verifier, "final_logit_softcapping", None)
        if scale != 1.0:
            self.verifier_lm_head.register_forward_hook(lambda head, inputs, logits: logits * scale)
        if cap:
            self.verifier_lm_head.register_forward_hook(
                lambda head, inputs, logits: (logits / cap).tanh() * cap
            )

    return _setup_embeddings_and_lm_heads


def scale_of(verifier: Any) -> float:
    """What the verifier's logits are multiplied by: Cohere's field, Granite's, MiniCPM's."""
    scale = getattr(verifier, "logit_scale", None) or 1.0
    if divisor := getattr(verifier, "logits_scaling", None):
        scale /= divisor
    if width := getattr(verifier, "dim_model_base", None):
        scale *= width / verifier.hidden_size
    return float(scale)
