"""The loss mask is the assistant's text with its end tokens; what is not certain is reported."""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from spec_compat.patches.prepare._turns import RowError, Template

import spec_compat
from spec_compat.patching import Preparation, preparing
from tests.chat_templates import FAMILIES, Family, Message
from tests.kimi import FILES as KIMI_FILES
from tests.kimi import SPECIAL_TOKENS

pytestmark = pytest.mark.live

CHATML = FAMILIES["chatml"]
QWEN3 = FAMILIES["qwen3"]
DEEPSEEK = FAMILIES["deepseek"]
JOINED = "a token reaches across the border of a turn"
SILENT = "no token of the assistant within the maximal length"
Turns = list[dict[str, Any]]
Rows = list[tuple[list[int], list[int]]]


def runs(tokenizer: Any, ids: list[int], mask: list[int]) -> list[str]:
    """The text of every stretch of tokens under the mask."""
    stretches = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    masked = [[i for i, _ in pairs] for on, pairs in stretches if on]
    return [tokenizer.decode(i, spaces_between_special_tokens=False) for i in masked]


def attempt(
    tokenizer: Any, messages: list[Message], max_length: int = 10**6
) -> tuple[list[int], list[int]] | str:
    """Ids and mask, or the reason why there are none."""
    try:
        return Template(tokenizer).tokens(messages, max_length)
    except RowError as error:
        return error.reason


def chat(*contents: str, **last: str) -> Turns:
    """User and assistant in turn; `last` are further keys of the last turn."""
    turns: Turns = [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)
    ]
    turns[-1].update(last)
    return turns


# Properties: any conversation, any template.

PIECES = (
    "The river runs to the sea.",
    " and then",
    "\n",
    "\n\n",
    "    ",
    "def f(x):\n    return {'a': x}\n",
    "```python\nprint(1)\n```",
    "你好，世界。",  # noqa: RUF001
    "👩‍👩‍👧 🇪🇺",
    "e\u0301\u200d",
    "<b>bold</b> | {{ x }} [1]",
    "user assistant model",
)
TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=5).map("".join), st.text(max_size=30))
SPOKEN = TEXTS.filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Message], bool]:
    """Alternating turns that end with the assistant's, and whether a system turn goes before."""
    pairs = draw(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
    messages: list[Message] = []
    for question, answer in pairs:
        messages += chat(question, answer)
        if draw(st.booleans()):
            thought = draw(SPOKEN)
            messages[-1] |= {"reasoning_content": thought, "thinking": thought}
    with_system = draw(st.booleans())
    return [{"role": "system", "content": draw(TEXTS)}, *messages], with_system


@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("name", FAMILIES)
@given(conversation=conversations())
@example(conversation=([{"role": "system", "content": ""}, *chat("a", "\n\n b\n")], True))
@example(conversation=([{}, *chat("q", "a", "q", "a", reasoning_content="r", thinking="r")], False))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_mask_is_what_the_assistant_wrote(
    name: str, slow: bool, conversation: tuple[list[Message], bool]
) -> None:
    family = FAMILIES[name]
    tokenizer: Any = family.tokenizer(slow=slow)
    messages = conversation[0] if conversation[1] and family.system else conversation[0][1:]
    found_or_reason = attempt(tokenizer, messages)
    expected = family.said(messages)
    if isinstance(found_or_reason, str):
        # Without offsets a token that joins the header's line feed to the text's cannot be cut.
        joined = slow and any(text != text.strip() for text in expected)
        silent = not any(text.strip() for text in expected)
        assert (found_or_reason, True) in ((JOINED, joined), (SILENT, silent))
        return
    ids, mask = found_or_reason
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True)
    found = runs(tokenizer, ids, mask)
    if not family.end:  # nothing is left of a turn without text and end
        expected = [text for text in expected if text.strip()]
        found = [text for text in found if text.strip()]
    assert len(found) == len(expected)
    for text, wanted in zip(found, expected, strict=True):
        # Only white space that a token shares with the header may be missing.
        assert wanted.endswith(text)
        assert not wanted.removesuffix(text).strip()
        if wanted == wanted.lstrip():
            assert text == wanted


