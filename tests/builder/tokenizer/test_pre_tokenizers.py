"""Each pre-tokenizer cuts text where its family's definition says."""

import pytest

from castiron.builder.tokenizer.pre_tokenizers import PRE_TOKENIZATIONS

# text -> pieces in the byte alphabet (a space is written Ġ, a newline Ċ), for those who agree
CASES = [
    ("ab 12345", {
        "gpt-2": ["ab", "Ġ12345"],
        "smollm": ["ab", "Ġ", "1", "2", "3", "4", "5"],
        "llama-bpe": ["ab", "Ġ", "123", "45"],
        "qwen2": ["ab", "Ġ", "1", "2", "3", "4", "5"],
        "tekken": ["ab", "Ġ", "1", "2", "3", "4", "5"],
        "deepseek-v3": ["ab", "Ġ", "123", "45"],
    }),
    ("a   b", {
        "gpt-2": ["a", "ĠĠ", "Ġb"],
        "smollm": ["a", "ĠĠ", "Ġb"],
        "llama-bpe": ["a", "ĠĠ", "Ġb"],
        "qwen2": ["a", "ĠĠ", "Ġb"],
        "tekken": ["a", "ĠĠ", "Ġb"],
        "deepseek-v3": ["a", "ĠĠ", "Ġb"],
    }),
    ("x\n\n  y", {
        "gpt-2": ["x", "ĊĊĠ", "Ġy"],
        "smollm": ["x", "ĊĊĠ", "Ġy"],
        "llama-bpe": ["x", "ĊĊ", "Ġ", "Ġy"],
        "qwen2": ["x", "ĊĊ", "Ġ", "Ġy"],
        "tekken": ["x", "ĊĊ", "Ġ", "Ġy"],
        "deepseek-v3": ["x", "ĊĊ", "Ġ", "Ġy"],
    }),
    ("I'M camelCase(x);\n", {
        "gpt-2": ["I", "'", "M", "ĠcamelCase", "(", "x", ");", "Ċ"],
        "smollm": ["I", "'", "M", "ĠcamelCase", "(", "x", ");", "Ċ"],
        "llama-bpe": ["I", "'M", "ĠcamelCase", "(x", ");Ċ"],
        "qwen2": ["I", "'M", "ĠcamelCase", "(x", ");Ċ"],
        "tekken": ["I", "'M", "Ġcamel", "Case", "(x", ");Ċ"],
        "deepseek-v3": ["I", "'M", "ĠcamelCase", "(x", ");Ċ"],
    }),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_pieces_are_those_of_the_definition(text: str, expected: dict[str, list[str]]) -> None:
    pieces = {
        name: [piece for piece, _ in PRE_TOKENIZATIONS[name].splits().pre_tokenize_str(text)]
        for name in expected
    }
    assert pieces == expected


def test_runs_of_kana_and_han_are_pieces_of_their_own_for_deepseek() -> None:
    splits = PRE_TOKENIZATIONS["deepseek-v3"].splits()
    assert [span for _, span in splits.pre_tokenize_str("ab漢字かなcd")] == [(0, 2), (2, 6), (6, 8)]


def test_only_qwen_normalizes() -> None:
    with_normalizer = {name for name, entry in PRE_TOKENIZATIONS.items() if entry.normalizer is not None}
    assert with_normalizer == {"qwen2", "deepseek-r1-qwen"}
