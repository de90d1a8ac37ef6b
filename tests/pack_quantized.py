"""Tiny checkpoints in compressed-tensors' "pack-quantized" int4 format, written element by element from tiny
Hugging Face folders (tiny_checkpoints.py), and the values they stand for."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEAR = re.compile(r".*_proj\.weight")


def quantization_config(
    group_size: int | None = 32, symmetric: bool = True, **changes: Any
) -> dict[str, Any]:
    """As llm-compressor writes it; `changes` of its top level, of "weights" where they name one of its fields."""
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": group_size, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "group",
        "symmetric": symmetric, "type": "int", "zp_dtype": None if symmetric else "torch.int8",
    }  # fmt: skip
    for name in set(changes) & set(weights):
        weights[name] = changes.pop(name)
    group = {
        "format": "pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": weights,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": "pack-quantized", "global_compression_ratio": None,
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
    } | changes  # fmt: skip


def write_pack_quantized(
    folder: Path,
    target: Path,
    group_size: int = 32,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write `folder`'s checkpoint with packed linears into `target`; also the tensors' meaning, float32 by name.

    group_size 0 is strategy "channel". changes: of quantization_config.
    """
    target.mkdir()
    for side in folder.iterdir():
        if side.name not in ("config.json", "model.safetensors"):
            (target / side.name).write_bytes(side.read_bytes())
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if LINEAR.fullmatch(name):
            pieces, meant[name] = pack_linear(tensor.float(), group_size, symmetric, scale_dtype)
            stored |= {
                f"{name.removesuffix('weight')}weight_{piece}": value for piece, value in pieces.items()
            }
        else:
            stored[name], meant[name] = tensor, tensor.float()
    save_file(stored, target / "model.safetensors")
    if group_size == 0:
        changes = {"strategy": "channel"} | changes
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config(group_size or None, symmetric, **changes)
    (target / "config.json").write_text(json.dumps(config))
    return target, meant


def pack_linear(
    weight: torch.Tensor, group_size: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """packed, scale, shape (and zero_point) of a float32 weight [n, k], and what they stand for, float32."""
    n, k = weight.shape
    groups = weight.reshape(n, -1, group_size or k)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    span = (high - low) / 15 if not symmetric else 2 * torch.maximum(high, -low) / 15
    scale = span.to(scale_dtype)
    # signed, from -8 to 7
    zero = torch.zeros_like(scale) if symmetric else (-8 - low / scale.float()).round().clamp(-8, 7)
    codes = (groups / scale.float()[..., None] + zero.float()[..., None]).round().clamp(-8, 7)
    exact_scale = scale.float().bfloat16().float()  # what the engine keeps of it
    values = exact_scale[..., None] * (codes - zero.float()[..., None])
    pieces = {
        "packed": _pack((codes.reshape(n, k) + 8).int()),
        "scale": scale,
        "shape": torch.tensor([n, k], dtype=torch.int64),
    }
    if not symmetric:
        pieces["zero_point"] = _pack((zero + 8).int().T.contiguous()).T.contiguous()
    return pieces, values.reshape(n, k)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """int32 [n, k] of 0..15 -> int32 [n, ceil(k / 8)]: element 8j + i in bits 4i.. of word j."""
    n, k = codes.shape
    padded = torch.zeros(n, -(-k // 8) * 8, dtype=torch.int64)
    padded[:, :k] = codes
    words = torch.zeros(n, padded.shape[1] // 8, dtype=torch.int64)
    for i in range(8):
        words |= padded[:, i::8] << (4 * i)
    return torch.where(words >= 2**31, words - 2**32, words).int()
