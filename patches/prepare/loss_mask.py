"""The loss mask is found by rendering the conversation, not by a pattern over its text.

Symptom  Silent. The token that ends a turn is never trained on. Masks are all zeros, or cover part
         of the turns, for templates that insert an empty block of reasoning (Qwen3, Kimi), whose
         markers are not ASCII (DeepSeek), or where a text holds the template's markers. With a
         tokenizer that has no offsets every row is dropped. Turns of a tool are dropped from the
         middle of a conversation. 0.4 also keeps tokens past the maximal length, without a mask.
Cause    `_detect_assistant_pattern` guesses a regular expression from one rendering.
Fix      See `_turns.py`. A row for which the mask is not certain is left out and reported: a
         warning counts them by reason, and the file of `patching.preparing` gets a JSON object a
         row: `row` (what its column spec_compat_row says, or its number in the source, from 0),
         `reason`, `detail`. No usable row at all is a ValueError. With
         `assistant_pattern` speculators' own path runs.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import (
    NEEDED,
    ROW_COLUMN,
    Patch,
    Probe,
    moved,
    parameters,
    preparation,
)

from ._turns import Message, RowError, Template

patch = Patch(
    module="speculators.data_generation.preprocessing",
    when={"speculators": ">=0.3,<0.5"},
    upstream="vllm-project/speculators#975",
)

ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
COLUMNS = ("conversations", "messages")
BATCH = 1000
RESULTS = ("input_ids", "loss_mask", "row", "reason", "detail")
ARGUMENTS = {"dataset", "tokenizer", "max_length", "num_proc", "assistant_pattern", "turn_dropout"}


@patch.probe
def needed(module: ModuleType) -> Probe:
    found = parameters(module.build_eagle3_dataset)
    return NEEDED if found == ARGUMENTS else moved(f"build_eagle3_dataset takes {sorted(found)}")


@patch.replace("load_raw_dataset")
def load_raw(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def load_raw_dataset(*args: Any, **kwargs: Any) -> Any:
        dataset = original(*args, **kwargs)  # which the caller shuffles
        if ROW_COLUMN in dataset.column_names:
            return dataset
        return dataset.add_column(ROW_COLUMN, list(range(len(dataset))))

    return load_raw_dataset


@patch.replace("build_eagle3_dataset")
def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def build_eagle3_dataset(
        dataset: Any,
        tokenizer: Any,
        max_length: int = 2048,
        num_proc: int = 8,
        assistant_pattern: Any = None,
        turn_dropout: bool = False,
    ) -> Any:
        if assistant_pattern is not None:
            options = (max_length, num_proc, assistant_pattern, turn_dropout)
            return original(dataset, tokenizer, *options)
        if not set(COLUMNS) & set(dataset.column_names):
            raise ValueError(f"no column {' or '.join(COLUMNS)}; there are {dataset.column_names}")
        template = Template(tokenizer)
        if not template.end_of_assistant:
            module.log.warning(
                "the chat template ends the assistant's turns with no special token: "
                "the head will not learn where they end"
            )
        draws: Any = preparation().draws or random
        seed = draws.getrandbits(64) if turn_dropout else None
        rows = dataset.map(
            partial(prepare, template, max_length, seed),
            batched=True,
            with_indices=True,
            num_proc=num_proc,
            batch_size=BATCH,
            remove_columns=dataset.column_names,
            features=_features(),
            # Its key knows neither this file nor the random state of turn_dropout.
            load_from_cache_file=False,
        )
        told = rows.select_columns(["row", "reason", "detail"]).to_list()
        report(module.log, [row for row in told if row["reason"]], len(told))
        kept = [place for place, row in enumerate(told) if not row["reason"]]
        rows = rows.select(kept).select_columns(["input_ids", "loss_mask"])
        rows.set_format(type="torch")
        return rows

    return build_eagle3_dataset


def prepare(
    template: Template,
    max_length: int,
    seed: int | None,
    batch: dict[str, list[Any]],
    places: list[int],
) -> dict[str, list[Any]]:
    """One result for every row of the batch: ids and mask, or the reason why there are none.

    With a seed turns are dropped: by the place of each row, so that processes, which begin with
    the same random state, neither draw the same numbers nor others when there are more of them.
    """
    conversations = next(batch[column] for column in COLUMNS if column in batch)
    tools = batch.get("tools", [None] * len(places))
    results: dict[str, list[Any]] = {name: [] for name in RESULTS}
    results["row"] = list(batch.get(ROW_COLUMN, places))
    for place, conversation, offered in zip(places, conversations, tools, strict=True):
        ids, mask, reason, detail = list[int](), list[int](), "", ""
        try:
            draw = None if seed is None else random.Random(f"{seed} {place}")  # noqa: S311
            messages = normalize(conversation, draw)
            ids, mask = template.offering(parsed(offered)).tokens(messages, max_length)
        except RowError as error:
            reason, detail = error.reason, error.detail
        results["input_ids"].append(ids)
        results["loss_mask"].append(mask)
        results["reason"].append(reason)
        results["detail"].append(detail)
    return results


def normalize(conversation: Any, draw: random.Random | None = None) -> list[Message]:
    """The turns as a chat template reads them. Raises RowError.

    With something to draw from, as speculators has it: a random number of turns from the start, up
    to the end of the assistant's turn.
    """
    if not isinstance(conversation, list) or not all(isinstance(t, dict) for t in conversation):
        raise RowError("not a list of turns")
    if not conversation:
        raise RowError("an empty conversation")
    wanted = draw.randint(1, len(conversation)) if draw else len(conversation)
    messages = list[Message]()
    for turn, raw in enumerate(conversation):
        messages.append(_message(turn, raw))
        if turn + 1 >= wanted and messages[-1]["role"] == "assistant":
            break
    return messages


def _message(turn: int, raw: dict[str, Any]) -> Message:
    role = raw.get("from") or raw.get("role")
    if role not in ROLES:
        raise RowError("a turn of an unknown role", f"turn {turn}: {role!r}")
    said = [raw[key] for key in ("value", "content") if raw.get(key) is not None]
    thought = [raw[key] for key in ("reasoning_content", "thinking") if raw.get(key)]
    for text in (*said, *thought):
        if not isinstance(text, str):
            kind = type(text).__name__
            raise RowError("a turn that is not text", f"turn {turn} is a {kind}")
    message: Message = {"role": ROLES[role], "content": next(filter(None, said), "")}
    if thought:  # two names of one thing; a template knows one of them
        message |= {"reasoning_content": thought[0], "thinking": thought[0]}
    if calls := parsed(raw.get("tool_calls")):
        message["tool_calls"] = [_call(call) for call in calls]
    extra = {key: raw[key] for key in ("name", "tool_call_id") if raw.get(key)}
    return message | extra


def parsed(tools: Any) -> list[Any]:
    """Tools, or calls of them, from JSON text. Raises RowError.

    As columns, Arrow gives all of them the fields of each.
    """
    if not tools:
        return []
    reason = "tools and their calls are read as a JSON list in text"
    if not isinstance(tools, str):
        raise RowError(reason, f"they are a {type(tools).__name__}")
    try:
        found = json.loads(tools)
    except ValueError as error:
        raise RowError(reason, str(error)) from error
    if not isinstance(found, list):
        raise RowError(reason, f"they are a {type(found).__name__}")
    return found


def _call(call: Any) -> Any:
    """A call as templates read it and vLLM's server hands it to them: its arguments are no text."""
    if not isinstance(call, dict):
        return call
    if "function" not in call:
        call = {"type": "function", "function": call}
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def report(log: Any, reported: list[dict[str, Any]], total: int) -> None:
    """Say which rows are left out. Raises ValueError when none is left."""
    if path := preparation().reported:
        ordered = sorted(reported, key=lambda row: row["row"])
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in ordered]
        path.write_text("".join(lines), encoding="utf-8")
    reasons = Counter(row["reason"] for row in reported)
    counts = "; ".join(f"{number} x {reason}" for reason, number in reasons.most_common())
    if len(reported) == total:
        raise ValueError(f"none of {total} rows can be trained on: {counts or 'there are none'}")
    if reported:
        log.warning(f"{len(reported)} of {total} rows are left out: {counts}")


def _features() -> Any:
    from datasets import Features, Sequence, Value

    ids, text = Sequence(Value("int64")), Value("string")
    return Features(dict(zip(RESULTS, (ids, ids, Value("int64"), text, text), strict=True)))
