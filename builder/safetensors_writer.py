"""safetensors, written so that the same tensors give the same bytes (the library orders metadata at random).

Format: 8 bytes little-endian header length, JSON header, data. https://huggingface.co/docs/safetensors
"""

import json
from collections.abc import Mapping

import numpy as np

from castiron.runtime.zip_format import MEMBER_ALIGNMENT

_DTYPES = {"int32": "I32", "float32": "F32", "uint8": "U8"}


def encode_safetensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """A whole file in memory: tensors in the order given, C order."""
    entries = {}
    end = 0
    for name, tensor in tensors.items():
        entries[name] = (_DTYPES[tensor.dtype.name], tensor.shape, end, end + tensor.nbytes)
        end += tensor.nbytes
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    return encode_header(entries, metadata, alignment=8) + data


def encode_header(
    entries: Mapping[str, tuple[str, tuple[int, ...], int, int]],
    metadata: Mapping[str, str] | None = None,
    alignment: int = MEMBER_ALIGNMENT,
) -> bytes:
    """Length and JSON of tensors given as (dtype, shape, first byte, last byte + 1).

    Padded with spaces so that the data begins at a multiple of `alignment`.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, (dtype, shape, start, stop) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text
