"""Our ids against llama.cpp's, on SmolLM2's vocabulary read with each pre-tokenizer's name.

llama_cpp_ids.json holds what llama_tokenize (llama.cpp of llama-cpp-python 0.3.36, add_special off) gave for
every text of corpus.json, with tokenizer.ggml.pre replaced: "ids" with parse_special, "plain_ids" without it
where that differs. The vocabulary is the real one, so a wrong split almost always shows as other ids.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from castiron.builder.checkpoint.gguf_header import read_gguf_header
from castiron.builder.tokenizer.gguf_bpe import build_bpe
from castiron.builder.tokenizer.gguf_vocabulary import read_vocabulary

FOLDER = Path(__file__).parent
CORPUS: list[str] = json.loads((FOLDER / "corpus.json").read_text())
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "llama_cpp_ids.json").read_text())
# The tokenizers of Qwen2 normalize to NFC first, as their tokenizer.json says; llama.cpp doesn't.
DIFFERENCES = {"qwen2": {"cafe\u0301 vs café", "Zalgo: Z\u0351\u036b\u0343a\u0307l\u0329g\u0326o"}}


@pytest.fixture(scope="module")
def metadata(smollm2_gguf: Path) -> dict[str, Any]:
    return read_gguf_header(smollm2_gguf).metadata


def build(metadata: dict[str, Any], pre: str) -> Tokenizer:
    return build_bpe(read_vocabulary("smollm2", metadata), metadata | {"tokenizer.ggml.pre": pre})


@pytest.mark.parametrize("pre", EXPECTED)
def test_ids_equal_llama_cpps_but_for_listed_differences(metadata: dict[str, Any], pre: str) -> None:
    tokenizer = build(metadata, pre)
    differing = set()
    for index, (text, expected) in enumerate(zip(CORPUS, EXPECTED[pre]["ids"], strict=True)):
        tokenizer.encode_special_tokens = False
        if tokenizer.encode(text, add_special_tokens=False).ids != expected:
            differing.add(text)
        tokenizer.encode_special_tokens = True  # control tokens are text
        plain = EXPECTED[pre]["plain_ids"].get(str(index), expected)
        if tokenizer.encode(text, add_special_tokens=False).ids != plain:
            differing.add(text)
    assert differing == DIFFERENCES.get(pre, set())


def test_the_corpus_tells_the_pre_tokenizers_apart() -> None:
    names = list(EXPECTED)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert EXPECTED[one]["ids"] != EXPECTED[other]["ids"], (one, other)


@pytest.mark.parametrize("alias", ["starcoder", "refact"])
def test_aliases_split_as_smollm(metadata: dict[str, Any], alias: str) -> None:
    tokenizer = build(metadata, alias)
    assert [tokenizer.encode(text).ids for text in CORPUS] == EXPECTED["smollm"]["ids"]


def test_decoding_gives_the_text_back(metadata: dict[str, Any]) -> None:
    tokenizer = build(metadata, "smollm")
    lost = [
        text for text in CORPUS if tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) != text
    ]
    assert lost == []
