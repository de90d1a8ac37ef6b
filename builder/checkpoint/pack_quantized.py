"""compressed-tensors' "pack-quantized" int4 weights: what config.json says, and tensors put together.

A linear NAME [n, k] is stored as
    NAME.weight_packed      i32 [n, k / 8], element 8j + i in bits 4i.. of word j, as q + 8 (q from -8 to 7)
    NAME.weight_scale       [n, k / group]; one column for strategy "channel"
    NAME.weight_shape       i32 or i64 [2]: n, k
    NAME.weight_zero_point  i32 [ceil(n / 8), k / group], row 8j + i in bits 4i.. of word j, as zero + 8: asymmetric
and becomes one tensor NAME.weight of an int4 scheme: w = scale * (stored - 8), or scale * (stored - stored zero).
Format: https://github.com/neuralmagic/compressed-tensors, compressors/quantized_compressors/pack_quantized.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from castiron.builder.checkpoint.bfloat16 import from_bf16, to_bf16
from castiron.builder.checkpoint.checkpoint import PIECE_BYTES, Checkpoint, PackedPieces, TensorInfo
from castiron.builder.checkpoint.dequantize import dequantize
from castiron.builder.checkpoint.quantization_config import ConfigReader
from castiron.builder.checkpoint.weight_pieces import find_piece
from castiron.runtime.errors import CheckpointError

FORMAT = "pack-quantized"
GROUPS = (128, 64, 32)  # columns that share a scale in the schemes
_PACKED, _SCALE, _SHAPE, _ZERO_POINT, _G_IDX = (
    f".weight_{name}" for name in ("packed", "scale", "shape", "zero_point", "g_idx")
)
_CHUNK_ROWS = 4096
_WHOLE = "a packed weight"


@dataclass(frozen=True)
class PackedGroup:
    """How the linears it names are stored."""

    targets: tuple[str, ...]  # names, "re:" and a regular expression, or "Linear" for all
    group_size: int  # columns that share a scale; 0: the row
    is_symmetric: bool


def read_group(reader: ConfigReader, raw: Mapping[str, Any]) -> PackedGroup:
    """One of config_groups, whose format is pack-quantized. Raises CheckpointError."""
    weights = raw["weights"]
    reader.check_unread(raw)  # quantized activations among them
    reader.check_unread(weights)
    reader.expect(weights, "num_bits", 4)
    reader.expect(weights, "type", "int")
    reader.expect(weights, "symmetric", True, False)
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise reader.error(
            "actorder",
            weights["actorder"],
            "null or weight: groups of reordered columns aren't supported",
        )
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if isinstance(size, int) and size > 0 else "channel")
    reader.expect({"strategy": strategy}, "strategy", "group", "channel")
    if strategy == "channel":
        reader.expect({"group_size": size}, "group_size", None, -1)
        size = 0
    elif type(size) is not int or size <= 0 or size % GROUPS[-1]:
        raise reader.error("group_size", size, f"a multiple of {GROUPS[-1]}")
    return PackedGroup(reader.names("targets", raw.get("targets")), size, weights["symmetric"])


def scale_warnings(checkpoint: Checkpoint) -> tuple[str, ...]:
    """One line if scales of packed weights aren't bf16 and rounding them to it loses something. Reads them all."""
    worst, where = 0.0, ""
    for info in checkpoint.tensors.values():
        if not isinstance(info.pieces, PackedPieces) or info.pieces.scale.scheme == "bf16":
            continue
        scale = info.pieces.scale
        for start in range(0, scale.num_rows, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, scale.num_rows)
            values = dequantize(scale.scheme, checkpoint.read_stored(scale, start, stop), scale.num_cols)
            values = values[np.isfinite(values) & (values != 0)]  # others are refused, or exact
            error = float(np.max(np.abs(from_bf16(to_bf16(values)) - values) / np.abs(values), initial=0.0))
            if error > worst:
                worst, where = error, scale.name
    if not worst:
        return ()
    return (f"scales are rounded to bf16, by a relative error of up to {worst:.1e} ({where})",)


def packed_module(name: str) -> str | None:
    """The linear whose packed codes the tensor `name` holds; None if it holds something else."""
    return name.removesuffix(_PACKED) if name.endswith(_PACKED) else None


def piece_names(module: str) -> tuple[str, ...]:
    """Names of the tensors a linear's weight is put together from."""
    return tuple(module + suffix for suffix in (_PACKED, _SCALE, _SHAPE, _ZERO_POINT))


def combine_packed(module: str, tensors: Mapping[str, TensorInfo], group: PackedGroup) -> TensorInfo:
    """The weight of a linear. Raises CheckpointError for pieces that don't fit together or contradict the config."""
    if module + _G_IDX in tensors:
        raise CheckpointError(
            f"tensor {module}{_G_IDX}: columns in an order of activations (actorder) aren't supported: quantize with"
            " actorder null or weight"
        )
    n, k = _shape_of(module, tensors)
    packed = find_piece(module + _PACKED, tensors, ("i32",), ((n, -(-k // 8)),), _WHOLE)
    size = group.group_size or k
    stored = next((columns for columns in GROUPS if size % columns == 0), 0)
    if not stored or k % size:
        raise CheckpointError(
            f"tensor {packed.name}: {k} columns in groups of {size}, expected whole groups, each a multiple of"
            f" {GROUPS[-1]}"
        )
    scale = find_piece(module + _SCALE, tensors, ("bf16", "f16", "f32"), ((n, k // size),), _WHOLE)
    zero_point = None
    if not group.is_symmetric:
        zero_point = find_piece(module + _ZERO_POINT, tensors, ("i32",), ((-(-n // 8), k // size),), _WHOLE)
    elif module + _ZERO_POINT in tensors:
        raise CheckpointError(f"tensor {module}{_ZERO_POINT}: the config says that {module} is symmetric")
    return TensorInfo(
        name=f"{module}.weight",
        shape=(n, k),
        scheme=f"int4_g{stored}" + ("" if group.is_symmetric else "z"),
        file=packed.file,
        offset=packed.offset,
        pieces=PackedPieces(packed, scale, zero_point, repeat=size // stored),
    )


def _shape_of(module: str, tensors: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """n, k as NAME.weight_shape says."""
    info = find_piece(module + _SHAPE, tensors, ("i32", "i64"), ((2,),), _WHOLE)
    try:
        n, k = np.fromfile(info.file, f"<i{PIECE_BYTES[info.scheme]}", count=2, offset=info.offset).tolist()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{info.file}: can't read tensor {info.name}: {error}") from error
    if n < 1 or k < 1:
        raise CheckpointError(f"tensor {info.name} says [{n}, {k}], expected positive numbers")
    return n, k