@pytest.mark.parametrize("name", FAMILIES)
@given(conversation=conversations(), max_length=st.integers(2, 60))
@settings(max_examples=10, deadline=None)
def test_ids_and_mask_are_cut_at_the_same_place(
    name: str, conversation: tuple[list[Message], bool], max_length: int
) -> None:
    tokenizer, messages = FAMILIES[name].tokenizer(), conversation[0][1:]
    whole = attempt(tokenizer, [*messages, *chat("q", "a")])
    assert not isinstance(whole, str)
    ids, mask = whole[0][:max_length], whole[1][:max_length]
    expected = (ids, mask) if any(mask[1:]) else SILENT
    assert attempt(tokenizer, [*messages, *chat("q", "a")], max_length) == expected


# Rows, through speculators' own function.


class Prepare:
    """speculators' build_eagle3_dataset: ids and masks of the rows that it keeps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(
        self,
        family: Family,
        rows: list[Any],
        *,
        slow: bool = False,
        original: bool = False,
        column: str = "conversations",
        **options: Any,
    ) -> Rows:
        from speculators.data_generation import preprocessing

        build: Any = preprocessing.build_eagle3_dataset
        build = build.__wrapped__ if original else build
        dataset = Dataset.from_list([{column: row} for row in rows])
        built = build(dataset, family.tokenizer(slow=slow), **{"num_proc": None, **options})
        return [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in built]

    @property
    def reported(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def prepare(tmp_path: Path) -> Iterator[Prepare]:
    import speculators.data_generation.preprocessing  # noqa: F401

    spec_compat.require("prepare/loss-mask")
    path = tmp_path / "reported.jsonl"
    with preparing(Preparation(path)):
        yield Prepare(path)


GOOD = chat("How many bridges are there?", "Seven.")


def spoken(family: Family, rows: Rows) -> list[list[str]]:
    return [runs(family.tokenizer(), ids, mask) for ids, mask in rows]


def test_the_columns_are_those_of_speculators(prepare: Prepare) -> None:
    from speculators.data_generation import preprocessing

    rows = Dataset.from_list([{"conversations": GOOD, "id": 1}])
    built = preprocessing.build_eagle3_dataset(rows, CHATML.tokenizer(), num_proc=None)
    assert sorted(built.column_names) == ["input_ids", "loss_mask"]
    for column in built.column_names:
        assert built[0][column].dtype == torch.int64


def test_turns_are_dropped_alike_by_one_process_and_by_several(prepare: Prepare) -> None:
    """From the end, whole turns of the assistant, as many as the seed has for the row's place."""
    rows = [chat(*"qaqaqaqa")] * 12
    whole = prepare(CHATML, rows[:1])[0]

    def dropped(processes: int | None) -> Rows:
        random.seed(0)
        return prepare(CHATML, rows, turn_dropout=True, num_proc=processes)

    alone, together = dropped(None), dropped(2)
    assert together == alone
    assert len({len(ids) for ids, _ in alone[:6]}) > 1
    assert alone[:6] != alone[6:]  # what processes with one random state would make
    for ids, mask in alone:
        assert (ids, mask) == tuple(part[: len(ids)] for part in whole)
        assert any(mask[-2:])  # a turn, its end, and the template's line feed


