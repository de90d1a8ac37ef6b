"""Configs are read strictly: what changes the math is computed or refused, what doesn't is let through."""

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from castiron.models.config import ModelConfig
from castiron.models.registry import FAMILIES, FamilyRegistry
from castiron.models.rope import inverse_frequencies
from castiron.runtime.errors import CheckpointError

SMALL: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

# what transformers 4.x wrote for Llama-3.2-1B-Instruct
LLAMA_4X: dict[str, Any] = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings":
  131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}""")

# SmolLM2's, with other tools' notes
SMOLLM2_4X: dict[str, Any] = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
  "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false,
  "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
  "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}""")

QWEN2_4X: dict[str, Any] = json.loads("""{
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
  "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
  "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.43.1", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""")


def parse(family: str, raw: dict[str, Any]) -> ModelConfig:
    return FAMILIES.by_name[family].parse_config(raw)


def test_configs_as_transformers_4_saved_them_are_read() -> None:
    llama = parse("llama", LLAMA_4X)
    assert (llama.head_dim, llama.num_kv_heads, llama.rope.kind, llama.rope.factor) == (64, 8, "llama3", 32.0)
    assert llama.rope.theta == 500000.0 and llama.eos_token_ids == (128001, 128008, 128009)
    smollm2 = parse("llama", SMOLLM2_4X)
    assert (smollm2.rope.kind, smollm2.rope.theta, smollm2.head_dim) == ("default", 100000.0, 64)
    qwen2 = parse("qwen2", QWEN2_4X)
    assert qwen2.qkv_bias and not qwen2.o_bias and qwen2.rope.theta == 1000000.0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_everything_transformers_5_writes_is_read(family: str) -> None:
    config_class = {"llama": LlamaConfig, "qwen2": Qwen2Config}[family]
    raw = config_class(**SMALL).to_dict()
    config = parse(family, raw)
    assert (config.hidden_size, config.num_kv_heads, config.head_dim) == (64, 2, 16)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"attention_softcap": 50.0}, "attention_softcap"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"sliding_window": 128}, "sliding_window"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ("llama", {"hidden_size": 66}, "multiple of num_attention_heads"),
        ("llama", {"head_dim": 7}, "even"),
        ("llama", {"vocab_size": 1 << 40}, "vocab_size"),
        ("llama", {"num_hidden_layers": -1}, "num_hidden_layers"),
        ("llama", {"hidden_size": None}, "no hidden_size"),
        ("llama", {"hidden_size": "64"}, "hidden_size = '64'"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("llama", {"eos_token_id": 307}, "eos_token_id"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*each sequence's length"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "factor = -1.0"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "surprise": 1}}, "surprise"),
        ("llama", {"rope_scaling": "linear"}, "expected an object"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        ("llama", {"rope_theta": 0}, "rope_theta"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding-window",
        ),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ("qwen2", {"attention_bias": False}, "attention_bias"),
    ],
)
def test_what_would_change_the_math_is_refused_by_name(
    family: str, changes: dict[str, Any], message: str
) -> None:
    parse(family, SMALL)
    with pytest.raises(CheckpointError, match=message):
        parse(family, SMALL | changes)


def test_a_window_that_no_layer_uses_is_fine() -> None:
    raw = SMALL | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert parse("qwen2", raw).family == "qwen2"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
        },
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 1.3,
        },
    ],
)
def test_inverse_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    rope = {"rope_theta": 500000.0} | rope
    sizes = SMALL | {"head_dim": 128, "max_position_embeddings": 16384}
    ours = parse("llama", sizes | {"rope_parameters": dict(rope)}).rope
    theirs = LlamaConfig(**sizes, rope_parameters=dict(rope))
    if rope["rope_type"] == "default":
        expected = 1.0 / (500000.0 ** (torch.arange(0, 128, 2).float() / 128))
        scaling = 1.0
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, device="cpu")
    assert torch.equal(torch.from_numpy(inverse_frequencies(ours, 128)), expected)
    assert ours.attention_scaling == pytest.approx(scaling, rel=1e-12)


def test_a_family_registered_twice_is_refused() -> None:
    llama = FAMILIES.by_name["llama"]
    with pytest.raises(ValueError, match="llama is registered by"):
        FamilyRegistry((llama, llama))


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="LlamaForCausalLM, Qwen2ForCausalLM"):
        FAMILIES.for_hf_config({"architectures": ["MambaForCausalLM"], "model_type": "llama"})
    with pytest.raises(CheckpointError, match="expected one of llama, qwen2"):
        FAMILIES.for_gguf({"general.architecture": "gemma3"})
    assert FAMILIES.for_hf_config({"model_type": "qwen2"}).name == "qwen2"
