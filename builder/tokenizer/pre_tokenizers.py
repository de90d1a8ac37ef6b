"""How byte-level BPE tokenizers split text before merging, by the name GGUF gives them (tokenizer.ggml.pre).

Each entry restates the tokenizer.json of the model family that introduced it; a name that isn't here is an
error, never a default. llama.cpp's names and its approximations: llama-vocab.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL
)


@dataclass(frozen=True)
class PreTokenization:
    """One family's way: an optional normalizer, the splits, and two facts of its BPE model."""

    splits: Callable[[], PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False  # a piece that is a token as a whole is taken as it is
    adds_bos: bool = False  # when the file doesn't say


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _split_by(*patterns: str) -> Callable[[], PreTokenizer]:
    def make() -> PreTokenizer:
        splits: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


_LLAMA3_PRE = PreTokenization(_split_by(_LLAMA3), ignore_merges=True, adds_bos=True)
_QWEN2_PRE = PreTokenization(_split_by(_QWEN2), normalizer=normalizers.NFC)

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "gpt-2": PreTokenization(_gpt2),
    "smollm": PreTokenization(_digits_then_gpt2),
    "starcoder": PreTokenization(_digits_then_gpt2),
    "refact": PreTokenization(_digits_then_gpt2),
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "llama-bpe": _LLAMA3_PRE,
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "tekken": PreTokenization(_split_by(_TEKKEN), ignore_merges=True, adds_bos=True),
    "deepseek-v3": PreTokenization(_split_by(r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3)),
}


def byte_alphabet() -> list[str]:
    """The 256 characters byte-level BPE writes bytes as."""
    return pre_tokenizers.ByteLevel.alphabet()
