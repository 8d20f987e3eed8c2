"""Which tokens of a conversation are the assistant's, found by rendering it more than once.

A turn's text is replaced by a sentinel and the conversation rendered again: what stands before and
after the sentinel is the template's, and what stands there in the real rendering is the turn's.
Nothing is searched for, so nothing that a turn says can be taken for its border.
"""

import json
import re
from copy import copy
from itertools import count
from typing import Any

Message = dict[str, Any]
Span = tuple[int, int]


class RowError(Exception):
    """Why no loss mask can be told for a row: a reason to count by, and what it was in this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class Template:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tools = list[Any]()
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {*tokenizer.all_special_tokens, *(str(t) for t in added if t.special)}
        self.special = _any_of(special)
        self.closing = re.compile(rf"\s*(?:{self.special.pattern})")
        self.headers = self._headers(_any_of(special.union(map(str, added))))
        self.end_of_user = self._end_of("user")
        self.end_of_assistant = self._end_of("user", "assistant")

    def offering(self, tools: list[Any]) -> "Template":
        """The same for a conversation in which these tools are offered."""
        other = copy(self)
        other.tools = tools
        return other

    def render(self, messages: list[Message], prompt: bool = False) -> str:
        """The conversation as text; with `prompt`, up to where the assistant is to speak next."""
        offered = {"tools": self.tools} if self.tools else {}
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **offered
            )
        except Exception as error:  # the template is a program that came with the model
            raise RowError("the chat template refuses it", str(error)) from error
        return text

    def tokens(self, messages: list[Message], max_length: int) -> tuple[list[int], list[int]]:
        """The conversation's first `max_length` token ids, and 1 for each that is the assistant's.

        Raises RowError.
        """
        self._check_markers(messages)
        text = self.render(messages)
        sentinel = next(s for n in count() if (s := f"SpecCompat{n}Turn") not in text)
        self._check_rendered(messages, sentinel)
        self._check_tools(messages, text)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._span(text, messages, turn, sentinel) for turn in turns]
        tokenize = self._by_offsets if self.tokenizer.is_fast else self._by_ids
        ids, mask = tokenize(text, spans)
        ids, mask = ids[:max_length], mask[:max_length]
        if not any(mask[1:]):  # nothing comes before the first token: it is never a target
            raise RowError("no token of the assistant within the maximal length")
        return ids, mask

    def _span(self, text: str, messages: list[Message], turn: int, sentinel: str) -> Span:
        """First and last character (exclusive) of what the model writes in a turn, end included."""
        history, blank = messages[:turn], {"role": "assistant", "content": sentinel}
        before, after = self._around([*history, blank, *messages[turn + 1 :]], turn, sentinel)
        up_to_turn, tail = self._around([*history, blank], turn, sentinel)
        # No template prompts for a first turn; all before its content is the template's then.
        prompt = self.render(history, prompt=True) if history else up_to_turn
        # What the template writes on its own between the generation prompt and the content: mostly
        # nothing; a space, which the model would write; or an empty block of reasoning, which it
        # would not, and in the place of which real reasoning stands.
        opening = up_to_turn[len(prompt) :] if up_to_turn.startswith(prompt) else ""
        header = before.removesuffix(opening)
        if text.startswith(before) and not opening.isspace():
            start = len(before)
        elif text.startswith(header) and before == header + opening:
            start = len(header)
        else:
            raise RowError("the turns cannot be told apart in the rendering", f"turn {turn}")
        stop = len(text) - len(after)
        if not text.endswith(after) or stop < start:
            raise RowError("the turns cannot be told apart in the rendering", f"turn {turn}")
        return start, stop + len(self._end(after, tail))

    def _end(self, after: str, tail: str) -> str:
        """The end token of a turn, and the space before it; `tail` follows it where it is last.

        Where the last turn has an end of its own (Harmony), the others end as a user's turn does.
        Any other special token is the next turn's header.
        """
        end, last = self._closing(after), self._closing(tail)
        return end if last and end in (last, self.end_of_user) else ""

    def _closing(self, text: str) -> str:
        match = self.closing.match(text)
        return match[0] if match else ""

    def _around(self, messages: list[Message], turn: int, sentinel: str) -> tuple[str, str]:
        before, *after = self.render(messages).split(sentinel)
        if len(after) != 1:
            times = f"turn {turn} appears {len(after)} times"
            raise RowError("the chat template does not render every turn once", times)
        return before, after[0]

    def _check_rendered(self, messages: list[Message], sentinel: str) -> None:
        """The context must be in the text too: a template may leave out roles it does not know."""
        marked = [
            message
            if message["role"] == "assistant" or not message["content"]
            else {**message, "content": f"{sentinel}{turn}."}
            for turn, message in enumerate(messages)
        ]
        text = self.render(marked)
        for turn, (message, mark) in enumerate(zip(messages, marked, strict=True)):
            if mark is not message and mark["content"] not in text:
                detail = f"turn {turn}, of role {message['role']}, is left out"
                raise RowError("the chat template does not render every turn once", detail)

    def _check_tools(self, messages: list[Message], text: str) -> None:
        """Tools and calls must be in the text as well: many templates know of neither."""
        reason = "the chat template does not render tools and their calls"
        if self.tools and self.offering([]).render(messages) == text:
            raise RowError(reason, "the tools are left out")
        for turn, message in enumerate(messages):
            if "tool_calls" in message:
                silent = {key: value for key, value in message.items() if key != "tool_calls"}
                if self.render([*messages[:turn], silent, *messages[turn + 1 :]]) == text:
                    raise RowError(reason, f"the calls of turn {turn} are left out")

    def _check_markers(self, messages: list[Message]) -> None:
        said = [("the tools", self.tools)] if self.tools else []
        for turn, message in enumerate(messages):
            for key in ("content", "reasoning_content", "tool_calls"):
                said += [(f"turn {turn}", message[key])] if message.get(key) else []
        for place, what in said:
            text = what if isinstance(what, str) else json.dumps(what, ensure_ascii=False)
            special = self.special.search(text)
            if found := [special[0]] if special else [h for h in self.headers if h in text]:
                detail = f"{place} contains {found[0]!r}"
                raise RowError("its text contains the chat template's own markers", detail)

    def _headers(self, tokens: re.Pattern[str]) -> list[str]:
        """Role headers that are plain text, such as `[INST]`, rather than special tokens."""
        roles = ["system", "user", "assistant", "user", "assistant"]
        for chosen in (roles, roles[1:]):
            try:
                text = self.render([{"role": r, "content": "SpecCompatTurn"} for r in chosen])
            except RowError:
                continue
            pieces = (piece.strip() for piece in re.split(f"SpecCompatTurn|{tokens.pattern}", text))
            return sorted({p for p in pieces if re.search(r"\w", p) and re.search(r"[^\w\s]", p)})
        return []

    def _end_of(self, *roles: str) -> str:
        """What ends the last of these turns; empty where nothing does, or the template refuses."""
        try:
            text = self.render([{"role": role, "content": "SpecCompatTurn"} for role in roles])
        except RowError:
            return ""
        return self._closing(text.rpartition("SpecCompatTurn")[2])

    def _by_offsets(self, text: str, spans: list[Span]) -> tuple[list[int], list[int]]:
        encoding = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        spoken = bytearray(len(text) + 1)
        for start, stop in spans:
            spoken[start:stop] = b"\1" * (stop - start)
        mask, last = [], 0
        for begin, end in encoding["offset_mapping"]:
            # Some tokenizers trim the white space off the offsets, and leave none of it. A token
            # that begins before the turn does holds some of the header: no model writes it.
            mask.append(spoken[begin if begin < end else last])
            last = end
        return encoding["input_ids"], mask

    def _by_ids(self, text: str, spans: list[Span]) -> tuple[list[int], list[int]]:
        ids = self._ids(text)
        mask = [0] * len(ids)
        for span in spans:
            start, stop = (self._place(text, ids, border) for border in span)
            mask[start:stop] = [1] * (stop - start)
        return ids, mask

    def _place(self, text: str, ids: list[int], border: int) -> int:
        """Without offsets: the text on one side of a border must by itself give its tokens.

        The side before it does not where a tokenizer splits white space by what follows.
        """
        before = self._ids(text[:border])
        if ids[: len(before)] == before:
            return len(before)
        place = len(ids) - len(after := self._ids(text[border:]))
        if ids[place:] == after:
            return place
        around = repr(text[max(0, border - 10) : border + 10])
        raise RowError("a token reaches across the border of a turn", around)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _any_of(words: set[str]) -> re.Pattern[str]:
    """Matches any of the words, the longest first; never, without words."""
    return re.compile(
        "|".join(map(re.escape, sorted(words - {""}, key=len, reverse=True))) or r"(?!)"
    )
