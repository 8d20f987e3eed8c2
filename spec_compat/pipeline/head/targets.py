"""The verifier's own choices, computed from its weights apart from the trainer.

The trainer is held against them twice: its targets before the first step, and the head's drafts
after the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel
from transformers.utils import cached_file

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import text_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NORM, HEAD, EMBEDDINGS = "norm.weight", "lm_head.weight", "embed_tokens.weight"
PLAIN, NEEDED = ("BF16", "F16", "F32"), "one in bfloat16 is needed"
# Logits of a slice of the vocabulary are held at a time.
SLICE = 1 << 14
# Both sides compute in float32 from the same weights: only exact ties may differ.
AGREEMENT = 0.99


class Verifier:
    """The verifier's final norm and its whole lm_head, [vocabulary, hidden] in its own dtype."""

    def __init__(self, model: str, trust_remote_code: bool = False) -> None:
        text = text_config(model, trust_remote_code)
        self.norm = _norm(model, text, trust_remote_code)
        tensors = _tensors(model, _places(model))
        _check_tied(model, text)
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


def refuse(model: str, trust_remote_code: bool) -> None:
    """Raises UserError where no head can be trained for the verifier; reads next to no weights."""
    text = text_config(model, trust_remote_code)
    _norm(model, text, trust_remote_code)
    if Path(model).is_dir():
        _places(model)
        _check_tied(model, text)


def check(model: Any, verifier: Verifier, states: Tensor) -> None:
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
    model: Any, verifier: Verifier, batches: Iterable[dict[str, Any]], ttt_steps: int
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


def _norm(model: str, config: Any, trust_remote_code: bool) -> torch.nn.Module:
    """The final norm of the verifier's language model, in transformers' class, without weight.

    Raises UserError where a head cannot be trained on what it gives.
    """
    config.num_hidden_layers = 1
    try:
        with torch.device("meta"):
            skeleton = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError:
        raise UserError(
            f"--model {model}: no head can be trained for it, transformers has no class for its "
            f"language model ({config.model_type or type(config).__name__})"
        ) from None
    norm = getattr(skeleton, "norm", None)
    if norm is None or getattr(norm, "bias", None) is not None:
        raise UserError(
            f"--model {model}: no head can be trained for it, its final norm is no RMSNorm"
        )
    found: torch.nn.Module = norm
    return found


def _check_tied(model: str, config: Any) -> None:
    """Raises UserError for an lm_head in the weights that vLLM leaves there.

    Training may have changed a copy of what the config still calls the embeddings.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return
    files, (head, file) = _files(model), _places(model)[HEAD]
    embeddings = only(model, EMBEDDINGS, files)
    if head == embeddings:
        return
    both = _tensors(model, {HEAD: (head, file), EMBEDDINGS: (embeddings, files[embeddings])})
    if not torch.equal(both[HEAD], both[EMBEDDINGS]):
        raise UserError(
            f"--model {model}: its config ties the lm_head to the embeddings, which vLLM does, and "
            f"its weights have another {head}; set tie_word_embeddings to false, or leave that out"
        )


def _tensors(model: str, places: Mapping[str, tuple[str, str]]) -> dict[str, Tensor]:
    """Tensors by the names of `places`, from a local directory or the hub's cache."""
    found = {}
    for kind, (name, file) in places.items():
        with safe_open(cached_file(model, file), "pt") as weights:
            found[kind] = weights.get_tensor(name)
    return found


def _files(model: str) -> dict[str, str]:
    """The file of each of the verifier's tensors."""
    index = cached_file(model, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        with safe_open(cached_file(model, SINGLE), "pt") as weights:
            return dict.fromkeys(weights.keys(), SINGLE)
    with open(index, encoding="utf-8") as stream:  # noqa: PTH123
        files: dict[str, str] = json.load(stream)["weight_map"]
    return files


def _places(model: str) -> dict[str, tuple[str, str]]:
    """Name and file of norm and head, or of the embeddings in its place.

    Under a wrapper the names have something before them; the norm stands beside the embeddings.
    """
    files = _files(model)
    decoder = only(model, EMBEDDINGS, files).removesuffix(EMBEDDINGS)
    of_head = [f".{n}" for n in files if ".lm_head." in f".{n}" and ".layers." not in n]
    tied = not of_head
    if of_head and not any(name.endswith(f".{HEAD}") for name in of_head):
        raise UserError(f"--model {model}: its lm_head is quantised; {NEEDED}")
    names = {
        NORM: decoder + NORM,
        HEAD: decoder + EMBEDDINGS if tied else only(model, HEAD, files),
    }
    for name in names.values():
        if name not in files:
            raise UserError(f"--model {model}: no {name} among its weights")
        with safe_open(cached_file(model, files[name]), "pt") as weights:
            dtype = weights.get_slice(name).get_dtype()
        if dtype not in PLAIN:
            raise UserError(f"--model {model}: its {name} is quantised ({dtype}); {NEEDED}")
    return {kind: (name, files[name]) for kind, name in names.items()}


def only(model: str, suffix: str, names: Iterable[str]) -> str:
    """The one tensor whose name ends so and that is no part of a decoder layer."""
    found = [n for n in names if f".{n}".endswith(f".{suffix}") and ".layers." not in n]
    if len(found) != 1:
        raise UserError(f"--model {model}: {len(found)} of its weights are called {suffix}")
    return found[0]
