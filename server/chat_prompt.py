r"""Messages to prompt token ids, so that markup can only come from the template.

Text a client sends must not become control ids, yet only the rendered whole shows where it went, and
templates trim, split and compare it. So the rendered text is made in up to three ways:

1. No text of the messages looks like a control token or like a piece of one: the template is rendered and
   encoded as everybody does it. This is nearly every request.
2. Otherwise every look-alike gets a mark inside (a Unicode noncharacter, `<\ufdd0|im_start|>`). Rendered with
   and without marks, the two texts must agree up to the marks, which proves that the template's logic didn't
   depend on the look-alikes. Then an unbroken control token is the template's, and all else is plain text.
3. If they don't agree, the template itself looks for that markup (Qwen3 cuts `<think>` out of past answers).
   Then the *template's* literals are tagged instead, where they are written out, and the messages left alone;
   that must again agree with the plain rendering. If even this fails, the marked text of 2 is used: safe,
   with the look-alikes read as ordinary text.

Roles are not text: the request schema allows a fixed set (and templates do build `<|role|>` from them).
What this can't see through is a template that assembles markup out of pieces it cuts from a message's middle.
"""

import re
import secrets
from functools import cached_property

import msgspec

from castiron.runtime.errors import RequestError
from castiron.server.chat_template import ChatTemplate, normalize_messages, one_line
from castiron.server.control_tokens import ControlToken, unused_mark
from castiron.server.json_types import Json, JsonObject
from castiron.server.tokenizer import Tokenizer


class ChatPrompter:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, template_source: str) -> None:
        """Raises EngineFormatError if the template can't be compiled."""
        self.tokenizer = tokenizer
        self._template = ChatTemplate(template_source, tokenizer.config.special_texts())
        self._tag = f"\ufdee{secrets.token_hex(8)}:"  # can't be guessed, so can't be sent

    def encode(
        self,
        messages: list[JsonObject],
        *,
        tools: list[JsonObject] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of the conversation. Raises RequestError for messages the template can't take."""
        messages = normalize_messages(messages)
        text = self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        try:
            mark = unused_mark(text + msgspec.json.encode((messages, tools)).decode())
        except ValueError as error:  # lone surrogates, too (UnicodeEncodeError is a ValueError)
            raise RequestError(
                f"the messages are not plain Unicode text: {one_line(error)}", "messages"
            ) from error
        control = self.tokenizer.control
        marked_messages = [
            {
                key: value if key == "role" else control.break_up_all(value, mark)
                for key, value in message.items()
            }
            for message in messages
        ]
        marked_tools = (
            None if tools is None else [_as_object(control.break_up_all(tool, mark)) for tool in tools]
        )
        if marked_messages == messages and marked_tools == tools:
            return self.tokenizer.encode_markup(text)
        marked = self._template.render(
            marked_messages, tools=marked_tools, add_generation_prompt=add_generation_prompt
        )
        if marked.replace(mark, "") == text:
            return self._encode_marked(marked, mark)
        tagged = self._tagged_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        parts = self._split_at_tags(tagged)
        if "".join(part if isinstance(part, str) else part.text for part in parts) == text:
            return self._encode_parts(parts)
        return self._encode_marked(marked, mark)

    def _encode_marked(self, marked: str, mark: str) -> list[int]:
        """Way 2: a control token without a mark in it is the template's."""
        parts = self.tokenizer.control.split(marked)
        return self._encode_parts(
            [part.replace(mark, "") if isinstance(part, str) else part for part in parts]
        )

    def _encode_parts(self, parts: list[str | ControlToken]) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, ControlToken):
                ids.append(part.token_id)
                continue
            before = parts[index - 1] if index > 0 else None
            after = parts[index + 1] if index + 1 < len(parts) else None
            if isinstance(before, ControlToken) and before.eats_right:
                part = part.lstrip()
            if isinstance(after, ControlToken) and after.eats_left:
                part = part.rstrip()
            ids += self.tokenizer.encode_plain(part)
        return ids

    # Way 3: a control token in a literal becomes "<U+FDEE><secret>:<index><U+FDEF>".

    @cached_property
    def _tagged_template(self) -> ChatTemplate:
        special_texts = self.tokenizer.config.special_texts()
        return ChatTemplate(self._template.source, special_texts, self._tag_literal)

    def _tag_literal(self, literal: str) -> str:
        parts = self.tokenizer.control.split(literal)
        return "".join(
            part if isinstance(part, str) else f"{self._tag}{part.token_id}\ufdef" for part in parts
        )

    def _split_at_tags(self, tagged: str) -> list[str | ControlToken]:
        pieces = re.split(re.escape(self._tag) + "([0-9]+)\ufdef", tagged)
        # re.split puts the groups, here token ids, at the odd places
        parts = [
            self.tokenizer.control.by_id[int(piece)] if index % 2 else piece
            for index, piece in enumerate(pieces)
        ]
        return [part for part in parts if part != ""]


def _as_object(value: Json) -> JsonObject:
    assert isinstance(value, dict)
    return value
