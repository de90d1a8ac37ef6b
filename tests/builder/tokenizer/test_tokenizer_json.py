"""The written tokenizer.json reads back as the same tokenizer, whatever form its merges are in."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from castiron.builder.tokenizer.tokenizer_json import tokenizer_json


def tokenizer_of(merges: list[tuple[str, str]]) -> Tokenizer:
    tokens = dict.fromkeys(
        [*"abcdeé\U0001f600 #", *(part for pair in merges for part in (*pair, "".join(pair)))]
    )
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return tokenizer


@pytest.mark.parametrize(
    ("merges", "as_text"),
    [
        ([("a", "b"), ("ab", "c"), ("é", "\U0001f600")], True),
        ([], True),
        ([("a", "b"), (" ", "a")], False),
        ([("a", "b"), ("c", " d")], False),
        ([("#version", "a"), ("a", "b")], False),
    ],
)
def test_it_reads_back_as_the_same_tokenizer(merges: list[tuple[str, str]], as_text: bool) -> None:
    tokenizer = tokenizer_of(merges)
    content = tokenizer_json(tokenizer)
    written = json.loads(content)["model"]["merges"]
    assert written == ([f"{a} {b}" for a, b in merges] if as_text else [[a, b] for a, b in merges])
    assert Tokenizer.from_buffer(content).to_str() == tokenizer.to_str()


def test_a_model_without_merges_is_written_too() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.5)], unk_id=0))
    assert Tokenizer.from_buffer(tokenizer_json(tokenizer)).to_str() == tokenizer.to_str()
