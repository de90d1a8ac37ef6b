"""Quantized Hugging Face checkpoints: which quantization config.json states, and its weights put together.

compressed-tensors' "pack-quantized" int4 (pack_quantized.py) and "float-quantized" float8, and the older method "fp8"
(float_quantized.py). Format: https://github.com/neuralmagic/compressed-tensors.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from castiron.builder.checkpoint import float_quantized, pack_quantized
from castiron.builder.checkpoint.checkpoint import PIECE_BYTES, TensorInfo
from castiron.builder.checkpoint.float_quantized import Float8Group, combine_float8, is_float8_weight
from castiron.builder.checkpoint.pack_quantized import PackedGroup, combine_packed, packed_module
from castiron.builder.checkpoint.quantization_config import ConfigReader, Quantization, WeightGroup
from castiron.runtime.errors import CheckpointError

_Group = TypeVar("_Group", PackedGroup, Float8Group)

QUANTIZATION_FIELDS = ("quantization_config", "compression_config")  # of config.json; the second is older
_GROUP_READERS: dict[str, Callable[[ConfigReader, Mapping[str, Any]], WeightGroup]] = {
    pack_quantized.FORMAT: pack_quantized.read_group,
    float_quantized.FORMAT: float_quantized.read_group,
}


def parse_quantization(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that the config.json at `path` states; None: none.

    Raises CheckpointError for any other method or format, and for fields that may change the math.
    """
    raw = config.get(QUANTIZATION_FIELDS[0]) or config.get(QUANTIZATION_FIELDS[1])
    if not raw:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else raw
    reader = ConfigReader(path)
    if isinstance(raw, dict) and method == float_quantized.METHOD:
        return float_quantized.read_fp8_method(reader, raw)
    if not isinstance(raw, dict) or method != "compressed-tensors":
        raise CheckpointError(
            f"{path}: quantized ({str(method or 'method not named')[:60]}), which isn't supported: give a"
            " compressed-tensors checkpoint (pack-quantized int4, float-quantized), one of method fp8, the unquantized"
            " one or a GGUF file"
        )
    reader.expect(raw, "format", *_GROUP_READERS)
    reader.check_unread(raw)
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise reader.error("config_groups", groups, "at least one group")
    return Quantization(
        groups=tuple(_group(reader, raw["format"], group) for group in groups.values()),
        ignore=reader.names("ignore", raw.get("ignore") or []),
    )


def _group(reader: ConfigReader, stated_format: str, raw: Any) -> WeightGroup:
    if not isinstance(raw, dict) or not isinstance(raw.get("weights"), dict):
        raise reader.error("config_groups", raw, "groups with targets and weights")
    reader.expect({"format": raw.get("format") or stated_format}, "format", stated_format)
    return _GROUP_READERS[stated_format](reader, raw)


def combine_tensors(tensors: Mapping[str, TensorInfo], quantization: Quantization) -> dict[str, TensorInfo]:
    """The tensors with the pieces of every quantized weight replaced by the weight.

    Raises CheckpointError for pieces that are missing, don't fit together or contradict the config, and for tensors
    of their types that belong to no weight.
    """
    result = dict(tensors)
    for name, info in tensors.items():
        module = packed_module(name)
        if module is not None:
            group = _group_of(module, name, quantization, PackedGroup)
            weight = combine_packed(module, tensors, group)
            for piece in pack_quantized.piece_names(module):
                result.pop(piece, None)
            if weight.name in result:
                raise CheckpointError(f"tensors {weight.name} and {name} are both there: one is too many")
            result[weight.name] = weight
        elif is_float8_weight(info):
            module = name.removesuffix(".weight")
            result[name] = combine_float8(module, tensors, _group_of(module, name, quantization, Float8Group))
            for piece in float_quantized.scale_names(module):
                result.pop(piece, None)
    for name, info in result.items():
        if info.scheme in PIECE_BYTES:
            raise CheckpointError(f"tensor {name} holds {info.scheme} and is no part of a quantized weight")
    float_quantized.check_no_scales_left(result)
    return result


def _group_of(module: str, name: str, quantization: Quantization, kind: type[_Group]) -> _Group:
    group = quantization.group_of(module)
    if not isinstance(group, kind):
        other = "isn't quantized" if group is None else "is quantized in another way"
        raise CheckpointError(f"tensor {name}: config.json's quantization_config says that {module} {other}")
    return group
