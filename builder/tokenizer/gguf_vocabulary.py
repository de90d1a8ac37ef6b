"""The vocabulary of a GGUF file, validated: tokens, their types, and the ids that mean something."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from castiron.runtime.errors import CheckpointError

# tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
_MAX_TYPE = 6

# Tokens that end a turn, by their text: GGUF carries no generation config. From the chat formats of the
# models that use them.
_END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek, with full-width bars
    }
)


@dataclass(frozen=True)
class GgufVocabulary:
    """Token texts by id, as stored."""

    source: str  # file name, for messages
    tokens: list[str]
    types: list[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the file's own first
    pad_token_id: int | None
    unknown_token_id: int | None

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {what}")


def read_vocabulary(source: str, metadata: Mapping[str, Any]) -> GgufVocabulary:
    """The vocabulary in GGUF metadata. Raises CheckpointError if it is missing or contradicts itself."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(
            f"{source}: tokenizer.ggml.tokens is missing or empty: the file has no tokenizer"
        )
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{source}: {len(tokens)} tokens but {len(types)} token types")
    unknown_types = sorted({kind for kind in types if not 0 <= kind <= _MAX_TYPE})
    if unknown_types:
        raise CheckpointError(f"{source}: token type {unknown_types[0]}, expected 0 to {_MAX_TYPE}")
    ids = {
        name: _token_id(source, metadata, name, len(tokens))
        for name in ("bos", "eos", "eot", "eom", "padding", "unknown")
    }
    ends = [ids["eos"], ids["eot"], ids["eom"]]
    ends += [
        i for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED) and tokens[i] in _END_OF_TURN
    ]
    return GgufVocabulary(
        source=source,
        tokens=tokens,
        types=types,
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        pad_token_id=ids["padding"],
        unknown_token_id=ids["unknown"],
    )


def _token_id(source: str, metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None or value in (0xFFFFFFFF, -1):  # how converters write "none"
        return None
    if not 0 <= value < num_tokens:
        raise CheckpointError(f"{source}: {key} is {value}, but there are {num_tokens} tokens")
    return int(value)
