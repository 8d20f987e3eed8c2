"""What a server is expected to accept of a head's drafts, measured on batches of rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_compat.pipeline.head.targets import GreedyVerifier


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
