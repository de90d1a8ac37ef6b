"""Byte-level BPE ("gpt2" in GGUF), rebuilt from its own definition with the tokenizers library."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from castiron.builder.tokenizer.gguf_vocabulary import CONTROL, UNKNOWN, UNUSED, USER_DEFINED, GgufVocabulary
from castiron.builder.tokenizer.pre_tokenizers import PRE_TOKENIZATIONS, PreTokenization, byte_alphabet

_PRINTABLE_ASCII = [chr(code) for code in range(33, 127)]


def pre_tokenization(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> PreTokenization:
    """The entry tokenizer.ggml.pre names. Raises CheckpointError, listing the known ones, for any other."""
    name = metadata.get("tokenizer.ggml.pre")
    entry = PRE_TOKENIZATIONS.get(name) if isinstance(name, str) else None
    if entry is None:
        got = "missing" if name is None else repr(name)
        raise vocabulary.fail(
            f"tokenizer.ggml.pre (the pre-tokenizer) is {got}, expected"
            f" one of {', '.join(sorted(PRE_TOKENIZATIONS))}:"
            " build from the Hugging Face folder instead"
        )
    return entry


def build_bpe(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a "gpt2" GGUF. Raises CheckpointError for unknown pre-tokenizers, damaged merges."""
    entry = pre_tokenization(vocabulary, metadata)
    # Unused ids are padding of the embedding; no text may become one of them.
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind != UNUSED
    }
    if len(ids) != len(vocabulary.types) - vocabulary.types.count(UNUSED):
        raise vocabulary.fail("a token appears twice in tokenizer.ggml.tokens")
    missing = [character for character in _PRINTABLE_ASCII if character not in ids]
    if missing or byte_alphabet_of(" ") not in ids:
        raise vocabulary.fail(
            f"the vocabulary has no token for {(missing or [' '])[0]!r}: not byte-level BPE, or damaged"
        )
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=_merges(vocabulary, metadata, ids), ignore_merges=entry.ignore_merges)
    )
    if entry.normalizer is not None:
        tokenizer.normalizer = entry.normalizer()
    tokenizer.pre_tokenizer = entry.splits()
    tokenizer.decoder = decoders.ByteLevel()
    add_special_tokens(tokenizer, vocabulary)
    return tokenizer


def byte_alphabet_of(character: str) -> str:
    """How byte-level BPE writes one ASCII character: itself if printable, else a stand-in (space is Ġ)."""
    code = ord(character)
    return character if 33 <= code < 127 else chr(code + 256)


def add_special_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Make control and user-defined tokens match in text as wholes; control and unknown ones are special."""
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
    ]
    tokenizer.add_tokens(added)


def _merges(
    vocabulary: GgufVocabulary, metadata: Mapping[str, Any], ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Merges in order of rank; a repeated one counts where it stands first."""
    lines = metadata.get("tokenizer.ggml.merges")
    if not lines:
        raise vocabulary.fail("tokenizer.ggml.merges is missing or empty")
    merges: dict[tuple[str, str], None] = {}
    for rank, line in enumerate(lines):
        left, space, right = line.partition(" ")
        if not (space and left in ids and right in ids and left + right in ids):
            raise vocabulary.fail(f"merge {rank} is {line!r}, expected two tokens whose union is a token")
        merges.setdefault((left, right))
    return list(merges)


assert byte_alphabet_of(" ") in byte_alphabet()
