"""Tiny checkpoints in compressed-tensors' "float-quantized" format, or of the older method "fp8", written from tiny
Hugging Face folders (tiny_checkpoints.py), and the values they stand for."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEAR = re.compile(r".*_proj\.weight")
INPUT_SCALE = 0.02  # times 448: about 9, a little more than activations of tiny checkpoints reach


def quantization_config(per_channel: bool = True, static: bool = False, **changes: Any) -> dict[str, Any]:
    """As llm-compressor writes it; `changes` of its top level, of "weights" where they name one of its fields."""
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "channel" if per_channel else "tensor",
        "symmetric": True, "type": "float",
    }  # fmt: skip
    activations: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": not static, "group_size": None, "num_bits": 8,
        "observer": "minmax" if static else None, "observer_kwargs": {}, "strategy": "tensor" if static else "token",
        "symmetric": True, "type": "float",
    }  # fmt: skip
    for name in set(changes) & set(weights):
        weights[name] = changes.pop(name)
    activations |= changes.pop("activations", {})
    group = {
        "input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights,
    }  # fmt: skip
    group |= changes.pop("group", {})
    return {
        "config_groups": {"group_0": group}, "format": "float-quantized", "global_compression_ratio": 1.5,
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    } | changes  # fmt: skip


def fp8_method_config(static: bool = False, **changes: Any) -> dict[str, Any]:
    """As AutoFP8 writes it."""
    return {
        "activation_scheme": "static" if static else "dynamic", "ignored_layers": ["lm_head"], "quant_method": "fp8",
    } | changes  # fmt: skip


def write_float_quantized(
    folder: Path,
    target: Path,
    per_channel: bool = True,
    static: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    config: dict[str, Any] | None = None,
    linear: re.Pattern[str] = LINEAR,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write `folder`'s checkpoint with float8 linears into `target`; also the tensors' meaning, float32 by name.

    config: the quantization_config, if it isn't compressed-tensors' for these options.
    """
    target.mkdir()
    for side in folder.iterdir():
        if side.name not in ("config.json", "model.safetensors"):
            (target / side.name).write_bytes(side.read_bytes())
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if linear.fullmatch(name):
            rows = tensor.float().abs().amax(1, keepdim=True) if per_channel else tensor.float().abs().max()
            scale = (rows / 440).to(scale_dtype)  # rounded down, it still holds the largest value
            codes = (tensor.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored |= {name: codes, f"{name}_scale": scale}
            meant[name] = codes.float() * scale.float()
            if static:
                stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(INPUT_SCALE).to(
                    scale_dtype
                )
        else:
            stored[name], meant[name] = tensor, tensor.float()
    save_file(stored, target / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = config or quantization_config(per_channel, static)
    (target / "config.json").write_text(json.dumps(fields))
    return target, meant
