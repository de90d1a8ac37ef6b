"""Which added tokens are control markup, and how text from outside is kept from becoming it.

A chat template writes markup such as `<|im_start|>`; text that a client sends must never turn into the ids of
that markup, whatever it contains. Control tokens are all "special" added tokens and every other added token
that is written like a tag (`<think>`, `[TOOL_CALLS]`). Other added tokens (runs of spaces, say) are ordinary
vocabulary and may appear in anyone's text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from castiron.server.json_types import Json

# Unicode noncharacters: never assigned, so they are in no honest text and in no vocabulary.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDE0))
# keys that templates look up by name
FORMAT_KEYS = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments"),
        *(
            "reasoning_content",
            "parameters",
            "description",
            "properties",
            "required",
            "items",
            "enum",
            "strict",
        ),
    )
)
_TAG = re.compile(r"\s*(<.+>|\[.+\])\s*", re.DOTALL)


@dataclass(frozen=True)
class ControlToken:
    token_id: int
    text: str
    special: bool  # left out of the text given to users; structural tokens (`<think>`) are kept
    eats_left: bool = False  # white space before it belongs to it (the tokenizer's "lstrip")
    eats_right: bool = False


def is_control(text: str, special: bool) -> bool:
    """Whether an added token is control markup rather than ordinary vocabulary."""
    return special or _TAG.fullmatch(text) is not None


class ControlTokens:
    """The control tokens of one tokenizer, with what is needed to find and to break them in text."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self.tokens = tuple(tokens)
        self.by_id = {token.token_id: token for token in self.tokens}
        self.by_text = {token.text: token for token in self.tokens}
        self.special_ids = frozenset(token.token_id for token in self.tokens if token.special)

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        return tuple(sorted({token.text for token in self.tokens if token.text}, key=len, reverse=True))

    @cached_property
    def _starts(self) -> re.Pattern[str] | None:
        """Matches, with no width, wherever a control token's text begins (overlapping ones too)."""
        if not self._texts:
            return None
        return re.compile("(?=(" + "|".join(re.escape(text) for text in self._texts) + "))")

    def split(self, text: str) -> list[str | ControlToken]:
        """`text` cut into control tokens (leftmost, then longest) and the text between them."""
        parts: list[str | ControlToken] = []
        last = 0
        for start, end in self._spans(text):
            if start > last:
                parts.append(text[last:start])
            parts.append(self.by_text[text[start:end]])
            last = end
        if last < len(text):
            parts.append(text[last:])
        return parts

    def _spans(self, text: str) -> list[tuple[int, int]]:
        if self._starts is None:
            return []
        spans: list[tuple[int, int]] = []
        for match in self._starts.finditer(text):
            if not spans or match.start() >= spans[-1][1]:
                spans.append((match.start(), match.start() + len(match[1])))
        return spans

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset(text[:end] for text in self._texts for end in range(1, len(text)))

    @cached_property
    def _suffixes(self) -> frozenset[str]:
        return frozenset(text[start:] for text in self._texts for start in range(1, len(text)))

    @cached_property
    def _longest(self) -> int:
        return len(self._texts[0]) if self._texts else 0

    def break_up(self, text: str, mark: str) -> str:
        """`text` with `mark` put into it so that no control token can be matched over any of its characters.

        Broken are whole control tokens, and pieces at either end (white space aside, which templates trim)
        that could become one together with the text beside them. Most text comes back as it is.
        """
        if self._starts is None or not text:
            return text
        cuts = {match.start() + 1 for match in self._starts.finditer(text)}
        core_start = len(text) - len(text.lstrip())
        core_end = len(text.rstrip())
        for start, end in {(0, len(text)), (core_start, core_end)}:
            core = text[start:end]
            if not core:
                continue
            if any(core in whole for whole in self._texts if len(core) < len(whole)):
                cuts.add(start)
                cuts.update(range(start + 1, end + 1))
                continue
            for length in range(1, min(self._longest, len(core)) + 1):
                if core[len(core) - length :] in self._prefixes:
                    cuts.add(end - length + 1)
                if core[:length] in self._suffixes:
                    cuts.add(start + length - 1)
        if not cuts:
            return text
        pieces = []
        last = 0
        for cut in sorted(cuts):
            pieces.append(text[last:cut])
            last = cut
        pieces.append(text[last:])
        return mark.join(pieces)

    def break_up_all(self, value: Json, mark: str) -> Json:
        """`break_up` on every string inside `value`, keys included but for those of the chat format."""
        if isinstance(value, str):
            return self.break_up(value, mark)
        if isinstance(value, list):
            return [self.break_up_all(item, mark) for item in value]
        if isinstance(value, dict):
            return {
                key if key in FORMAT_KEYS else self.break_up(key, mark): self.break_up_all(item, mark)
                for key, item in value.items()
            }
        return value


def unused_mark(text: str) -> str:
    """A noncharacter that `text` doesn't contain. Raises ValueError if it contains them all."""
    for mark in _MARKS:
        if mark not in text:
            return mark
    raise ValueError("the text contains every Unicode noncharacter from U+FDD0 to U+FDDF")
