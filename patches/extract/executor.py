"""The executor's replies changed shape, and each step must be sampled before the next.

Symptom  RuntimeError: State error: sample_tokens() must be called after execute_model() returns
         None. Then: RuntimeError: Boolean value of Tensor with more than one value is ambiguous.
         Silent: rows are cut out of one long tensor in the order they were handed in, whatever
         order the model runner computed them in (vllm-project/speculators#279).
Cause    Since vLLM 0.11.2 `execute_model` leaves sampling to a second call, and `collective_rpc`
         with `unique_reply_rank` returns the reply itself instead of a list of one.
Fix      The generator's name `MultiprocExecutor` becomes a subclass that samples after each step,
         fetches the rows that this step completed, keyed by request id, and hands the generator a
         sequence of layers from which it can cut a row only where that row begins, and only with
         the length that it has. It also checks that every worker runs the `extract/capture` patch.
Remove when speculators 0.3 is no longer supported.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, moved

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.4", "vllm": ">=0.11.2"},
    upstream="vllm-project/speculators#279",
)


class Layer:
    """One layer's hidden states of all rows, which gives a row out by its place in the call."""

    def __init__(self, rows: list[Any]) -> None:
        starts: Iterator[int] = iter(_starts(rows))
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


def _starts(rows: list[Any]) -> list[int]:
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    return starts[:-1]


def _submitted(request_id: str) -> int:
    """The generator's ids are `req_{call}_{row}`."""
    return int(request_id.rsplit("_", 1)[1])


@patch.probe
def needed(module: ModuleType) -> Probe:
    if hasattr(module.MultiprocExecutor, "sample_tokens"):
        return NEEDED
    return moved("MultiprocExecutor has no sample_tokens")


@patch.replace("MultiprocExecutor")
def executor(original: type[Any], module: ModuleType) -> type[Any]:
    class CapturingExecutor(original):  # type: ignore[misc]
        def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output = super().execute_model(scheduler_output, *args, **kwargs)
            if output is None:
                output = self.sample_tokens(None)
            self._rows.update(super().collective_rpc("_get_captured_states", unique_reply_rank=0))
            return output

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            if method == "_get_captured_states":
                rows = [self._rows.pop(i) for i in sorted(self._rows, key=_submitted)]
                return [[Layer(list(layer)) for layer in zip(*rows, strict=True)]]
            reply = super().collective_rpc(method, *args, **kwargs)
            if method == "_reset_capture":
                self._rows: dict[str, list[Any]] = {}
            if method == "_setup_hidden_states_capture":
                _check_workers(reply)
            return reply

    return CapturingExecutor


def _check_workers(replies: list[Any]) -> None:
    bare = [rank for rank, reply in enumerate(replies) if reply != "extract/capture"]
    if bare:
        raise RuntimeError(
            f"the patch extract/capture is not in place in vLLM worker {bare}: "
            "install spec-compat where vLLM runs, and add spec_compat to VLLM_PLUGINS if it is set"
        )
