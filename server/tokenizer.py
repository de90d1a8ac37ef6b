"""Text to token ids and back, from the tokenizer inside an engine file."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import Tokenizer as FastTokenizer

from castiron.runtime.errors import EngineFormatError, RequestError
from castiron.server.control_tokens import ControlToken, ControlTokens, is_control

_LONG_TEXT_CHARS = 1 << 15


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct, frozen=True):
    unk_token: str | None = None  # BPE, WordPiece, WordLevel
    unk_id: int | None = None  # Unigram


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The parts of tokenizer.json that are read here; the tokenizers library reads it all."""

    added_tokens: tuple[_AddedToken, ...] = ()
    model: _Model = _Model()


class TokenizerConfig(msgspec.Struct, frozen=True):
    """What is used of tokenizer_config.json."""

    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[dict[str, str]] | None = None

    def special_texts(self) -> dict[str, str]:
        """The named special tokens a chat template may use: {"bos_token": "<s>", ...}."""
        texts = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = getattr(self, name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                texts[name] = value
        return texts


class Tokenizer:
    """A tokenizer with three ways to encode: raw prompts, plain text, and rendered chats of both.

    Raw prompts (`encode_prompt`) are what the caller says the model shall read, so control markup in them is
    honoured. Anything a chat client sends goes through ChatPrompter, which uses `encode_markup` for what the
    template wrote and `encode_plain`, which never gives a control id (but the unknown token's), for the rest.
    """

    def __init__(
        self, tokenizer_json: bytes, config: TokenizerConfig | None = None, bos_token_id: int | None = None
    ) -> None:
        """Raises EngineFormatError if the JSON is not a tokenizer."""
        self.config = config or TokenizerConfig()
        self._json = tokenizer_json
        try:
            parts = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
            self._fast = FastTokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # the tokenizers library raises plain Exception
            reason = str(error).splitlines()[0]
            raise EngineFormatError(
                f"the engine's tokenizer.json can't be read ({reason}): rebuild the engine with build-engine"
            ) from error
        self.control = ControlTokens(
            ControlToken(token.id, token.content, token.special, token.lstrip, token.rstrip)
            for token in parts.added_tokens
            if is_control(token.content, token.special)
        )
        unknown_id = parts.model.unk_id
        if parts.model.unk_token is not None:
            unknown_id = self._fast.token_to_id(parts.model.unk_token)
        self._forbidden_in_text = self.control.by_id.keys() - {unknown_id}
        self._prefix_ids, self._suffix_ids = self._added_around(bos_token_id)

    @classmethod
    def from_members(cls, members: Mapping[str, bytes], bos_token_id: int | None) -> "Tokenizer":
        """From an engine file's tokenizer members. Raises EngineFormatError if there is no usable one."""
        if "tokenizer.json" not in members:
            raise EngineFormatError(
                "this engine has no tokenizer: use --prompt-ids, or build it from a checkpoint that has one"
            )
        config = TokenizerConfig()
        if "tokenizer_config.json" in members:
            try:
                config = msgspec.json.decode(members["tokenizer_config.json"], type=TokenizerConfig)
            except msgspec.DecodeError as error:
                raise EngineFormatError(
                    f"the engine's tokenizer_config.json can't be read: {error}"
                ) from error
        return cls(members["tokenizer.json"], config, bos_token_id)

    def _added_around(self, bos_token_id: int | None) -> tuple[list[int], list[int]]:
        """What the tokenizer's post-processor puts before and after a text."""
        bare = self._fast.encode("a", add_special_tokens=False).ids
        full = self._fast.encode("a", add_special_tokens=True).ids
        prefix: list[int] = []
        suffix: list[int] = []
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                prefix, suffix = full[:start], full[start + len(bare) :]
                break
        if self.config.add_bos_token and bos_token_id is not None and bos_token_id not in prefix:
            prefix = [bos_token_id, *prefix]
        return prefix, suffix

    @cached_property
    def _plain(self) -> FastTokenizer:
        """The same tokenizer, blind to control tokens. Made when first needed: few texts look like markup."""
        document = msgspec.json.decode(self._json, type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(document.get("added_tokens", b"[]"), type=list[dict[str, Any]])
        for token in added:
            token["special"] = token["id"] in self.control.by_id
        document["added_tokens"] = msgspec.Raw(msgspec.json.encode(added))
        plain = FastTokenizer.from_str(msgspec.json.encode(document).decode())
        plain.encode_special_tokens = True  # "special" tokens are read as the text they are
        return plain

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: control markup in it is honoured, and begin-of-text put in front if the
        tokenizer asks for it and the text doesn't already start with it.

        Raises RequestError for text that isn't Unicode (a lone surrogate).
        """
        ids = self.encode_markup(text)
        if ids[: len(self._prefix_ids)] != self._prefix_ids:
            ids = self._prefix_ids + ids
        return ids + self._suffix_ids

    def encode_markup(self, text: str) -> list[int]:
        """Ids of text in which control markup is honoured, nothing added. Raises RequestError as above."""
        return self._encode(self._fast, text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text none of which is markup: never a control id. Raises RequestError as above."""
        ids = self._encode(self._plain, text)
        if self._forbidden_in_text.isdisjoint(ids):
            return ids
        if len(text) < 2:  # a control token of one character: no other way to write it
            return [token_id for token_id in ids if token_id not in self._forbidden_in_text]
        # a vocabulary that holds control texts as ordinary pieces (Unigram): encode the halves apart
        half = len(text) // 2
        return self.encode_plain(text[:half]) + self.encode_plain(text[half:])

    @staticmethod
    def _encode(fast: FastTokenizer, text: str) -> list[int]:
        try:
            if len(text) >= _LONG_TEXT_CHARS:  # the batch call lets other threads run meanwhile
                return list(fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            return list(fast.encode(text, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the text contains a lone surrogate; expected valid Unicode") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; special tokens are left out unless asked for, ids without a token give nothing."""
        if skip_special_tokens and self.control.special_ids:
            special = self.control.special_ids
            token_ids = [token_id for token_id in token_ids if token_id not in special]
        return str(self._fast.decode(list(token_ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """One token alone as text, control tokens as written (for log probabilities)."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> list[int] | None:
        """The bytes a token stands for, or None if they can't be told from its text alone."""
        if token_id in self.control.by_id:
            return list(self.control.by_id[token_id].text.encode())
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return list(text.encode())
        piece = self._fast.id_to_token(token_id) or ""
        if len(piece) == 6 and piece.startswith("<0x"):  # byte fallback: "<0xE2>"
            return [int(piece[3:5], 16)]
        if all(char in _BYTE_OF_CHAR for char in piece):  # GPT-2 byte level
            return [_BYTE_OF_CHAR[char] for char in piece]
        return None


def _byte_of_char() -> dict[str, int]:
    """The inverse of GPT-2's byte-to-character map (openai/gpt-2, encoder.py): printable bytes stand for
    themselves, the others for characters from U+0100 on, in order."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in kept}
    others = (byte for byte in range(256) if byte not in set(kept))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()
