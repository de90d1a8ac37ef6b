"""GGUF metadata of decoder models in Hugging Face's words. Key names: ggml's docs/gguf.md.

An architecture key that isn't translated and isn't known to be harmless is an error: it may change the math.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from castiron.runtime.errors import CheckpointError

# <arch>.<key> -> Hugging Face config field
_RENAMED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
}
_OPTIONAL = {"attention.head_count_kv", "attention.key_length", "vocab_size"}
_READ_OTHERWISE = {
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scale_linear",  # old name of rope.scaling.factor with type linear
}
_HARMLESS = {"tensor_data_layout", "rope.scaling.finetuned"}
# value -> what a decoder computes anyway
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
}
# control tokens that end a turn in the chat formats of llama-like models
_END_OF_TURN_TOKENS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "<|end_of_text|>", "<end_of_utterance>",
))  # fmt: skip
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type


def decoder_gguf_config(
    architecture: str, metadata: Mapping[str, Any], tensor_names: Collection[str]
) -> dict[str, Any]:
    """GGUF metadata of a llama-like model as a Hugging Face config dict.

    What GGUF states by a tensor's presence (an own lm_head, biases) becomes a field too. Raises
    CheckpointError for a missing or unknown key.
    """
    prefix = architecture + "."
    keys = {name[len(prefix) :]: value for name, value in metadata.items() if name.startswith(prefix)}
    _check_keys(prefix, keys)
    config: dict[str, Any] = {
        field: _scalar(prefix + key, keys[key]) for key, field in _RENAMED.items() if key in keys
    }
    tokens = _array(metadata, "tokenizer.ggml.tokens")
    if "vocab_size" not in config and tokens:
        config["vocab_size"] = len(tokens)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if key in keys and keys[key] != head_dim:
            raise CheckpointError(
                f"GGUF says {prefix}{key} = {keys[key]!r}, expected the head size {head_dim}"
            )
    config["rope_parameters"] = _rope_parameters(prefix, keys)
    config["tie_word_embeddings"] = "output.weight" not in tensor_names
    config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    config["mlp_bias"] = "blk.0.ffn_down.bias" in tensor_names
    if "tokenizer.ggml.bos_token_id" in metadata:
        config["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    config["eos_token_id"] = gguf_eos_token_ids(metadata)
    return config


def gguf_eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end an answer: the file's eos, eot and eom, and control tokens known to end a turn."""
    ids = [
        metadata[key]
        for key in (
            "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.eom_token_id",
        )
        if key in metadata
    ]
    tokens = _array(metadata, "tokenizer.ggml.tokens")
    types = _array(metadata, "tokenizer.ggml.token_type")
    ids += [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL_TOKEN and isinstance(token, str) and token in _END_OF_TURN_TOKENS
    ]
    return list(dict.fromkeys(ids))


def _rope_parameters(prefix: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp's rope keys as rope_parameters."""
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10000.0)}
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    if "rope.scaling.type" not in keys and factor not in (0.0, 1.0):
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return result
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"GGUF says {prefix}rope.scaling.type = {kind!r}, expected none, linear or yarn"
        )
    result |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for key, field in (
            ("rope.scaling.original_context_length", "original_max_position_embeddings"),
            ("rope.scaling.yarn_beta_fast", "beta_fast"),
            ("rope.scaling.yarn_beta_slow", "beta_slow"),
        ):
            if key in keys:
                result[field] = keys[key]
        attention_factor = keys.get("rope.scaling.attn_factor", 1.0)
        if attention_factor != 1.0:
            # llama.cpp multiplies it with yarn's own scaling; Hugging Face's field is the product
            raise CheckpointError(
                f"GGUF says {prefix}rope.scaling.attn_factor = {attention_factor!r}, expected 1.0"
            )
    return result


def _check_keys(prefix: str, keys: Mapping[str, Any]) -> None:
    missing = [key for key in _RENAMED if key not in keys and key not in _OPTIONAL]
    if missing:
        raise CheckpointError(f"GGUF has no {prefix}{missing[0]}, which the architecture needs")
    for key, value in keys.items():
        if key in _RENAMED or key in _READ_OTHERWISE or key in _HARMLESS:
            continue
        if key not in _FIXED:
            raise CheckpointError(f"GGUF key {prefix}{key} = {value!r} is unknown and may change the math")
        if value not in _FIXED[key]:
            raise CheckpointError(
                f"GGUF says {prefix}{key} = {value!r}, castiron computes {_FIXED[key][0]!r}"
            )


def _scalar(name: str, value: Any) -> Any:
    """A positive number; a per-layer array becomes its one value. Raises CheckpointError otherwise."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not 0 < v < 1 << 31 for v in values):
        raise CheckpointError(f"GGUF says {name} = {_short(value)}, expected a positive number")
    if len(set(values)) != 1:
        raise CheckpointError(f"GGUF says {name} = {_short(value)}, expected the same value for every layer")
    return values[0]


def _array(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = metadata.get(name, ())
    if not isinstance(value, list | tuple):
        raise CheckpointError(f"GGUF says {name} = {_short(value)}, expected an array")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
