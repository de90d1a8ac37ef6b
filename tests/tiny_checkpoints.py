"""Tiny Hugging Face checkpoints in which every tensor is random, so that any mistake shows in the logits.

transformers' own initialisation blinds a comparison (all norm weights 1, all biases 0, near-uniform
attention). Here norm weights are 1 +- 0.3, biases are far from 0, attention scores have a spread of about 2
and logits one of about 2, and rms_norm_eps is large enough to matter.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.utils import logging as transformers_logging

ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_EOS, _BOS = 256, 257  # after the 256 byte tokens
transformers_logging.disable_progress_bar()


def save_tiny_checkpoint(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope: str | Mapping[str, Any] = "default",
    rope_theta: float = 1000.0,
    dtype: str = "f32",
    sharded: bool = False,
    with_tokenizer: bool = True,
    hidden_size: int = 64,
    intermediate_size: int = 160,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = 307,
    max_position_embeddings: int = 1024,
    **config_overrides: Any,
) -> Path:
    """Write config.json, generation_config.json, safetensors (and a byte-level tokenizer) into `folder`.

    architecture: "llama" or "qwen2" (which always has q, k, v biases). rope: a key of ROPE_SCALINGS or the
    rope parameters themselves. dtype: "f32", "f16" or "bf16" on disk. sharded: several safetensors files and
    an index. The same arguments always give the same bytes. Returns `folder`.
    """
    rope_parameters = dict(ROPE_SCALINGS[rope] if isinstance(rope, str) else rope)
    rope_parameters.setdefault("rope_theta", rope_theta)
    common: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 0.05,
        "rope_parameters": rope_parameters,
        "tie_word_embeddings": tied,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "pad_token_id": _EOS,
    } | config_overrides
    if head_dim is not None:
        common["head_dim"] = head_dim
    if architecture == "llama":
        config = LlamaConfig(attention_bias=attention_bias, mlp_bias=mlp_bias, **common)
    elif architecture == "qwen2":
        assert not attention_bias and not mlp_bias, "qwen2 has no such options"
        config = Qwen2Config(**common)
    else:
        raise ValueError(f"architecture is {architecture}, expected llama or qwen2")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model, seed)
    model = model.to(_DTYPES[dtype])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    if with_tokenizer:
        _save_byte_tokenizer(folder)
    return folder


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Fill every parameter of the model in place, by its role (see the module's docstring)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1 + 0.3 * noise
            elif name.endswith(".bias"):
                value = 0.4 * noise
            elif "embed_tokens" in name or "lm_head" in name:
                # tied or not, logits = x . w with |x|^2 about hidden_size: a spread of about 2
                value = noise * 2 / parameter.shape[1] ** 0.5
            else:
                gain = 1.6 if ("q_proj" in name or "k_proj" in name) else 1.0
                value = noise * gain / parameter.shape[1] ** 0.5
            parameter.copy_(value)
    model.tie_weights()


def load_reference(folder: Path) -> PreTrainedModel:
    """The checkpoint as transformers runs it, in float32 with plain attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits float32 [len(token_ids), vocab] of one sequence."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def _save_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: one token a byte, then the two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    assert tokenizer.token_to_id("<|end|>") == _EOS and tokenizer.token_to_id("<|start|>") == _BOS
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
