"""A GGUF's BPE vocabulary becomes a tokenizer, or an error that names what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import save_tiny_checkpoint
from tiny_gguf import tokenizer_metadata, write_tiny_gguf
from tokenizers import Tokenizer

from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.tokenizer import TokenizerFiles, build_tokenizer
from castiron.runtime.errors import CheckpointError

VOCAB = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tiny"
    return save_tiny_checkpoint(path, num_layers=1, vocab_size=VOCAB, with_tokenizer=False)


def build(folder: Path, tmp_path: Path, changes: dict[str, Any], pre: str = "gpt-2") -> TokenizerFiles:
    path = write_tiny_gguf(folder, tmp_path / "tiny.gguf", pre=pre, metadata=changes)
    with open_checkpoint(path) as checkpoint:
        return build_tokenizer(checkpoint)


def test_members_hold_the_tokenizer_and_what_serving_needs(folder: Path, tmp_path: Path) -> None:
    files = build(folder, tmp_path, {"tokenizer.chat_template": "{{ messages }}"})
    assert set(files.members) == {
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/chat_template.jinja",
    }
    assert files.members["tokenizer/chat_template.jinja"] == b"{{ messages }}"
    tokenizer = Tokenizer.from_buffer(files.members["tokenizer/tokenizer.json"])
    ids = tokenizer.encode("hello the <|end|>").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["hello", "Ġthe", "Ġ", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello the <|end|>"
    assert (files.bos_token_id, files.eos_token_ids, files.generation_defaults) == (257, (256,), {})
    assert files.vocab_size == 265  # unused tokens don't count
    assert json.loads(files.members["tokenizer/tokenizer_config.json"]) == {
        "bos_token": "<|start|>",
        "bos_token_id": 257,
        "eos_token": "<|end|>",
        "eos_token_ids": [256],
        "pad_token": None,
        "pad_token_id": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "model_max_length": 1024,
        "added_tokens": [
            {"id": 256, "content": "<|end|>", "special": True, "structural": True},
            {"id": 257, "content": "<|start|>", "special": True, "structural": True},
        ],
    }


def test_unused_tokens_never_come_out_of_text(folder: Path, tmp_path: Path) -> None:
    files = build(folder, tmp_path, {}, pre="llama-bpe")  # takes whole pieces that are tokens
    tokenizer = Tokenizer.from_buffer(files.members["tokenizer/tokenizer.json"])
    assert max(tokenizer.encode("[PAD0] [PAD20]").ids) < 256


def test_user_defined_tokens_are_whole_but_not_special(folder: Path, tmp_path: Path) -> None:
    metadata = tokenizer_metadata(VOCAB)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens[270:273], types[270:273] = ["<think>", "<b>", "<|eot_id|>"], [4, 4, 4]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    files = build(folder, tmp_path, changes)
    tokenizer = Tokenizer.from_buffer(files.members["tokenizer/tokenizer.json"])
    assert tokenizer.encode("<think><b><|eot_id|>").ids == [270, 271, 272]
    config = json.loads(files.members["tokenizer/tokenizer_config.json"])
    marks = {t["content"]: (t["special"], t["structural"]) for t in config["added_tokens"]}
    assert marks["<think>"] == (False, True)
    assert marks["<b>"] == (False, False)
    assert marks["<|eot_id|>"] == (False, True)
    assert files.eos_token_ids == (256, 272)


@pytest.mark.parametrize("key", ["eot", "eom"])
def test_further_end_tokens_of_the_file_stop_too(folder: Path, tmp_path: Path, key: str) -> None:
    assert build(folder, tmp_path, {f"tokenizer.ggml.{key}_token_id": 258}).eos_token_ids == (256, 258)


def test_bos_follows_the_file_else_the_family(folder: Path, tmp_path: Path) -> None:
    def adds_bos(changes: dict[str, Any], pre: str) -> bool:
        files = build(folder, tmp_path, changes, pre)
        return bool(json.loads(files.members["tokenizer/tokenizer_config.json"])["add_bos_token"])

    assert adds_bos({"tokenizer.ggml.add_bos_token": True}, "qwen2")
    assert not adds_bos({"tokenizer.ggml.add_bos_token": False}, "llama-bpe")


def tokens_with(position: int, token: str) -> list[str]:
    tokens: list[str] = tokenizer_metadata(VOCAB)["tokenizer.ggml.tokens"]
    return [*tokens[:position], token, *tokens[position + 1 :]]


DAMAGED = {
    "unknown pre-tokenizer": ({"tokenizer.ggml.pre": "qwen99"}, "'qwen99', expected one of deepseek"),
    "default pre-tokenizer": ({"tokenizer.ggml.pre": "default"}, "'default', expected one of"),
    "unknown model": ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
    "types too few": ({"tokenizer.ggml.token_type": [1] * 299}, "300 tokens but 299 token types"),
    "type 9": ({"tokenizer.ggml.token_type": [1] * 299 + [9]}, "token type 9"),
    "eos out of range": ({"tokenizer.ggml.eos_token_id": 300}, "eos_token_id is 300, but there are 300"),
    "bos out of range": ({"tokenizer.ggml.bos_token_id": 2**31}, "bos_token_id is 2147483648"),
    "tokens too many": (
        {"tokenizer.ggml.tokens": ["x"] * 301, "tokenizer.ggml.token_type": [1] * 301},
        "301 tokens, but token_embd.weight has 300 rows",
    ),
    "token twice": ({"tokenizer.ggml.tokens": tokens_with(259, "a")}, "a token appears twice"),
    "byte token gone": ({"tokenizer.ggml.tokens": tokens_with(32, "zz")}, "has no token for 'A'"),
    "merge of one": ({"tokenizer.ggml.merges": ["hello"]}, "merge 0 is 'hello'"),
    "merge of unknown": ({"tokenizer.ggml.merges": ["h e", "q zz"]}, "merge 1 is 'q zz'"),
    "merge into unknown": ({"tokenizer.ggml.merges": ["q q"]}, "merge 0 is 'q q'"),
    "bos wanted, none there": (
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0xFFFFFFFF},
        "bos_token_id is missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_vocabulary_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    changes, message = DAMAGED[name]
    with pytest.raises(CheckpointError) as caught:
        build(folder, tmp_path, changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_smollm2_ends_turns_and_adds_no_bos(smollm2_gguf: Path) -> None:
    with open_checkpoint(smollm2_gguf) as checkpoint:
        files = build_tokenizer(checkpoint)
    config = json.loads(files.members["tokenizer/tokenizer_config.json"])
    assert (files.vocab_size, files.bos_token_id, files.eos_token_ids) == (49152, 1, (2, 0))
    assert (config["eos_token"], config["add_bos_token"], config["model_max_length"]) == (
        "<|im_end|>",
        False,
        8192,
    )
    assert len(config["added_tokens"]) == 17
    assert b"<|im_start|>" in files.members["tokenizer/chat_template.jinja"]
