"""A turn of a dataset as a chat template reads it, whatever the dataset calls its parts."""

import json

from spec_compat.patches.prepare.loss_mask import normalize

CALL = {"id": "f:0", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_a_turn_of_the_assistant() -> None:
    """Templates know one or the other name of reasoning; arguments of a call are no text."""
    raw = {"from": "gpt", "value": "", "content": "Seven.", "thinking": "3 + 4",
           "tool_calls": json.dumps([CALL])}  # fmt: skip
    (message,) = normalize([raw])
    assert message == {
        "role": "assistant",
        "content": "Seven.",
        "reasoning_content": "3 + 4",
        "thinking": "3 + 4",
        "tool_calls": [{"id": "f:0", "function": {"name": "f", "arguments": {"x": 1}}}],
    }


def test_a_turn_of_a_tool() -> None:
    raw = {"role": "observation", "content": "42", "name": "f", "tool_call_id": "f:0"}
    assert normalize([raw]) == [{**raw, "role": "tool"}]