def test_rows_are_reported_by_their_number_in_the_source(
    tmp_path: Path, tiny_llama: Path, prepare: Prepare
) -> None:
    """After the shuffle of load_and_preprocess_dataset, and out of the processes of map."""
    from speculators.data_generation import preprocessing

    bad = [3, 11, 17]
    rows = [chat("q", f"<|im_end|> {n}" if n in bad else f"answer {n}") for n in range(20)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    built, tokenizer = preprocessing.load_and_preprocess_dataset(
        str(tiny_llama), str(source), 128, 2, token_freq_path=str(tmp_path / "frequencies.pt")
    )
    assert sorted(built.column_names) == ["input_ids", "loss_mask"]
    found = sorted(runs(tokenizer, *map(list, (r["input_ids"], r["loss_mask"])))[0] for r in built)
    assert found == sorted(f"answer {n}<|im_end|>" for n in range(20) if n not in bad)
    lines = (tmp_path / "reported.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == bad
    assert "'<|im_end|>'" in lines[0]
    # C3: the end token is counted, and so gets into the draft vocabulary.
    frequencies = torch.load(tmp_path / "frequencies.pt")
    assert frequencies[tokenizer.convert_tokens_to_ids("<|im_end|>")] == 17


MARKERS = "its text contains the chat template's own markers"
REFUSED = "the chat template refuses it"
MISTRAL = FAMILIES["mistral"]
GEMMA = FAMILIES["gemma"]
TOOL = {"role": "tool", "content": "42"}


def calling(calls: object) -> Turns:
    return [GOOD[0], {**GOOD[1], "tool_calls": calls}]


REPORTED: dict[str, tuple[Family, Turns, str, str]] = {
    "special token": (CHATML, chat("q", "a <|im_start|>user b"), MARKERS, "1 contains '<|im_s"),
    "of a user": (CHATML, chat("<|im_end|>", "a"), MARKERS, "turn 0 contains '<|im_end|>'"),
    "in reasoning": (QWEN3, chat("q", "a", thinking="<|im_end|>"), MARKERS, "turn 1 contains"),
    "plain header": (MISTRAL, chat("q", "a [/INST] b"), MARKERS, "turn 1 contains '[/INST]'"),
    "C22 separators": (MISTRAL, chat("[INST] q", "a"), MARKERS, "turn 0 contains '[INST]'"),
    "alternation": (GEMMA, [*GOOD, GOOD[1]], REFUSED, "roles must alternate"),
    "no system role": (GEMMA, [{"role": "system", "content": "s"}, *GOOD], REFUSED, "System role"),
    "C4 tool refused": (GEMMA, [*GOOD, TOOL, GOOD[1]], "", "roles must alternate"),
    "C4 tool left out": (
        DEEPSEEK,
        [*GOOD, TOOL, GOOD[1]],
        "the chat template does not render every turn once",
        "turn 2, of role tool, is left out",
    ),
    "C4 calls": (CHATML, calling([1]), "tools and their calls are read", "they are a list"),
    "C4 calls left out": (
        CHATML,
        calling('[{"function": {"name": "f", "arguments": "{}"}}]'),
        "the chat template does not render tools and their calls",
        "the calls of turn 1 are left out",
    ),
    "C5 role": (CHATML, [*GOOD, {"role": "MyModel", "content": "x"}], "a turn of an", "'MyModel'"),
    "parts": (CHATML, [{"role": "user", "content": [{"text": "x"}]}], "a turn that is not", "list"),
    "nobody answers": (CHATML, GOOD[:1], SILENT, ""),
    "no turns": (CHATML, [], "an empty conversation", ""),
    "C8 cut off": (CHATML, chat("question " * 200, "a"), SILENT, ""),
}


@pytest.mark.parametrize("case", REPORTED)
def test_what_is_not_certain_is_reported(case: str, prepare: Prepare) -> None:
    family, turns, reason, detail = REPORTED[case]
    assert len(prepare(family, [GOOD], max_length=128)) == 1
    with pytest.raises(ValueError, match="none of 1 rows can be trained on: 1 x"):
        prepare(family, [turns], max_length=128)
    (row,) = prepare.reported
    assert row["reason"].startswith(reason)
    assert detail in row["detail"]


def test_reasons_are_counted_and_good_rows_kept(
    prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [chat("q", "<|im_end|>"), GOOD, chat("<|im_start|>", "a"), [*GOOD, *GOOD[:1]]]
    found = prepare(CHATML, rows)
    assert spoken(CHATML, found) == [["Seven.<|im_end|>"]] * 2
    assert [row["row"] for row in prepare.reported] == [0, 2]
    counted = "2 of 4 rows are left out: 2 x its text contains the chat template's own markers"
    assert counted in caplog.text


def test_a_pattern_of_the_user_wins(prepare: Prepare) -> None:
    pattern = r"<\|im_start\|>assistant\n(Sev)"
    found = prepare(CHATML, [GOOD], assistant_pattern=pattern)
    assert found == prepare(CHATML, [GOOD], assistant_pattern=pattern, original=True)
    assert spoken(CHATML, found)[0][0].startswith("S")
    assert "<|im_end|>" not in spoken(CHATML, found)[0][0]


# Faults of speculators' own masks (field-reports.md, section C): `original` has them.


def test_c1_turns_without_an_end_of_their_own(prepare: Prepare) -> None:
    """With full-width markers, nothing keeps the pattern of 0.3 from running to the last end."""
    from speculators.data_generation import preprocessing

    source = DEEPSEEK.source.replace("+ eos_token", "+ (eos_token if loop.last else '')")
    family = replace(DEEPSEEK, source=source)
    rows = [chat("q", "one", "what is said here?", "two")]
    assert spoken(family, prepare(family, rows)) == [["one", "two" + DEEPSEEK.end]]
    if not hasattr(preprocessing, "_supports_assistant_mask"):
        (text,) = spoken(family, prepare(family, rows, original=True))
        assert "what is said here?" in text[0]


def test_the_last_turn_may_have_an_end_of_its_own(prepare: Prepare) -> None:
    """As in Harmony, where <|end|> ends all turns but the last, and <|return|> that one."""
    source = CHATML.source.replace(
        "'<|im_end|>\\n'",
        "('<s>' if loop.last and m['role'] == 'assistant' else '<|im_end|>') + '\\n'",
    )
    assert source != CHATML.source
    family = replace(CHATML, source=source)
    found = spoken(family, prepare(family, [chat("q", "one", "q", "two")]))
    assert found == [["one<|im_end|>", "two<s>"]]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_without_an_end_token_is_named(
    name: str, prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    found = spoken(FAMILIES[name], prepare(FAMILIES[name], [GOOD]))
    assert found == [[FAMILIES[name].said(GOOD)[0]]]
    assert ("with no special token" in caplog.text) == (FAMILIES[name].end == "")


def test_c2_empty_blocks_of_reasoning(prepare: Prepare) -> None:
    rows = [chat("q", "one", "q", "two"), chat("q", "<think>\nwhy\n</think>\n\na")]
    wanted = [["one<|im_end|>", "two<|im_end|>"], ["<think>\nwhy\n</think>\n\na<|im_end|>"]]
    assert spoken(QWEN3, prepare(QWEN3, rows)) == wanted
    # One turn of two, and none of one.
    assert spoken(QWEN3, prepare(QWEN3, rows, original=True)) == [["two"], []]


def test_c2_reasoning_in_the_text_itself(prepare: Prepare) -> None:
    """The template moves it, and drops it from all turns but the last."""
    text = "<think>\nwhy\n</think>\n\n"
    found = spoken(QWEN3, prepare(QWEN3, [chat("q", f"{text}one", "q", f"{text}two")]))
    assert found == [["one<|im_end|>", f"{text}two<|im_end|>"]]
    found = spoken(CHATML, prepare(CHATML, [chat("q", f"{text}one", "q", f"{text}two")]))
    assert found == [[f"{text}one<|im_end|>", f"{text}two<|im_end|>"]]


def test_c3_the_end_of_a_turn_is_trained_on(prepare: Prepare) -> None:
    assert spoken(CHATML, prepare(CHATML, [GOOD])) == [["Seven.<|im_end|>"]]
    assert spoken(CHATML, prepare(CHATML, [GOOD], original=True)) == [["Seven."]]


def test_c4_a_tool_speaks_where_the_template_lets_it(prepare: Prepare) -> None:
    for role in ("tool", "function", "observation"):
        rows = prepare(CHATML, [[*GOOD, {"from": role, "value": "42"}, GOOD[1]]])
        assert spoken(CHATML, rows) == [["Seven.<|im_end|>"] * 2]
        assert "<|im_start|>tool\n42<|im_end|>" in CHATML.tokenizer().decode(rows[0][0])
    with_tool = [[*GOOD, TOOL, GOOD[1]]]
    text = CHATML.tokenizer().decode(prepare(CHATML, with_tool, original=True)[0][0])
    assert "42" not in text


def test_c4_tools_that_the_template_leaves_out_are_reported(prepare: Prepare) -> None:
    from speculators.data_generation import preprocessing

    rows = Dataset.from_list(
        [{"conversations": GOOD, "tools": tools} for tools in (None, '[{"name": "f"}]', "")]
    )
    built = preprocessing.build_eagle3_dataset(rows, CHATML.tokenizer(), num_proc=None)
    assert len(built) == 2
    assert [(row["row"], row["detail"]) for row in prepare.reported] == [
        (1, "the tools are left out")
    ]


def test_c4_calls_are_trained_on_and_what_tools_return_is_not(prepare: Prepare) -> None:
    """With the reasoning before a call, which the template keeps until the answer is there."""
    from speculators.data_generation import preprocessing

    family = replace(
        FAMILIES["kimi"],
        source=(KIMI_FILES / "chat_template.jinja").read_text(encoding="utf-8"),
        tokens=(*FAMILIES["kimi"].tokens, *(t for t in SPECIAL_TOKENS.values() if "tool" in t)),
    )
    call = {"id": "f:0", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    turns = [
        GOOD[0],
        {"from": "gpt", "value": "Wait.", "tool_calls": json.dumps([call]), "thinking": "why"},
    ]
    answered = [*turns, {**TOOL, "tool_call_id": "f:0"}, GOOD[1]]
    tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
    rows = [{"conversations": said, "tools": tools} for said in (turns, answered)]
    for slow in (False, True):
        tokenizer = family.tokenizer(slow=slow)
        built: Any = preprocessing.build_eagle3_dataset(
            Dataset.from_list(rows), tokenizer, num_proc=None
        )
        called = (
            "Wait.<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>"
            '{"x": "é"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        )
        found = [runs(tokenizer, r["input_ids"].tolist(), r["loss_mask"].tolist()) for r in built]
        assert found == [["why</think>" + called], [called, "Seven.<|im_end|>"]]


def test_the_assistant_may_speak_first(prepare: Prepare) -> None:
    rows = [[{"from": "gpt", "value": "Hello."}, *GOOD]]
    assert spoken(CHATML, prepare(CHATML, rows)) == [["Hello.<|im_end|>", "Seven.<|im_end|>"]]
    # Where reasoning begins cannot be told: there is no generation prompt to compare with.
    alone = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nHello."}
    assert attempt(QWEN3.tokenizer(), [alone]) == "the turns cannot be told apart in the rendering"


def test_c7_nothing_is_kept_past_the_maximal_length(prepare: Prepare) -> None:
    """0.4 does so for templates with generation tags, the only ones whose mask it takes."""
    tags = FAMILIES["generation-tags"]
    ((ids, mask),) = prepare(tags, [chat("q", "answer " * 200)], max_length=50)
    assert len(ids) == len(mask) == 50
    assert mask[-1] == 1


def test_c8_rows_without_a_target_are_kept_by_the_original(prepare: Prepare) -> None:
    rows = [chat("question " * 200, "a"), GOOD]
    assert not any(prepare(CHATML, rows, original=True, max_length=64)[0][1])
    assert len(prepare(CHATML, rows, max_length=64)) == 1


def test_c9_messages_will_do(prepare: Prepare) -> None:
    assert prepare(CHATML, [GOOD], column="messages") == prepare(CHATML, [GOOD])
    with pytest.raises(ValueError, match="no column conversations or messages; there are"):
        prepare(CHATML, [GOOD], column="dialogue")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_c10_reasoning_reaches_the_template(key: str, prepare: Prepare) -> None:
    rows = prepare(QWEN3, [chat("q", "a", **{key: "why"})])
    assert "why" in spoken(QWEN3, rows)[0][0]


def test_c12_a_turn_that_is_cut_keeps_its_mask(prepare: Prepare) -> None:
    ((_, mask),) = prepare(CHATML, [chat("q", "answer " * 200)], max_length=50)
    header = mask.index(1)
    assert mask == [0] * header + [1] * (50 - header)


def learnt(shift: Any, ids: list[int], mask: list[int]) -> list[tuple[int, int]]:
    """What the trainer reads and is to draft after it, at the positions that have a loss."""
    count = len(ids)
    shifted = shift(
        {
            "input_ids": torch.tensor(ids),
            "loss_mask": torch.tensor(mask),
            "hidden_states": torch.zeros(count, 1),
            # The state after token k predicts token k + 1.
            "verifier_last_hidden_states": torch.tensor([*ids[1:], -1]),
            "lengths": torch.tensor([count]),
            "position_ids": torch.arange(count),
        }
    )
    assert {len(shifted[name]) for name in shifted if name != "lengths"} == {count - 1}
    pairs = zip(shifted["input_ids"], shifted["verifier_last_hidden_states"], strict=True)
    on = zip(pairs, shifted["loss_mask"], strict=True)
    return [(int(read), int(target)) for (read, target), loss in on if loss]


def test_c13_a_position_is_trained_on_for_the_token_that_it_learns(prepare: Prepare) -> None:
    """All the assistant wrote, end tokens too: the first token of a turn after the header's last.

    speculators' own goes by the token that is read: it leaves the first one out, and learns what
    follows the end.
    """
    from speculators.train.data import shift_batch

    spec_compat.require("train/loss-mask-shift")
    ((ids, mask),) = prepare(CHATML, [chat("q", "Seven.", "q", "two")])
    wanted = [(ids[at - 1], ids[at]) for at, on in enumerate(mask) if on]
    end, newline = CHATML.tokenizer()("<|im_end|>\n")["input_ids"]
    assert learnt(shift_batch, ids, mask) == wanted
    assert [target for _, target in wanted].count(end) == 2

    original: Any = shift_batch
    theirs = learnt(original.__wrapped__, ids, mask)
    assert theirs.count((end, newline)) == 2
    assert wanted[0] not in theirs


@pytest.mark.parametrize("count", [1, 2, 3])
def test_c13_the_last_position_has_no_target_that_is_known(count: int) -> None:
    from speculators.train.data import shift_batch

    ids = list(range(5, 5 + count))
    assert learnt(shift_batch, ids, [1] * count) == list(itertools.pairwise(ids[1:]))


def test_c17_another_template_gives_other_tokens(prepare: Prepare) -> None:
    assert prepare(CHATML, [GOOD]) != prepare(QWEN3, [GOOD])


def test_c21_a_tokenizer_without_offsets(prepare: Prepare) -> None:
    kimi = FAMILIES["kimi"]
    rows = [chat("你好", "  Seven.\n", "q", "two", reasoning_content="why")]
    found = prepare(kimi, rows, slow=True)
    assert found == prepare(kimi, rows)
    assert spoken(kimi, found) == [["  Seven.\n<|im_end|>", "why</think>two<|im_end|>"]]
    assert prepare(kimi, rows, slow=True, original=True) == []


def test_c21_a_token_across_a_border_is_reported(prepare: Prepare) -> None:
    rows = [GOOD, chat("q", "\n\nSeven.")]
    assert len(prepare(CHATML, rows, slow=True)) == 1
    assert prepare.reported[0]["reason"] == JOINED
    assert spoken(CHATML, prepare(CHATML, rows))[1] == ["\nSeven.<|im_end|>"]


def test_turn_dropout_ends_with_an_answer(prepare: Prepare) -> None:
    rows = [chat(*["q", "a"] * 4)] * 40
    turns = [len(texts) for texts in spoken(CHATML, prepare(CHATML, rows, turn_dropout=True))]
    assert len(turns) == 40
    assert {*turns} == {1, 2, 3, 4}


def test_turn_dropout_is_drawn_anew(prepare: Prepare, tmp_path: Path) -> None:
    """A dataset that lies in a file keeps what `map` made of it, and gives it out again."""
    from datasets import load_dataset
    from speculators.data_generation import preprocessing

    source = tmp_path / "rows.jsonl"
    source.write_text((json.dumps({"conversations": chat(*["q", "a"] * 4)}) + "\n") * 40)
    rows = load_dataset("json", data_files=str(source), split="train", cache_dir=str(tmp_path))
    drawn = []
    for seed in (1, 2):
        random.seed(seed)
        built = preprocessing.build_eagle3_dataset(
            rows, CHATML.tokenizer(), num_proc=None, turn_dropout=True
        )
        drawn.append([len(row["input_ids"]) for row in built])
    assert drawn[0] != drawn[1]


def test_offsets_without_their_white_space() -> None:
    """As the tokenizers of the GPT-2 kind give them."""
    from tokenizers import processors

    family = replace(CHATML, source=CHATML.source.replace("assistant\\n", "assistant: "))
    family = replace(family, source=family.source.replace("m['role'] + '\\n'", "m['role'] + ': '"))
    tokenizer: Any = family.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    conversation = chat("q  ", "\nSeven, \n\n  and a dog  ", "q", "\na")
    offsets = tokenizer(": \n", return_offsets_mapping=True)["offset_mapping"]
    assert (2, 2) in offsets
    ids, mask = Template(tokenizer).tokens(conversation, 1000)
    assert runs(tokenizer, ids, mask) == family.said(conversation)


ODD = {
    "said twice": ("m['content']", "m['content'] * 2", "does not render every turn once"),
    "header": ("m['role'] +", "m['role'] + ('' if '7' in m['content'] else ':') +", "told apart"),
    "end": ("'<|im_end|>", "('' if '7' in m['content'] else '!') + '<|im_end|>", "told apart"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_template_that_looks_at_the_text_gives_no_mask(case: str) -> None:
    old, new, reason = ODD[case]
    source = CHATML.source.replace(old, new)
    assert source != CHATML.source
    found = attempt(replace(CHATML, source=source).tokenizer(), chat("q", "7"))
    assert isinstance(found, str)
    assert reason in found


def test_the_first_token_is_no_target() -> None:
    source = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    tokenizer: Any = replace(CHATML, source=source).tokenizer()
    answer = [{"role": "assistant", "content": "Seven"}]
    ids, mask = Template(tokenizer).tokens(answer, 1000)
    assert all(mask)
    assert attempt(tokenizer, answer, 1) == SILENT
    assert attempt(tokenizer, answer, 2) == (ids[:2], mask[:2])
