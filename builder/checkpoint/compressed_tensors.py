"""compressed-tensors' "pack-quantized" int4 weights: what config.json says, and tensors put together.

A linear NAME [n, k] is stored as
    NAME.weight_packed      i32 [n, k / 8], element 8j + i in bits 4i.. of word j, as q + 8 (q from -8 to 7)
    NAME.weight_scale       [n, k / group]; one column for strategy "channel"
    NAME.weight_shape       i32 or i64 [2]: n, k
    NAME.weight_zero_point  i32 [ceil(n / 8), k / group], row 8j + i in bits 4i.. of word j, as zero + 8: asymmetric
and becomes one tensor NAME.weight of an int4 scheme: w = scale * (stored - 8), or scale * (stored - stored zero).
Format: https://github.com/neuralmagic/compressed-tensors, compressors/quantized_compressors/pack_quantized.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from castiron.builder.checkpoint.bfloat16 import from_bf16, to_bf16
from castiron.builder.checkpoint.checkpoint import INTEGER_BYTES, Checkpoint, PackedPieces, TensorInfo
from castiron.builder.checkpoint.dequantize import dequantize
from castiron.runtime.errors import CheckpointError

QUANTIZATION_FIELDS = ("quantization_config", "compression_config")  # of config.json; the second is older
GROUPS = (128, 64, 32)  # columns that share a scale in the schemes
_PACKED, _SCALE, _SHAPE, _ZERO_POINT, _G_IDX = (
    f".weight_{name}" for name in ("packed", "scale", "shape", "zero_point", "g_idx")
)
_CHUNK_ROWS = 4096
# fields that don't change what the stored weights mean: bookkeeping, and how they were found
_HARMLESS = frozenset((
    "global_compression_ratio", "version", "quant_method", "config_groups", "ignore", "format", "targets", "weights",
    "num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "observer", "observer_kwargs",
    "scale_dtype", "zp_dtype",
))  # fmt: skip
_FIXED: dict[str, tuple[Any, ...]] = {  # fields with the values under which they change nothing
    "quantization_status": ("compressed", "frozen", None),
    "dynamic": (False, None),
}


@dataclass(frozen=True)
class QuantizedGroup:
    """One of config_groups: how the linears it names are stored."""

    targets: tuple[str, ...]  # names, "re:" and a regular expression, or "Linear" for all
    group_size: int  # columns that share a scale; 0: the row
    is_symmetric: bool


@dataclass(frozen=True)
class PackQuantization:
    """What a quantization_config says."""

    groups: tuple[QuantizedGroup, ...]
    ignore: tuple[str, ...]  # as targets

    def group_of(self, module: str) -> QuantizedGroup | None:
        """The group of a linear; None: it isn't quantized. Names win over expressions, both over "Linear"."""
        if any(_matches(module, pattern) for pattern in self.ignore):
            return None
        candidates = [(target, group) for group in self.groups for target in group.targets]
        for wanted in (
            [group for target, group in candidates if target == module],
            [group for target, group in candidates if target.startswith("re:") and _matches(module, target)],
            [group for target, group in candidates if target == "Linear"],
        ):
            if wanted:
                return wanted[0]
        return None


def parse_quantization(path: Path, config: Mapping[str, Any]) -> PackQuantization | None:
    """The quantization that the config.json at `path` states; None: none.

    Raises CheckpointError for any method or format but compressed-tensors' pack-quantized int4, and for fields that
    may change the math.
    """
    raw = config.get(QUANTIZATION_FIELDS[0]) or config.get(QUANTIZATION_FIELDS[1])
    if not raw:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else raw
    if not isinstance(raw, dict) or method != "compressed-tensors":
        raise CheckpointError(
            f"{path}: quantized ({str(method or 'method not named')[:60]}), which isn't supported: give a"
            " compressed-tensors checkpoint (pack-quantized int4), the unquantized one or a GGUF file"
        )
    reader = _Reader(path)
    reader.expect(raw, "format", "pack-quantized")
    reader.check_unread(raw)
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise reader.error("config_groups", groups, "at least one group")
    return PackQuantization(
        groups=tuple(reader.group(group) for group in groups.values()),
        ignore=reader.names("ignore", raw.get("ignore") or []),
    )


