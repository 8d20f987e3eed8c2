"""Each step must be sampled before the next, and rows must be fetched before they pile up.

Symptom  RuntimeError: State error: sample_tokens() must be called after execute_model() returns
         None. On a GPU: Cannot re-initialize CUDA in forked subprocess. Silent: captured states of
         all rows of a call stay on the GPU until its end. With vLLM 0.32.0, at the end of a
         script: Exception ignored in: <function VllmHiddenStatesGenerator.__del__>.
Cause    Since vLLM 0.11.1 `execute_model` leaves sampling to a second call, which the generator of
         0.3 does not make. vLLM forks its workers unless it is told otherwise, and imports of the
         driver (datasets' of JAX, for one) can have started CUDA by then. vLLM shuts its executor
         down at exit; the generator does once more, when what that logs with is gone.
Fix      The generator's name `MultiprocExecutor` becomes a subclass that samples after each step
         and fetches the rows which that step completed, by request id. With the sampled tokens the
         workers prove each row (see extract/capture); a row that fails makes `generate()` raise
         BadRows. It also checks that every worker runs the patch extract/capture. Workers are
         spawned unless VLLM_WORKER_MULTIPROC_METHOD says otherwise. It is shut down
         once. The pipeline does not fetch: it opens a sink in the worker, sends steps ahead with
         the files that their rows belong in, and is answered with names and checksums.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

import os
from types import ModuleType
from typing import Any

from spec_compat.capture import sink as _sink
from spec_compat.patching import BadRows, Patch

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.11"},
    upstream="vllm-project/speculators#279",
    after=("extract/single-reply",),
)


@patch.replace("MultiprocExecutor")
def executor(original: type[Any], module: ModuleType) -> type[Any]:
    class CapturingExecutor(original):  # type: ignore[misc]
        max_concurrent_batches = 2  # vLLM 0.11.0 lets a step be sent ahead only then

        def _init_executor(self) -> None:
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
            super()._init_executor()

        def shutdown(self) -> None:
            if not getattr(self, "shutting_down", False):
                super().shutdown()

        def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output = super().execute_model(scheduler_output, *args, **kwargs)
            self._output = super().sample_tokens(None) if output is None else output
            self._fetch(self._output)
            return self._output

        def sample_tokens(self, grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
            """The generator of 0.4 calls this after each step, which is sampled by then."""
            return self._output

        def _fetch(self, output: Any) -> None:
            sampled = zip(output.req_ids, output.sampled_token_ids, strict=True)
            tokens = {request: int(ids[-1]) for request, ids in sampled if len(ids)}
            reply = super().collective_rpc(
                "_get_captured_states", args=(tokens,), unique_reply_rank=0
            )
            self._rows.update(reply)

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            if method == "_get_captured_states":
                return self._take()
            reply = super().collective_rpc(method, *args, **kwargs)
            if method == "_reset_capture":
                self._rows: dict[str, Any] = {}
            if method == "_setup_hidden_states_capture":
                _check_workers(reply)
            return reply

        def open_sink(self, storage: Any, tokens: int, buffers: int | None) -> None:
            """Let the worker write rows by itself, through `storage`; see extract().

            `tokens` is the most that a step has, `buffers` the number of steps that the host holds.
            """
            options = {"tokens": tokens, "buffers": buffers}
            super().collective_rpc(_sink.open_sink, args=(storage,), kwargs=options)

        def extract(self, scheduler_output: Any, *order: Any) -> Any:
            """Send a step with the order for its rows (see _sink.Order); a future of an Answer."""
            return super().collective_rpc(
                _sink.extract,
                args=(scheduler_output, _sink.Order(*order)),
                unique_reply_rank=0,
                non_block=True,
            )

        def drain(self) -> Any:
            """The Answer to all steps, once their rows are written."""
            return super().collective_rpc(_sink.drain, unique_reply_rank=0)

        def _take(self) -> dict[str, Any]:
            """All rows of the call in the order they were handed in: request id -> layers."""
            rows = {number: self._rows[number] for number in sorted(self._rows, key=_row)}
            self._rows = {}
            if bad := {_row(key): why for key, why in rows.items() if isinstance(why, str)}:
                raise BadRows(bad)
            return rows

    return CapturingExecutor


def _row(request_id: str) -> int:
    """The generator's ids are `req_{call}_{row}`."""
    return int(request_id.rsplit("_", 1)[1])


def _check_workers(replies: list[Any]) -> None:
    bare = [rank for rank, reply in enumerate(replies) if reply != "extract/capture"]
    if bare:
        raise RuntimeError(
            f"the patch extract/capture is not in place in vLLM worker {bare}: "
            "install spec-compat where vLLM runs, and add spec_compat to VLLM_PLUGINS if it is set"
        )
