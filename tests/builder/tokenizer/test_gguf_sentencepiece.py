"""SentencePiece vocabularies in GGUF give llama.cpp's ids, and text never becomes a control token.

llama_cpp_sentencepiece.json: a small vocabulary (after <unk>, <s>, </s> and the 256 byte tokens), and what
llama_tokenize (llama.cpp of llama-cpp-python 0.3.36) gave on corpus.json with and without the space prefix.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from castiron.builder.tokenizer.gguf_sentencepiece import build_sentencepiece
from castiron.builder.tokenizer.gguf_vocabulary import read_vocabulary
from castiron.runtime.errors import CheckpointError

FOLDER = Path(__file__).parent
CORPUS: list[str] = json.loads((FOLDER / "corpus.json").read_text())
FIXTURE: dict[str, Any] = json.loads((FOLDER / "llama_cpp_sentencepiece.json").read_text())


def metadata(has_prefix: bool = True) -> dict[str, Any]:
    tokens, scores, types = (list(column) for column in zip(*FIXTURE["vocabulary"], strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *tokens],
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }


def build(values: dict[str, Any]) -> Tokenizer:
    return build_sentencepiece(read_vocabulary("tiny", values), values)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_ids_equal_llama_cpps(has_prefix: bool) -> None:
    tokenizer = build(metadata(has_prefix))
    expected = FIXTURE["prefix" if has_prefix else "no prefix"]
    for index, (text, ids) in enumerate(zip(CORPUS, expected["ids"], strict=True)):
        tokenizer.encode_special_tokens = False
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        tokenizer.encode_special_tokens = True
        plain = expected["plain_ids"].get(str(index), ids)
        assert tokenizer.encode(text, add_special_tokens=False).ids == plain, text


def test_decoding_gives_the_text_back_without_its_prefix() -> None:
    tokenizer = build(metadata())
    for text in CORPUS:
        if "<" not in text:  # a space prefix follows every added token and stays
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_no_merges_of_text() -> None:
    values = metadata()
    values["tokenizer.ggml.tokens"][-2:] = ["</", "s>"]  # pieces whose union is the control token </s>
    tokenizer = build(values)
    tokenizer.encode_special_tokens = True
    assert 2 not in tokenizer.encode("a</s>").ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "scores must have one number a token"),
        ({"tokenizer.ggml.scores": None}, "scores must have one number a token"),
        ({"tokenizer.ggml.token_type": None}, "0 byte tokens, expected 256"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces is set"),
    ],
)
def test_incomplete_vocabulary_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(metadata() | changes)
