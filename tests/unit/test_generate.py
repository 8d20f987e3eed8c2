"""What `generate()` refuses before vLLM sees it, and after a call that ended midway."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_compat.capture import memory


class Executor:
    """Whoever waits for its second reply is interrupted."""

    def __init__(self) -> None:
        self.calls = 0

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = (), **kwargs: Any) -> None:
        self.calls += 1
        if self.calls > 1:
            raise KeyboardInterrupt


@pytest.fixture
def generator() -> Any:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=16),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
    )
    return SimpleNamespace(vllm_config=config, executor=Executor())


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "token_ids cannot be empty"),
        (torch.empty(0, 3), "token_ids cannot be empty"),
        ([[1, 2], [], [3]], "row 1 of token_ids"),
        ([torch.tensor([1]), torch.tensor([], dtype=torch.int64)], "row 1 of token_ids"),
        ([1, 2, 3], "row 0 of token_ids"),
        (torch.tensor([1, 2, 3]), "row 0 of token_ids"),
        ([[1, 2], "abc"], None),
    ],
)
def test_what_is_no_row_is_refused_before_vllm_sees_any(
    rows: Any, said: str | None, generator: Any
) -> None:
    """vLLM's scheduler would stop at an empty row, in this call and in every one after it."""
    with pytest.raises((ValueError, TypeError), match=said):
        memory.generate(generator, rows)
    assert generator.executor.calls == 0


def test_after_a_call_that_ended_midway_there_is_none(
    generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply that it did not wait for would be taken for that of the next call."""
    monkeypatch.setattr(memory.Prefill, "run", lambda self, steps: iter([self._call("extract")]))
    with pytest.raises(KeyboardInterrupt):
        memory.generate(generator, [[1, 2]])
    calls = generator.executor.calls
    with pytest.raises(
        RuntimeError, match=r"ended midway .KeyboardInterrupt.*make a new generator"
    ):
        memory.generate(generator, [[1, 2]])
    assert generator.executor.calls == calls
