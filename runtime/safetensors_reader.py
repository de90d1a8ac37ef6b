"""A tiny strict reader of safetensors files that are already in memory.

Format: 8 bytes header length, a JSON object name -> {dtype, shape, data_offsets}, then the data without holes
(https://github.com/huggingface/safetensors, README).
"""

import math

import msgspec
import numpy as np

from castiron.runtime.errors import EngineFormatError
from castiron.runtime.printable import printable

MAX_HEADER_BYTES = 16 << 20
DTYPES = {"U8": "<u1", "I32": "<i4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors(data: bytes, label: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors (read-only views of `data`) and metadata. Raises EngineFormatError."""
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise EngineFormatError(f"{label} is damaged: its header has {header_bytes} of {len(data)} bytes")
    try:
        raw = msgspec.json.decode(data[8 : 8 + header_bytes], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(value, type=_Tensor) for name, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(f"{label} is damaged: {error}") from error
    start = 8 + header_bytes
    end = 0
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, last = entry.data_offsets
        dtype = np.dtype(DTYPES.get(entry.dtype, "V1"))
        if entry.dtype not in DTYPES or min(entry.shape, default=1) < 0 or len(entry.shape) > 8:
            raise EngineFormatError(
                f"{label}: tensor {printable(name)} is of dtype {printable(entry.dtype, 40)}"
            )
        if (
            first != end
            or last - first != math.prod(entry.shape) * dtype.itemsize
            or start + last > len(data)
        ):
            raise EngineFormatError(f"{label}: tensor {printable(name)} doesn't lie where its header says")
        tensors[name] = np.frombuffer(data, dtype, math.prod(entry.shape), start + first).reshape(entry.shape)
        end = last
    if start + end != len(data):
        raise EngineFormatError(f"{label} has {len(data) - start - end} bytes that belong to no tensor")
    return tensors, metadata
