"""SentencePiece BPE ("llama" in GGUF): merges follow from scores, unknown characters become bytes."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from castiron.builder.tokenizer.gguf_bpe import add_special_tokens
from castiron.builder.tokenizer.gguf_vocabulary import BYTE, CONTROL, UNUSED, GgufVocabulary

_SPACE = "\u2581"  # how SentencePiece writes a space


def build_sentencepiece(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a "llama" GGUF. Raises CheckpointError for missing scores or byte tokens.

    SentencePiece merges the neighbours whose union has the highest score, leftmost first: the same as BPE
    with every split of every token as a merge, ranked by score (transformers converts them so too).
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise vocabulary.fail("tokenizer.ggml.scores must have one number a token")
    if vocabulary.types.count(BYTE) != 256:
        raise vocabulary.fail(f"{vocabulary.types.count(BYTE)} byte tokens, expected 256")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise vocabulary.fail("tokenizer.ggml.remove_extra_whitespaces is set, which isn't supported")
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind != UNUSED
    }
    unknown = vocabulary.unknown_token_id
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(vocabulary, scores, ids),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_special_tokens(tokenizer, vocabulary)
    return tokenizer


def _merges(vocabulary: GgufVocabulary, scores: list[float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score first."""
    ranked = sorted(
        (i for i, kind in enumerate(vocabulary.types) if kind not in (BYTE, CONTROL, UNUSED)),
        key=lambda i: (-scores[i], i),
    )
    merges = []
    for i in ranked:
        token = vocabulary.tokens[i]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((left, right))
    return merges