@dataclass(frozen=True)
class _Reader:
    path: Path

    def error(self, field: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: the quantization has {field} = {repr(value)[:60]}, expected {expected}"
        )

    def expect(self, fields: Mapping[str, Any], name: str, *allowed: Any) -> None:
        value = fields.get(name)
        if type(value) not in map(type, allowed) or value not in allowed:
            raise self.error(name, value, " or ".join(str(item) for item in allowed))

    def check_unread(self, fields: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a field that is neither known nor empty."""
        for name, value in fields.items():
            if name in _HARMLESS or value is None or value == {} or value == []:
                continue
            if name == "sparsity_config" and isinstance(value, dict) and value.get("format") == "dense":
                continue
            if name in _FIXED:
                self.expect(fields, name, *_FIXED[name])
                continue
            raise CheckpointError(
                f"{self.path}: the quantization has {str(name)[:60]} = {repr(value)[:60]}, which may change the math"
                " and isn't supported"
            )

    def names(self, field: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, value, "a list of names")
        for name in value:
            try:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
            except re.error as error:
                raise self.error(field, name, f"a regular expression ({error})") from error
        return tuple(value)

    def group(self, raw: Any) -> QuantizedGroup:
        if not isinstance(raw, dict) or not isinstance(raw.get("weights"), dict):
            raise self.error("config_groups", raw, "groups with targets and weights")
        weights = raw["weights"]
        self.expect({"format": raw.get("format") or "pack-quantized"}, "format", "pack-quantized")
        self.check_unread(raw)  # quantized activations among them
        self.check_unread(weights)
        self.expect(weights, "num_bits", 4)
        self.expect(weights, "type", "int")
        self.expect(weights, "symmetric", True, False)
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise self.error(
                "actorder",
                weights["actorder"],
                "null or weight: groups of reordered columns aren't supported",
            )
        size = weights.get("group_size")
        strategy = weights.get("strategy") or ("group" if isinstance(size, int) and size > 0 else "channel")
        self.expect({"strategy": strategy}, "strategy", "group", "channel")
        if strategy == "channel":
            self.expect({"group_size": size}, "group_size", None, -1)
            size = 0
        elif type(size) is not int or size <= 0 or size % GROUPS[-1]:
            raise self.error("group_size", size, f"a multiple of {GROUPS[-1]}")
        return QuantizedGroup(self.names("targets", raw.get("targets")), size, weights["symmetric"])


def combine_tensors(
    tensors: Mapping[str, TensorInfo], quantization: PackQuantization
) -> dict[str, TensorInfo]:
    """The tensors with the pieces of every packed weight replaced by the weight.

    Raises CheckpointError for pieces that are missing, don't fit together or contradict the config, and for integer
    tensors that belong to no weight.
    """
    result = dict(tensors)
    for name in tensors:
        if name.endswith(_PACKED):
            module = name.removesuffix(_PACKED)
            weight = _combined(module, tensors, quantization)
            for suffix in (_PACKED, _SCALE, _SHAPE, _ZERO_POINT):
                result.pop(module + suffix, None)
            if weight.name in result:
                raise CheckpointError(f"tensors {weight.name} and {name} are both there: one is too many")
            result[weight.name] = weight
    for name, info in result.items():
        if info.scheme in INTEGER_BYTES:
            raise CheckpointError(f"tensor {name} holds {info.scheme} and is no part of a packed weight")
    return result


def scale_warnings(checkpoint: Checkpoint) -> tuple[str, ...]:
    """One line if scales of packed weights aren't bf16 and rounding them to it loses something. Reads them all."""
    worst, where = 0.0, ""
    for info in checkpoint.tensors.values():
        if info.pieces is None or info.pieces.scale.scheme == "bf16":
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


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module


def _combined(module: str, tensors: Mapping[str, TensorInfo], quantization: PackQuantization) -> TensorInfo:
    group = quantization.group_of(module)
    if group is None:
        raise CheckpointError(
            f"tensor {module}{_PACKED}: config.json's quantization_config says that {module} isn't quantized"
        )
    if module + _G_IDX in tensors:
        raise CheckpointError(
            f"tensor {module}{_G_IDX}: columns in an order of activations (actorder) aren't supported: quantize with"
            " actorder null or weight"
        )
    n, k = _shape_of(module, tensors)
    packed = _piece(module + _PACKED, tensors, ("i32",), (n, -(-k // 8)))
    size = group.group_size or k
    stored = next((columns for columns in GROUPS if size % columns == 0), 0)
    if not stored or k % size:
        raise CheckpointError(
            f"tensor {packed.name}: {k} columns in groups of {size}, expected whole groups, each a multiple of"
            f" {GROUPS[-1]}"
        )
    scale = _piece(module + _SCALE, tensors, ("bf16", "f16", "f32"), (n, k // size))
    zero_point = None
    if not group.is_symmetric:
        zero_point = _piece(module + _ZERO_POINT, tensors, ("i32",), (-(-n // 8), k // size))
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
    info = _piece(module + _SHAPE, tensors, ("i32", "i64"), (2,))
    try:
        n, k = np.fromfile(info.file, f"<i{INTEGER_BYTES[info.scheme]}", count=2, offset=info.offset).tolist()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{info.file}: can't read tensor {info.name}: {error}") from error
    if n < 1 or k < 1:
        raise CheckpointError(f"tensor {info.name} says [{n}, {k}], expected positive numbers")
    return n, k


def _piece(
    name: str, tensors: Mapping[str, TensorInfo], schemes: tuple[str, ...], shape: tuple[int, ...]
) -> TensorInfo:
    info = tensors.get(name)
    if info is None:
        raise CheckpointError(f"the checkpoint has no tensor {name}, which a packed weight needs")
    if info.scheme not in schemes or info.shape != shape:
        raise CheckpointError(
            f"tensor {name} is {info.scheme} {list(info.shape)}, expected {' or '.join(schemes)} {list(shape)}"
        )
    return info
