"""The verifier's own choices, computed from its weights apart from the trainer.

The trainer is held against them twice: its targets before the first step, and the head's drafts
after the last one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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


class Acceptance(NamedTuple):
    """What a server is expected to accept of a head's drafts, and how far that can be relied on.

    `shares`: of positions at which the first, the first two, ... drafted tokens are all right.
    `following`: of those at which all before it are, the share at which each token is.
    `own`: of the tokens that this was measured on, those that the verifier itself would have said.
    A server's text is all the verifier's own: where little of this one is, it accepts less.
    """

    shares: list[float]
    following: list[float]
    own: float


def acceptance(
    model: Any, verifier: GreedyVerifier, batches: Iterable[dict[str, Any]], ttt_steps: int
) -> Acceptance:
    """Measure a head on batches of rows.

    The shares are the `full_acc_i` of speculators' validation (models/eagle3/core.py,
    compute_accuracy) with three differences, each of which brings them nearer to what a server
    counts as vllm:spec_decode_num_accepted_tokens_per_pos over num_drafts at temperature 0:
    positions of all batches weigh the same, where speculators averages batches of different size;
    the sum runs over drafts that a server makes, see `chain`; and a drafted token is right if it is
    the verifier's choice among all its tokens, not among those that can be drafted. The expected
    acceptance length of a chain, tokens per step of the verifier, is 1 + their sum: the verifier's
    own token, and each drafted one that it accepts with all before it.
    """
    device = next(model.parameters()).device
    counts = torch.zeros(3, ttt_steps, dtype=torch.float64, device=device)
    said = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for batch in batches:
        there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        with torch.no_grad():
            drafts, *_ = model(**there, ttt_steps=ttt_steps, use_off_policy_tokens=False)
        tokens = torch.cat([draft + model.d2t[draft] for draft in drafts])
        right = verifier.tokens(there["verifier_last_hidden_states"][0])
        mask, positions = there["loss_mask"][0].bool(), there["position_ids"][0]
        counts += chain(tokens, right, mask, positions)
        said += own(there["input_ids"][0], right, mask, positions)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)
        torch.distributed.all_reduce(said)
    holding, held, counted = counts
    shares, following = (holding / of.clamp_min(1) for of in (counted, held))
    return Acceptance(shares.tolist(), following.tolist(), float(said[0] / said[1].clamp_min(1)))


def own(ids: Tensor, right: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Tokens of the assistant that are the verifier's choice, and all of them, int64 [2].

    All are [n], of packed rows as the trainer shifts them: `right` at a position stands for the
    token at the next one. See `chain`.
    """
    said = mask[:-1] & (positions.diff() == 1)
    return torch.stack([(said & (ids[1:] == right[:-1])).sum(), said.sum()])


def chain(tokens: Tensor, right: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Positions at which a chain holds up to each step, int64 [3, steps].

    Under them those at which it held up to the step before, and all; a position whose turn ends
    before the step is in none of the three.

    `tokens`, [steps, n], has what was drafted at each position for each step ahead of it; `right`,
    `mask` and `positions`, [n], are of the packed rows: the verifier's choice at a position,
    whether it stands for a token of the assistant, and its place in its row.

    A draft counts as far as it stays within one turn. It begins after a token of that turn, which
    the verifier has sampled: no server drafts the first token of a turn.
    """
    counts = torch.zeros(3, len(tokens), dtype=torch.long, device=tokens.device)
    counted = mask & torch.cat([mask.new_zeros(1), mask[:-1] & (positions.diff() == 1)])
    holds = counted
    for step, drafted in enumerate(tokens):
        length = len(right) - step
        counted = counted[:length] & mask[step:] & (positions[step:] - positions[:length] == step)
        held = holds[:length] & counted
        holds = held & (drafted[:length] == right[step:])
        counts[:, step] = torch.stack([holds.sum(), held.sum(), counted.sum()])
    return counts


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
