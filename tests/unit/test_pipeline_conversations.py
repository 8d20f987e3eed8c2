"""Files of conversations: what is read, what is refused, and where the fault is said to be."""

import json
from pathlib import Path
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs import conversations

GOOD = {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b."}]}
TURNS = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b."}]


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": TURNS},
        {"conversations": [{"role": "human", "content": "a?"}, {"role": "gpt", "content": "b."}]},
        {"messages": [{"role": "human", "content": "a?"}, {"role": "gpt", "content": "b."}]},
        {"conversations": [], "messages": TURNS},
        {
            "messages": [
                {"role": "human", "content": [{"type": "text", "text": "a?"}]},
                {"role": "gpt", "content": "b."},
            ]
        },
    ],
)
def test_every_shape_becomes_one(record: dict[str, Any]) -> None:
    assert conversations.turns(record) == TURNS


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a"}, "no list under"),
        ({"conversations": "a"}, "no list under"),
        ({"conversations": TURNS[:1]}, "no answer"),
        ({"messages": [{"role": "assistant", "content": None}]}, "no answer"),
        ({"messages": ["a"]}, "not an object"),
        ({"messages": [{"content": "a"}]}, "without role"),
        ({"messages": [{"role": "user", "content": [{"image": "x"}]}]}, "other than text"),
        ({"messages": [{"role": "assistant", "content": "cut \ud83d"}]}, "half of a character"),
        ({"messages": TURNS, "tools": [{"name": "\ude00"}]}, "half of a character"),
    ],
)
def test_a_row_with_nothing_to_train_on_says_why(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(conversations.UnusableError, match=reason):
        conversations.turns(record)


def test_a_file_is_counted(tmp_path: Path) -> None:
    tool = {"messages": [*TURNS, {"role": "tool", "content": "t"}]}
    check = conversations.check(lines(tmp_path / "d.jsonl", GOOD, {"text": "a"}, tool))
    assert (check.rows, check.usable) == (3, 2)
    assert check.unusable["no list under conversations or messages"] == 1


def test_what_a_chat_template_may_read_of_a_turn_is_kept() -> None:
    calls = [{"name": "f", "arguments": {"x": 1}}]
    said = {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": calls}
    (turn,) = conversations.turns({"messages": [said]})
    assert turn == {
        "from": "assistant",
        "value": "a",
        "reasoning_content": "r",
        "tool_calls": json.dumps(calls),
    }


def test_a_json_file_may_be_a_list_or_lines(tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([GOOD, GOOD], indent=2), encoding="utf-8")
    assert conversations.check(listed).usable == 2
    assert conversations.check(lines(tmp_path / "lines.json", GOOD, GOOD, GOOD)).usable == 3


def test_blank_lines_and_a_byte_order_mark_are_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n\n\n")
    assert conversations.check(file).usable == 1


@pytest.mark.parametrize(
    ("name", "content", "place", "fault"),
    [
        ("d.jsonl", json.dumps(GOOD) + '\n{"conv\n', "d.jsonl:2", "not JSON"),
        ("d.jsonl", json.dumps(GOOD) + "\n[1]\n", "d.jsonl:2", "not a JSON object"),
        ("d.jsonl", json.dumps(GOOD) + "\n\n\n{]\n", "d.jsonl:4", "not JSON"),
        ("d.json", "[\n" + json.dumps(GOOD) + ",\n{]\n]", "d.json:3", "not JSON"),
        ("d.json", "[1]", "d.json: row 1", "not a JSON object"),
        ("d.jsonl", json.dumps(GOOD) + "\n" + "[" * 200_000, "d.jsonl:2", "beyond what Python"),
        ("d.json", "[" * 200_000, "d.json", "beyond what Python reads"),
        ("d.jsonl", '{"n": ' + "9" * 5000 + "}", "d.jsonl:1", "beyond what Python reads"),
        ("d.jsonl", "", "d.jsonl", "no usable conversation (the file is empty)"),
        ("d.jsonl", '{"text": 1}\n', "d.jsonl", "no usable conversation (1 x no list under"),
    ],
)
def test_a_fault_has_file_and_line(
    tmp_path: Path, name: str, content: str, place: str, fault: str
) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        conversations.check(file)
    assert str(caught.value).startswith(str(tmp_path / place))
    assert fault in str(caught.value)


def test_bytes_that_are_not_text_have_a_line(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b'\n{"a": "\xff"}\n')
    with pytest.raises(UserError, match=r"d\.jsonl:2: not UTF-8 text"):
        conversations.check(file)


def test_nothing_of_a_row_but_its_turns_goes_any_further() -> None:
    """No path in a row, whatever it calls it, can lead anywhere."""
    paths = {"id": "../../x", "image": "/etc/passwd", "file": "../../../y"}
    turns = [{"role": "user", "content": "a", **paths}, {"role": "assistant", "content": "b"}]
    expected = [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]
    assert conversations.turns({**paths, "messages": turns}) == expected


def test_the_estimate_is_cut_at_the_row_length_and_at_max_samples(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 399}]
    }
    check = conversations.check(lines(tmp_path / "d.jsonl", *[row] * 10))
    assert check.estimate_tokens(1000, None) == 1000
    assert check.estimate_tokens(50, None) == 500
    assert check.estimate_tokens(1000, 5) == 500
