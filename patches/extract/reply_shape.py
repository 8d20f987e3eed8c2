"""Rows are cut out of one long tensor, which is taken out of a list that is no longer one.

Symptom  RuntimeError: Boolean value of Tensor with more than one value is ambiguous.
         Silent: rows are cut in the order they were handed in, whatever order the model runner
         computed them in (vllm-project/speculators#279).
Cause    Since vLLM 0.11.1 `collective_rpc` with `unique_reply_rank` returns the reply itself, and
         the generator of 0.3 takes the first element of it; attribution by request came in 0.4.
Fix      The reply is a list again, of a sequence of layers out of which a row can be cut only where
         that row begins, and only with the length that it has.
Remove when speculators 0.3 is no longer supported.
"""

from itertools import accumulate
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.4", "vllm": ">=0.11"},
    upstream="vllm-project/speculators#279",
    after=("extract/executor",),
)


class Layer:
    """One layer's hidden states of all rows, which gives a row out by its place in the call."""

    def __init__(self, rows: tuple[Any, ...]) -> None:
        starts = accumulate((len(row) for row in rows[:-1]), initial=0)
        self._rows = dict(zip(starts, rows, strict=True))

    def __getitem__(self, place: slice) -> Any:
        row = self._rows.get(place.start)
        found = "no row" if row is None else f"a row of {len(row)} tokens"
        if row is None or len(row) != place.stop - place.start:
            raise RuntimeError(
                f"hidden states do not match the rows: {place.stop - place.start} tokens expected "
                f"at position {place.start} of the call, {found} captured there"
            )
        return row


@patch.replace("MultiprocExecutor")
def executor(original: type[Any], module: ModuleType) -> type[Any]:
    class LayerwiseExecutor(original):  # type: ignore[misc]
        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            reply = super().collective_rpc(method, *args, **kwargs)
            if method == "_get_captured_states" and not args and "args" not in kwargs:
                return [[Layer(rows) for rows in zip(*reply.values(), strict=True)]]
            return reply

    return LayerwiseExecutor
