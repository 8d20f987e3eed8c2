"""Rows that a script keeps in memory: what speculators' `generate()` returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_compat.capture.orders import EncodedRow, Failure, PreparedRow, Written
from spec_compat.capture.prefill import Prefill, Step, pack
from spec_compat.patching import BadRows

if TYPE_CHECKING:
    from torch import Tensor

# One is filled by a step while the rows of the step before leave the other.
BUFFERS = 2
# Set on a generator when a call ends midway: scheduler and worker disagree from then on, and vLLM
# may take the reply of one call for that of another.
ENDED = "_spec_compat_ended"


class Memory:
    """A storage that writes nothing: the states of a step come back with an answer."""

    def files(self, step: dict[int, int]) -> dict[str, list[int]]:
        return {"": list(step)}

    def encode(self, states: list[Tensor]) -> list[Tensor]:
        return states

    def write(self, path: Path, rows: Mapping[int, EncodedRow]) -> Written:
        states = {number: [layer.clone() for layer in row.states] for number, row in rows.items()}
        return Written("", "", list(rows), "", 0, states)


def generate(generator: Any, token_ids: Any) -> list[dict[str, Any]]:
    """The rows in the order given: `input_ids` int64 [s], and one state [s, hidden] a layer.

    `token_ids` has a list or a tensor of ids for each row; what is longer than the verifier's
    context is cut. Raises ValueError without rows and for a row that has no tokens, BadRows when a
    row fails its proof, and RuntimeError when an earlier call ended midway.
    """
    import torch

    longest = generator.vllm_config.model_config.max_model_len - 1  # one token is sampled
    given = [torch.as_tensor(row, dtype=torch.long) for row in token_ids]
    if not given:
        raise ValueError("token_ids cannot be empty")
    for number, ids in enumerate(given):
        if ids.dim() != 1 or not len(ids):
            raise ValueError(f"row {number} of token_ids is no list of one token id or more")
    rows = [PreparedRow(ids[:longest].tolist(), []) for ids in given]
    states = _states(generator, rows)
    return [
        {
            "input_ids": torch.tensor(row.ids, dtype=torch.long),
            "hidden_states": states[number],
            "loss_mask": None,
        }
        for number, row in enumerate(rows)
    ]


def _states(generator: Any, rows: list[PreparedRow]) -> dict[int, list[Tensor]]:
    """The states of each row by its number."""
    if ended := getattr(generator, ENDED, ""):
        raise RuntimeError(f"an earlier call ended midway ({ended}); make a new generator")
    states: dict[int, list[Tensor]] = {}
    bad: dict[int, str] = {}
    failure: Failure | None = None
    try:
        prefill = Prefill(generator, Memory(), BUFFERS)
        most = generator.vllm_config.scheduler_config.max_num_seqs
        packed = pack([len(row.ids) for row in rows], prefill.tokens, most)
        for answer in prefill.run(Step("", {n: rows[n] for n in step}, step) for step in packed):
            failure = answer.failure
            bad.update({refused.row: refused.reason for refused in answer.refused})
            for written in answer.written:
                states.update(written.states or {})
    except BaseException as error:
        setattr(generator, ENDED, repr(error))
        raise
    if failure is not None:
        raise RuntimeError(f"a row could not be kept: {failure.text}")
    if bad:
        raise BadRows(bad)
    return states
