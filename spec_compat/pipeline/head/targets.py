"""The verifier's greedy tokens, computed from its own norm and lm_head, apart from the trainer.

Before training they must agree with the trainer's targets. After it, drafts are counted as accepted
where they agree with them: see `acceptance`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.inputs.weights import opened

NORM, HEAD, EMBEDDINGS = "norm.weight", "lm_head.weight", "embed_tokens.weight"
PLAIN, NEEDED = ("BF16", "F16", "F32"), "one in bfloat16 is needed"
# Logits of a slice of the vocabulary are held at a time.
SLICE = 1 << 14
# Both sides compute in float32 from the same weights: only exact ties may differ.
AGREEMENT = 0.99


class GreedyVerifier:
    """The verifier's final norm and its whole lm_head, [vocabulary, hidden] in its own dtype."""

    def __init__(self, verifier: Verifier) -> None:
        self.norm = _norm(verifier)
        tensors = _tensors(verifier, _names(verifier))
        _check_tied(verifier)
        self.norm.load_state_dict({"weight": tensors[NORM].float()}, assign=True)
        self.head = tensors[HEAD]

    def tokens(self, states: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The greedy next token, int64 [n], after each last state [n, hidden] (before the norm).

        `allowed`, bool [vocabulary], leaves the other tokens out of the choice.
        """
        self.norm.to(states.device)
        self.head = self.head.to(states.device)
        with torch.no_grad():
            normed = self.norm(states.float())
        best = torch.full((len(states),), -torch.inf, device=states.device)
        tokens = torch.zeros(len(states), dtype=torch.long, device=states.device)
        for start in range(0, len(self.head), SLICE):
            logits = normed @ self.head[start : start + SLICE].float().T
            if allowed is not None:
                logits[:, ~allowed[start : start + SLICE]] = -torch.inf
            value, index = logits.max(dim=-1)
            tokens = torch.where(value > best, index + start, tokens)
            best = torch.maximum(best, value)
        return tokens


def refuse(verifier: Verifier) -> None:
    """Raises UserError where no head can be trained for the verifier; reads next to no weights."""
    _norm(verifier)
    if verifier.is_local:
        _names(verifier)
        _check_tied(verifier)


def check(model: Any, verifier: GreedyVerifier, states: Tensor) -> None:
    """Compare the trainer's targets with the verifier's choices within the draft vocabulary.

    `model` is the draft head before training, `states` [n, hidden] are stored last states. Raises
    UserError where they differ: no final norm or another one, d2t and t2d out of step, or the
    lm_head of another model.
    """
    drafts = trained_on(model, states).argmax(dim=-1)
    found = drafts + model.d2t[drafts]
    agreement = float((found == verifier.tokens(states, model.t2d)).float().mean())
    if agreement < AGREEMENT:
        raise UserError(
            f"the trainer's targets are not the verifier's: they agree at {agreement:.1%} of "
            f"{len(states)} positions; is a patch of the train stage disabled, or the mapping "
            "not the map stage's?"
        )


def trained_on(model: Any, states: Tensor) -> Tensor:
    """The logits that the trainer has for targets, float [n, draft], of last states [n, hidden]."""
    # 0.4 has the norm beside the head, 0.3 gets it as a part of it.
    norm = getattr(model, "verifier_norm", torch.nn.Identity())
    with torch.no_grad():
        logits: Tensor = model.verifier_lm_head(norm(states.float()))
    return logits


def _norm(verifier: Verifier) -> torch.nn.Module:
    """The final norm of the verifier's language model, in transformers' class, without weight.

    Raises UserError where a head cannot be trained on what it gives.
    """
    config = copy.deepcopy(verifier.hf_text_config)
    config.num_hidden_layers = 1
    try:
        with torch.device("meta"):
            skeleton = AutoModel.from_config(config, trust_remote_code=verifier.trust_remote_code)
    except ValueError:
        raise verifier.error(
            "no head can be trained for it, transformers has no class for its language model "
            f"({config.model_type or type(config).__name__})"
        ) from None
    norm = getattr(skeleton, "norm", None)
    if norm is None or getattr(norm, "bias", None) is not None:
        raise verifier.error("no head can be trained for it, its final norm is no RMSNorm")
    found: torch.nn.Module = norm
    return found


def _check_tied(verifier: Verifier) -> None:
    """Raises UserError for an lm_head in the weights that vLLM leaves there.

    Training may have changed a copy of what the config still calls the embeddings.
    """
    if not getattr(verifier.hf_text_config, "tie_word_embeddings", False):
        return
    head, embeddings = _names(verifier)[HEAD], verifier.tensor(EMBEDDINGS)
    if head == embeddings:
        return
    both = _tensors(verifier, {HEAD: head, EMBEDDINGS: embeddings})
    if not torch.equal(both[HEAD], both[EMBEDDINGS]):
        raise verifier.error(
            "its config ties the lm_head to the embeddings, which vLLM does, and its weights have "
            f"another {head}; set tie_word_embeddings to false, or leave that out"
        )


def _tensors(verifier: Verifier, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of these names, by the keys of `names`."""
    found = {}
    for kind, name in names.items():
        with safe_open(verifier.file_of(name), "pt") as weights:
            found[kind] = weights.get_tensor(name)
    return found


def _names(verifier: Verifier) -> dict[str, str]:
    """The names of norm and lm_head, or of the embeddings in its place.

    Under a wrapper the names have something before them; the norm stands beside the embeddings.
    """
    embeddings = verifier.tensor(EMBEDDINGS)
    of_head = [
        f".{name}"
        for name in verifier.weight_map
        if ".lm_head." in f".{name}" and ".layers." not in name
    ]
    if of_head and not any(name.endswith(f".{HEAD}") for name in of_head):
        raise verifier.error(f"its lm_head is quantised; {NEEDED}")
    names = {
        NORM: embeddings.removesuffix(EMBEDDINGS) + NORM,
        HEAD: verifier.tensor(HEAD) if of_head else embeddings,
    }
    for name in names.values():
        with opened(verifier.file_of(name)) as weights:
            dtype = weights.get_slice(name).get_dtype()
        if dtype not in PLAIN:
            raise verifier.error(f"its {name} is quantised ({dtype}); {NEEDED}")
    return names
