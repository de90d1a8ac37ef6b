"""The safetensors header: a length, a JSON object, then tensors that fill the rest without holes.

Format: https://github.com/huggingface/safetensors#format.
"""

import json
import os
from pathlib import Path
from typing import Any

from castiron.builder.checkpoint.checkpoint import TensorInfo
from castiron.models.schemes import SCHEMES
from castiron.runtime.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SCHEME_OF_DTYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_PIECES = {"I32": "i32", "I64": "i64", "F8_E4M3": "e4m3"}
_MAX_DIMS = 8


def read_safetensors_header(path: Path, with_pieces: bool = False) -> list[TensorInfo]:
    """All tensors of one file, by place. Reads the header only. `with_pieces`: types that only pieces of quantized
    weights have too.

    Raises CheckpointError, naming what is wrong, unless the header is sound: no duplicate names, known
    dtypes, sizes that match the shapes, and byte ranges that cover the data section exactly.
    """
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: {file_bytes} bytes, too short for a safetensors file")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
            raise CheckpointError(
                f"{path}: says its header has {header_bytes} bytes, but the file has {file_bytes}: truncated,"
                " or not a safetensors file"
            )
        header = file.read(header_bytes)
    if len(header) < header_bytes:
        raise CheckpointError(f"{path}: ends inside its header")
    entries = _parse(path, header)
    data_start = 8 + header_bytes
    schemes = _SCHEME_OF_DTYPE | (_PIECES if with_pieces else {})
    tensors = [
        _tensor(path, name, entry, data_start, schemes)
        for name, entry in entries.items()
        if name != "__metadata__"
    ]
    tensors.sort(key=lambda info: info.offset)
    position = data_start
    for info in tensors:
        if info.offset != position:
            kind = "overlaps the tensor before it" if info.offset < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {info.name!r} {kind}")
        position += info.num_bytes
    if position != file_bytes:
        raise CheckpointError(
            f"{path}: tensors end at byte {position}, the file at {file_bytes}: truncated or damaged"
        )
    return tensors


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name appears twice")
        return result

    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header isn't valid JSON: {_one_line(error)}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is a {type(entries).__name__}, expected a JSON object")
    return entries


def _tensor(path: Path, name: str, entry: Any, data_start: int, schemes: dict[str, str]) -> TensorInfo:
    if not name or not name.isprintable():
        raise CheckpointError(f"{path}: tensor name {name!r} is empty or has control characters")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    scheme = schemes.get(dtype) if isinstance(dtype, str) else None
    if scheme is None:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {dtype!r}, which isn't supported yet; supported:"
            f" {', '.join(schemes)}"
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS or 0 in shape:
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {shape!r}, expected a list of positive integers"
        )
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name!r} has data_offsets {offsets!r}, expected [start, stop]")
    info = TensorInfo(name, tuple(shape), scheme, path, data_start + offsets[0])
    if offsets[1] - offsets[0] != info.num_bytes:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {shape} in {dtype} needs {info.num_bytes} bytes,"
            f" data_offsets give it {offsets[1] - offsets[0]}"
        )
    assert scheme not in SCHEMES or SCHEMES[scheme].block_size == 1
    return info


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _one_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
