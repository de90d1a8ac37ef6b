"""GGUF metadata becomes a config; keys that would change the math and aren't understood are refused."""

from typing import Any

import pytest

from castiron.models.config import ModelConfig
from castiron.models.registry import FAMILIES
from castiron.runtime.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 160,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 5,
    "tokenizer.ggml.tokens": ["a", "b", "<|im_end|>", "<|eot_id|>", "c"],
    "tokenizer.ggml.token_type": [1, 1, 3, 1, 1],
    "tokenizer.ggml.eos_token_id": 4,
    "tokenizer.ggml.eot_token_id": 1,
}
TENSORS = ("token_embd.weight", "output.weight", "blk.0.attn_q.weight")


def parse(changes: dict[str, Any], tensors: tuple[str, ...] = TENSORS) -> ModelConfig:
    family = FAMILIES.by_name["llama"]
    metadata = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    return family.parse_config(family.gguf_config(metadata, tensors))


def test_keys_are_translated() -> None:
    config = parse({})
    assert (config.num_layers, config.hidden_size, config.num_kv_heads, config.head_dim) == (2, 64, 2, 16)
    assert config.rope.theta == 100000.0 and config.rms_norm_eps == 1e-5
    assert not config.tie_word_embeddings and not config.qkv_bias


def test_presence_of_tensors_states_ties_and_biases() -> None:
    assert parse({}, ("token_embd.weight",)).tie_word_embeddings
    assert parse({}, (*TENSORS, "blk.0.attn_q.bias")).qkv_bias


def test_ends_are_eos_eot_and_control_tokens_that_end_a_turn() -> None:
    assert parse({}).eos_token_ids == (4, 1, 2)  # "<|eot_id|>" is plain text here


def test_the_vocabulary_size_may_come_from_the_tokens() -> None:
    assert parse({"llama.vocab_size": None}).vocab_size == 5


def test_rope_scaling_is_translated() -> None:
    linear = parse({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).rope
    assert (linear.kind, linear.factor) == ("linear", 4.0)
    assert parse({"llama.rope.scale_linear": 2.0}).rope.factor == 2.0
    assert parse({"llama.rope.scaling.type": "none"}).rope.kind == "default"
    yarn = parse(
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 128,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
        }
    ).rope
    assert (yarn.kind, yarn.factor, yarn.original_max_position_embeddings) == ("yarn", 4.0, 128)
    assert yarn.beta_fast == 16.0


def test_equal_values_per_layer_are_one_value() -> None:
    assert parse({"llama.attention.head_count_kv": [2, 2]}).num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.attention.sliding_window": 128}, "attention.sliding_window"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"llama.attention.head_count_kv": [2, 4]}, "same value for every layer"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.value_length": 32}, "value_length"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({"llama.embedding_length": None}, "no llama.embedding_length"),
        ({"llama.attention.head_count": 0}, "attention.head_count = 0, expected a positive"),
        ({"llama.attention.head_count": "4"}, "attention.head_count = '4'"),
        ({"llama.block_count": 2.5}, "num_hidden_layers = 2.5"),
        ({"llama.attention.head_count_kv": []}, "same value"),
        ({"llama.rope.freq_base": "big"}, "rope_theta = 'big'"),
        ({"tokenizer.ggml.tokens": 3}, "tokens = 3, expected an array"),
        ({"tokenizer.ggml.eos_token_id": 5}, "below vocab_size = 5"),
    ],
)
def test_what_would_change_the_math_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(changes)
