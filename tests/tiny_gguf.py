"""Tiny GGUF checkpoints, written from tiny Hugging Face folders (tiny_checkpoints.py) as llama.cpp would."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from ggml_blocks import ggml_type, quantize_rows
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

SchemeChoice = str | Mapping[str, str] | Callable[[str, tuple[int, ...]], str]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
MERGES = ("Ġ t", "Ġt h", "Ġth e", "h e", "l l", "he ll", "hell o")
SPECIALS = ("<|end|>", "<|start|>")


def write_tiny_gguf(
    folder: Path,
    path: Path,
    scheme: SchemeChoice = "q8_0",
    *,
    pre: str = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
    skip: tuple[str, ...] = (),
) -> Path:
    """Write the checkpoint in `folder` (llama or qwen2, any dtype) as a GGUF file and return its path.

    scheme: of matrices; one name, a mapping from Hugging Face tensor names (others "f32"), or a function of
    name and shape. Vectors are always f32. K schemes need rows that are a multiple of 256, the others of 32.
    Rows of q and k are permuted for llama, as llama.cpp's converter does. The tokenizer has the 256 byte
    tokens, then SPECIALS (ids 256 and 257: eos and bos), then those MERGES the vocabulary has room for, then
    unused tokens. metadata: further or replaced values; skip: GGUF tensors left out.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    values = model_metadata(config) | tokenizer_metadata(config["vocab_size"], pre) | dict(metadata or {})
    for key, value in values.items():
        _add(writer, key, value)
    for hf_name, (name, array) in gguf_tensors(folder).items():
        if name in skip:
            continue
        chosen = _choose(scheme, hf_name, array.shape)
        rows = quantize_rows(chosen, array)
        if chosen in ("f32", "f16"):
            writer.add_tensor(name, rows.view(np.float32 if chosen == "f32" else np.float16))
        else:
            writer.add_tensor(name, rows, raw_dtype=ggml_type(chosen))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3" and "rope_freqs.weight" not in skip:
        writer.add_tensor("rope_freqs.weight", rope_factors(config, rope))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Hugging Face name -> (GGUF name, float32 values as GGUF orders them). Tied heads appear once."""
    config = json.loads((folder / "config.json").read_text())
    result = {}
    for file in sorted(folder.glob("*.safetensors")):
        for hf_name, tensor in load_file(file).items():
            array = tensor.float().numpy()
            if config["model_type"] == "llama" and ("q_proj" in hf_name or "k_proj" in hf_name):
                heads = config["num_attention_heads" if "q_proj" in hf_name else "num_key_value_heads"]
                array = permute_rope(array, heads)
            result[hf_name] = (gguf_name(hf_name), array)
    return result


def gguf_name(hf_name: str) -> str:
    """The name llama.cpp gives a tensor of a Hugging Face llama or qwen2."""
    if hf_name in _TOP_NAMES:
        return _TOP_NAMES[hf_name]
    _, _, layer, rest = hf_name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def permute_rope(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from split-half to pair-interleaved order, as llama.cpp's converter stores them."""
    shape = array.shape
    return array.reshape(num_heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)


def dequantized_state(folder: Path, path: Path) -> dict[str, np.ndarray]:
    """What the GGUF means in Hugging Face terms: float32 by Hugging Face name, q and k in split-half order.

    Read by the gguf package, not by the reader under test; load it into the folder's model for a reference.
    """
    config = json.loads((folder / "config.json").read_text())
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    state = {}
    for hf_name, (name, original) in gguf_tensors(folder).items():
        tensor = stored[name]
        rows = np.ascontiguousarray(tensor.data)
        array = gguf.quants.dequantize(rows, tensor.tensor_type).astype(np.float32).reshape(original.shape)
        if config["model_type"] == "llama" and ("q_proj" in hf_name or "k_proj" in hf_name):
            heads = config["num_attention_heads" if "q_proj" in hf_name else "num_key_value_heads"]
            array = array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        state[hf_name] = array
    return state


def model_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp's metadata for a config (llama3 rope needs the tensor of rope_factors too)."""
    arch = config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values: dict[str, Any] = {
        "general.name": "tiny",
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        f"{arch}.vocab_size": config["vocab_size"],
    }
    if arch == "llama":
        values["llama.rope.dimension_count"] = head_dim
    if head_dim * config["num_attention_heads"] != config["hidden_size"]:
        values[f"{arch}.attention.key_length"] = head_dim
        values[f"{arch}.attention.value_length"] = head_dim
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        values[f"{arch}.rope.scaling.type"] = kind
        values[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
    if kind == "yarn":
        values[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return values


def rope_factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> np.ndarray:
    """float32 [head_dim / 2]: what each rope frequency is divided by under llama3 scaling."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return np.where(smooth >= 1, 1.0, np.where(smooth <= 0, rope["factor"], factors)).astype(np.float32)


def tokenizer_metadata(vocab_size: int, pre: str = "gpt-2") -> dict[str, Any]:
    """A byte-level BPE vocabulary of `vocab_size` (at least 258) tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIALS]
    if vocab_size < len(tokens):
        raise ValueError(f"vocab_size is {vocab_size}, a byte vocabulary needs {len(tokens)}")
    merges = MERGES[: vocab_size - len(tokens)]
    types = [1] * 256 + [3] * len(SPECIALS) + [1] * len(merges)
    tokens += [merge.replace(" ", "") for merge in merges]
    unused = vocab_size - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(unused)],
        "tokenizer.ggml.token_type": types + [5] * unused,
        "tokenizer.ggml.merges": list(merges) or ["h e"],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.add_bos_token": False,
    }


def _choose(scheme: SchemeChoice, hf_name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return "f32"
    if isinstance(scheme, str):
        return scheme
    return scheme.get(hf_name, "f32") if isinstance(scheme, Mapping) else scheme(hf_name, shape)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
