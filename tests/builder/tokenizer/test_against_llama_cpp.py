"""Our ids against llama.cpp's (llama_tokenize of llama-cpp-python 0.3.36, add_special off) on corpus.json.

llama_cpp_smollm2.json: with SmolLM2's own file. llama_cpp_pre_tokenizers.json: with a vocabulary trained on
the corpus without any splitting, so that its merges run across every boundary and a piece cut elsewhere shows
as other ids; read once under each pre-tokenizer's name. "ids" are with parse_special, "plain_ids" without it,
where that differs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import tokenizer_metadata
from tokenizers import Tokenizer

from castiron.builder.checkpoint.gguf_header import read_gguf_header
from castiron.builder.tokenizer.gguf_bpe import build_bpe
from castiron.builder.tokenizer.gguf_vocabulary import read_vocabulary

FOLDER = Path(__file__).parent
CORPUS: list[str] = json.loads((FOLDER / "corpus.json").read_text())
SMOLLM2: dict[str, Any] = json.loads((FOLDER / "llama_cpp_smollm2.json").read_text())
CROSSING: dict[str, Any] = json.loads((FOLDER / "llama_cpp_pre_tokenizers.json").read_text())
PRE_TOKENIZERS = [name for name in CROSSING if name != "merges"]
DECOMPOSED = {"cafe\u0301 vs café", "Zalgo: Z\u0351\u036b\u0343a\u0307l\u0329g\u0326o"}
DIFFERENCES = {
    # Qwen2's tokenizer.json normalizes to NFC first; llama.cpp doesn't.
    "qwen2": DECOMPOSED,
    # Tekken takes combining marks into words (\p{M}); llama.cpp's rewriting of it leaves them out.
    "tekken": DECOMPOSED | {"नमस्ते दुनिया", "ไทยไม่มีช่องว่าง"},
}


def crossing_metadata(pre: str) -> dict[str, Any]:
    tokens = tokenizer_metadata(258)["tokenizer.ggml.tokens"][:256]
    tokens += ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokens += dict.fromkeys(merge.replace(" ", "") for merge in CROSSING["merges"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.merges": CROSSING["merges"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }


def build(metadata: dict[str, Any]) -> Tokenizer:
    return build_bpe(read_vocabulary("x.gguf", metadata), metadata)


def differing(tokenizer: Tokenizer, expected: dict[str, Any]) -> set[str]:
    """Texts of the corpus that get other ids than llama.cpp gives, as a prompt or as plain text."""
    texts = set()
    for index, (text, ids) in enumerate(zip(CORPUS, expected["ids"], strict=True)):
        tokenizer.encode_special_tokens = False
        if tokenizer.encode(text, add_special_tokens=False).ids != ids:
            texts.add(text)
        tokenizer.encode_special_tokens = True  # control tokens are read as text
        plain_ids = expected["plain_ids"].get(str(index), ids)
        if tokenizer.encode(text, add_special_tokens=False).ids != plain_ids:
            texts.add(text)
    return texts


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> dict[str, Any]:
    return read_gguf_header(smollm2_gguf).metadata


def test_smollm2_gives_llama_cpps_ids(smollm2: dict[str, Any]) -> None:
    assert differing(build(smollm2), SMOLLM2) == set()


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_cuts_where_llama_cpp_does_but_for_listed_texts(pre: str) -> None:
    assert differing(build(crossing_metadata(pre)), CROSSING[pre]) == DIFFERENCES.get(pre, set())


@pytest.mark.parametrize("alias", ["starcoder", "refact"])
def test_aliases_cut_as_smollm(alias: str) -> None:
    assert differing(build(crossing_metadata(alias)), CROSSING["smollm"]) == set()


def test_the_corpus_tells_all_pre_tokenizers_apart() -> None:
    for i, one in enumerate(PRE_TOKENIZERS):
        for other in PRE_TOKENIZERS[i + 1 :]:
            assert CROSSING[one]["ids"] != CROSSING[other]["ids"], (one, other)


def test_decoding_gives_the_text_back(smollm2: dict[str, Any]) -> None:
    tokenizer = build(smollm2)
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
