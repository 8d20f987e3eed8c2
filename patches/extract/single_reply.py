"""One worker's reply comes in a list.

Symptom  AttributeError: 'list' object has no attribute 'keys', out of `generate()`.
Cause    Up to vLLM 0.11.0 `collective_rpc` with `unique_reply_rank` returns a list of one reply,
         since 0.11.1 the reply; the generator of 0.4 was made for the latter.
Fix      The generator's name `MultiprocExecutor` becomes a subclass that returns the reply.
Remove when vLLM 0.11.0 is no longer supported.
"""

from types import ModuleType
from typing import Any

from spec_compat.patching import Patch

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": "<0.11.1"},
)

TAKEN_APART = ("execute_model", "take_draft_token_ids")  # by vLLM's own callers


@patch.replace("MultiprocExecutor")
def executor(original: type[Any], module: ModuleType) -> type[Any]:
    class SingleReplyExecutor(original):  # type: ignore[misc]
        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            reply = super().collective_rpc(method, *args, **kwargs)
            if kwargs.get("unique_reply_rank") is None or method in TAKEN_APART:
                return reply
            return reply[0]

    return SingleReplyExecutor
