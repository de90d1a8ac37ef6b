"""What turns text into an engine's token ids and back: its tokenizer and its chat template, if any."""

import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_purpose import check_serves
from castiron.runtime.errors import EngineFormatError, RequestError
from castiron.server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from castiron.server.chat_prompt import ChatPrompter


class TextFront:
    """The tokenizer members of one engine file, loaded. The template is compiled when first needed."""

    def __init__(self, members: Mapping[str, bytes], bos_token_id: int | None) -> None:
        """Raises EngineFormatError if the engine has no usable tokenizer."""
        self.tokenizer = Tokenizer.from_members(members, bos_token_id)
        self._template_source = self._find_template(members)

    @classmethod
    def load(cls, engine_path: str | os.PathLike[str]) -> "TextFront":
        """Raises as EngineFile.open does, or EngineFormatError if there is no usable tokenizer in it, InputError for
        a tuning engine."""
        with EngineFile.open(engine_path) as engine:
            check_serves(engine)
            return cls(engine.tokenizer_members(), engine.manifest.model.bos_token_id)

    def _find_template(self, members: Mapping[str, bytes]) -> str | None:
        if "chat_template.jinja" in members:
            try:
                return members["chat_template.jinja"].decode()
            except UnicodeDecodeError as error:
                raise EngineFormatError(f"the engine's chat template is not UTF-8: {error}") from error
        template = self.tokenizer.config.chat_template
        if isinstance(template, list):  # several, by name
            by_name = {entry.get("name"): entry.get("template") for entry in template}
            return by_name.get("default")
        return template

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    @cached_property
    def prompter(self) -> "ChatPrompter":
        """Raises RequestError if the engine has no chat template, EngineFormatError for a broken one."""
        if self._template_source is None:
            raise RequestError(
                "this engine has no chat template: send a raw prompt (--raw, /v1/completions)", "messages"
            )
        from castiron.server.chat_prompt import ChatPrompter  # brings jinja2, which raw prompts don't need

        return ChatPrompter(self.tokenizer, self._template_source)
