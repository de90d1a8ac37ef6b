"""float8 (e4m3) weights with quantized activations: compressed-tensors' "float-quantized", and the older method "fp8".

A linear NAME [n, k] is stored as
    NAME.weight        F8_E4M3 [n, k]
    NAME.weight_scale  [] or [1] for strategy "tensor", [n] or [n, 1] for "channel"
    NAME.input_scale   [] or [1], of activations with a static scale
and becomes one tensor NAME.weight of scheme fp8, w = scale * e4m3, whose record holds the input scale. Activations
are divided by their scale (dynamic: the token's largest magnitude / 448) and rounded to e4m3 before the product.
Formats: https://github.com/neuralmagic/compressed-tensors, compressors/quantized_compressors/naive_quantized.py;
https://github.com/vllm-project/vllm, model_executor/layers/quantization/fp8.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from castiron.builder.checkpoint.checkpoint import Float8Pieces, TensorInfo
from castiron.builder.checkpoint.dequantize import dequantize
from castiron.builder.checkpoint.quantization_config import ConfigReader, Quantization
from castiron.builder.checkpoint.weight_pieces import find_piece
from castiron.runtime.errors import CheckpointError

FORMAT = "float-quantized"
METHOD = "fp8"
_WEIGHT, _SCALE, _INPUT_SCALE = ".weight", ".weight_scale", ".input_scale"
_SCALE_SCHEMES = ("bf16", "f16", "f32")
_SCALAR: tuple[tuple[int, ...], ...] = ((), (1,))
_WHOLE = "a float8 weight"


@dataclass(frozen=True)
class Float8Group:
    """How the linears it names are stored."""

    targets: tuple[str, ...]  # names, "re:" and a regular expression, or "Linear" for all
    is_per_channel: bool  # a weight scale for each row, else one for all
    is_static: bool  # activations have a stored scale, else one of their own for each token


def read_group(reader: ConfigReader, raw: Mapping[str, Any]) -> Float8Group:
    """One of config_groups, whose format is float-quantized. Raises CheckpointError."""
    reader.check_unread(raw, "input_activations")
    weights, activations = raw["weights"], raw.get("input_activations")
    _check_float8(reader, weights)
    reader.check_unread(weights)
    reader.expect(weights, "strategy", "tensor", "channel")
    if activations is None:
        raise reader.error(
            "input_activations", None, "float8 ones: weights alone in float8 (W8A16) aren't supported"
        )
    if not isinstance(activations, dict):
        raise reader.error("input_activations", activations, "an object")
    _check_float8(reader, activations)
    reader.check_unread(activations, "dynamic")
    reader.expect(activations, "dynamic", True, False)
    is_static = not activations["dynamic"]
    if activations.get("strategy") != ("tensor" if is_static else "token"):
        expected = "tensor (dynamic is False)" if is_static else "token (dynamic is True)"
        raise reader.error("input_activations.strategy", activations.get("strategy"), expected)
    targets = reader.names("targets", raw.get("targets"))
    return Float8Group(targets, weights["strategy"] == "channel", is_static)


def _check_float8(reader: ConfigReader, fields: Mapping[str, Any]) -> None:
    reader.expect(fields, "num_bits", 8)
    reader.expect(fields, "type", "float")
    reader.expect(fields, "symmetric", True)
    reader.expect(fields, "group_size", None)


def read_fp8_method(reader: ConfigReader, raw: Mapping[str, Any]) -> Quantization:
    """A quantization_config whose quant_method is "fp8": a scale for each weight. Raises CheckpointError."""
    if raw.get("weight_block_size") is not None:
        raise reader.error(
            "weight_block_size", raw["weight_block_size"], "null: scales of blocks aren't supported yet"
        )
    lists = ("ignored_layers", "modules_to_not_convert")
    reader.check_unread(raw, "activation_scheme", "weight_block_size", "fmt", *lists)
    reader.expect(raw, "activation_scheme", "dynamic", "static")
    reader.expect(raw, "fmt", "e4m3", None)
    ignored = [name for field in lists for name in reader.names(field, raw.get(field) or [])]
    inside = [f"re:{re.escape(name)}\\." for name in ignored if not name.startswith("re:")]
    group = Float8Group(("Linear",), is_per_channel=False, is_static=raw["activation_scheme"] == "static")
    return Quantization((group,), (*ignored, *inside))


def combine_float8(module: str, tensors: Mapping[str, TensorInfo], group: Float8Group) -> TensorInfo:
    """The weight of a linear whose NAME.weight holds float8. Raises CheckpointError for pieces that don't fit."""
    codes = tensors[module + _WEIGHT]
    if len(codes.shape) != 2:
        raise CheckpointError(f"tensor {codes.name} is float8 {list(codes.shape)}, expected [rows, columns]")
    n = codes.shape[0]
    shapes = ((n,), (n, 1)) if group.is_per_channel else _SCALAR
    scale = find_piece(module + _SCALE, tensors, _SCALE_SCHEMES, shapes, _WHOLE)
    input_scale = 0.0
    if group.is_static:
        info = find_piece(
            module + _INPUT_SCALE, tensors, _SCALE_SCHEMES, _SCALAR, f"{_WHOLE} with a static scale"
        )
        input_scale = _read_scalar(info)
    elif module + _INPUT_SCALE in tensors:
        raise CheckpointError(
            f"tensor {module}{_INPUT_SCALE}: the config says that activations of {module} have dynamic scales"
        )
    return TensorInfo(
        name=codes.name,
        shape=codes.shape,
        scheme="fp8",
        file=codes.file,
        offset=codes.offset,
        pieces=Float8Pieces(codes, scale, input_scale),
    )


def is_float8_weight(info: TensorInfo) -> bool:
    """True for the codes of such a weight."""
    return info.scheme == "e4m3" and info.name.endswith(_WEIGHT)


def scale_names(module: str) -> tuple[str, ...]:
    """Names of the tensors that belong to the module's weight, besides the weight."""
    return module + _SCALE, module + _INPUT_SCALE


def check_no_scales_left(names: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError for a scale that belongs to no float8 weight."""
    for name in names:
        if name.endswith((_SCALE, _INPUT_SCALE)):
            raise CheckpointError(f"tensor {name} belongs to no float8 weight of the checkpoint")


def _read_scalar(info: TensorInfo) -> float:
    try:
        stored = np.fromfile(info.file, np.uint8, count=info.num_bytes, offset=info.offset)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{info.file}: can't read tensor {info.name}: {error}") from error
    if stored.size != info.num_bytes:
        raise CheckpointError(f"{info.file}: ends inside tensor {info.name}: it changed since it was opened")
    value = float(dequantize(info.scheme, stored.reshape(1, -1), 1)[0, 0])
    if not np.isfinite(value) or value <= 0:
        raise CheckpointError(
            f"tensor {info.name} is {value}, expected a positive number: the checkpoint is damaged"
        )
    return value
