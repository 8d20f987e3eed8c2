"""Rows come out of the capture: packed into steps, sampled, proved, and in the order given.

Symptom  RuntimeError: State error: sample_tokens() must be called after execute_model() returns
         None. On a GPU: Cannot re-initialize CUDA in forked subprocess. With 0.3: RuntimeError:
         Boolean value of Tensor with more than one value is ambiguous; silent, rows are cut in the
         order they were handed in, whatever order the model runner computed them in
         (vllm-project/speculators#279). With 0.4: AttributeError: 'list' object has no attribute
         'keys' on vLLM 0.11.0; silent, row 10 comes back before row 2. Silent with both: captured
         states of all rows of a call stay on the GPU until its end. With vLLM 0.32.0, at the end
         of a script: Exception ignored in: <function VllmHiddenStatesGenerator.__del__>.
Cause    `generate()` sends steps, and takes replies apart, as vLLM had them: since 0.11.1
         `execute_model` leaves sampling to a second call, and `collective_rpc` with
         `unique_reply_rank` returns the reply instead of a list of it. That of 0.4 sorts request
         ids as strings (fixed upstream in fe2ddba5, which no release contains). vLLM forks its
         workers unless it is told otherwise, and imports of the driver (datasets' of JAX, for one)
         can have started CUDA by then. vLLM shuts its executor down at exit; the generator does
         once more, when what that logs with is gone.
Fix      `generate()` does what the pipeline does, with a storage that keeps rows in memory
         (spec_compat.capture.memory): steps of whole rows, each sent with an order, each row proved
         before it comes back; a row that fails makes it raise BadRows. The generator's name
         `MultiprocExecutor` becomes a subclass that checks that every worker runs the patch
         extract/capture, and is shut down once. Workers are spawned unless
         VLLM_WORKER_MULTIPROC_METHOD says otherwise.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.capture import memory
from spec_compat.patching import Patch

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.11"},
    upstream="vllm-project/speculators#279",
)


@patch.replace("VllmHiddenStatesGenerator.generate")
def generate(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def through_the_sink(self: Any, token_ids: Any) -> list[dict[str, Any]]:
        return memory.generate(self, token_ids)

    return through_the_sink


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

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            reply = super().collective_rpc(method, *args, **kwargs)
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
