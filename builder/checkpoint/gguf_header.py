"""The GGUF header (versions 2 and 3, little endian), read with every count and size checked before use.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from castiron.builder.checkpoint.checkpoint import TensorInfo
from castiron.models.schemes import BY_GGML_TYPE
from castiron.runtime.errors import CheckpointError

MAX_HEADER_BYTES = 1 << 30
MAX_METADATA = 1 << 16  # key-value pairs
MAX_TENSORS = 1 << 18
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_STRING_BYTES = 64 << 20
MAX_ARRAY_ITEMS = 1 << 24
MAX_NAME_BYTES = 255
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
_READ_AHEAD_BYTES = 4 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {  # value type -> (name, struct code)
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    7: ("bool", "<B"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}
_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_TYPES_OF_KEY = {  # what well-known keys must hold; a trailing [] is an array
    "general.architecture": ("string",),
    "general.alignment": ("uint32",),
    "general.name": ("string",),
    "split.count": _INTEGERS,
    "tokenizer.ggml.model": ("string",),
    "tokenizer.ggml.pre": ("string",),
    "tokenizer.ggml.tokens": ("string[]",),
    "tokenizer.ggml.merges": ("string[]",),
    "tokenizer.ggml.scores": ("float32[]",),
    "tokenizer.ggml.token_type": ("int32[]", "uint32[]"),
    "tokenizer.chat_template": ("string",),
    "tokenizer.ggml.add_bos_token": ("bool",),
    "tokenizer.ggml.add_eos_token": ("bool",),
    "tokenizer.ggml.add_space_prefix": ("bool",),
    "tokenizer.ggml.bos_token_id": _INTEGERS,
    "tokenizer.ggml.eos_token_id": _INTEGERS,
    "tokenizer.ggml.eot_token_id": _INTEGERS,
    "tokenizer.ggml.eom_token_id": _INTEGERS,
    "tokenizer.ggml.padding_token_id": _INTEGERS,
    "tokenizer.ggml.unknown_token_id": _INTEGERS,
}


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says: metadata (arrays as lists) and where its tensors lie."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _HeaderBytes:
    """The front of the file, read as far as the parser has got; never past the end of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.buffer = bytearray()
        self._file = path.open("rb", buffering=0)
        self.file_bytes = os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

    def need(self, num_bytes: int, what: str) -> None:
        """Have `num_bytes` from `position` on in the buffer, or raise CheckpointError."""
        end = self.position + num_bytes
        if end > self.file_bytes:
            raise self.fail(f"ends inside {what}: truncated, or a damaged header")
        if end > MAX_HEADER_BYTES:
            raise self.fail(f"the header reaches {MAX_HEADER_BYTES} bytes inside {what}: damaged")
        while len(self.buffer) < end:
            chunk = self._file.read(max(_READ_AHEAD_BYTES, end - len(self.buffer)))
            if not chunk:
                raise self.fail(f"ends inside {what}: truncated while it was read")
            self.buffer += chunk

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        self.need(size, what)
        value = struct.unpack_from(code, self.buffer, self.position)[0]
        self.position += size
        return value

    def string(self, limit: int, what: str) -> str:
        length = self.scalar("<Q", what)
        if length > limit:
            raise self.fail(f"{what} has {length} bytes, more than the {limit} allowed: damaged")
        self.need(length, what)
        raw = self.buffer[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} isn't valid UTF-8") from error

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; the one loop that sees a quarter of a million items, so it is kept flat."""
        result = []
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            position = self.position
            if position + 8 > len(self.buffer):
                self.need(8, what)
            start = position + 8
            stop = start + unpack(self.buffer, position)[0]
            if stop > len(self.buffer):
                if stop - start > MAX_STRING_BYTES:
                    raise self.fail(f"a string of {what} has {stop - start} bytes: damaged")
                self.need(stop - position, what)
            try:
                result.append(self.buffer[start:stop].decode())
            except UnicodeDecodeError as error:
                raise self.fail(f"string {len(result)} of {what} isn't valid UTF-8") from error
            self.position = stop
        return result


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header and place every tensor. Reads the header only.

    Raises CheckpointError, naming the key or tensor, for: another version or byte order, counts and sizes
    that don't fit the file, wrong value types of well-known keys, duplicates, unsupported tensor types,
    tensors that are misaligned, overlap or reach past the end.
    """
    source = _HeaderBytes(path)
    try:
        return _parse(source)
    finally:
        source.close()


def _parse(source: _HeaderBytes) -> GgufHeader:
    source.need(min(4, source.file_bytes), "its first bytes")
    if bytes(source.buffer[:4]) != b"GGUF":
        raise source.fail("not a GGUF file (it doesn't begin with GGUF): give a .gguf file or a folder")
    source.position = 4
    version = source.scalar("<I", "the version")
    if version in (2 << 24, 3 << 24):
        raise source.fail("a big-endian GGUF, expected little-endian: convert it first")
    if version not in (2, 3):
        raise source.fail(f"GGUF version {version}, expected 2 or 3")
    num_tensors = source.scalar("<Q", "the tensor count")
    num_metadata = source.scalar("<Q", "the metadata count")
    _check_count(source, num_tensors, MAX_TENSORS, 8 + 1 + 4 + 8 + 4 + 8, "tensors")
    _check_count(source, num_metadata, MAX_METADATA, 8 + 1 + 4 + 1, "metadata pairs")
    metadata: dict[str, Any] = {}
    for index in range(num_metadata):
        key = _name(source, MAX_KEY_BYTES, f"metadata key {index}")
        if key in metadata:
            raise source.fail(f"metadata key {key!r} appears twice")
        metadata[key] = _value(source, key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise source.fail(f"general.alignment is {alignment}, expected a power of two up to {MAX_ALIGNMENT}")
    entries = [_tensor_entry(source, index) for index in range(num_tensors)]
    data_start = -(-source.position // alignment) * alignment
    return GgufHeader(version, metadata, _place(source, entries, data_start, alignment))


def _check_count(source: _HeaderBytes, count: int, limit: int, least_bytes: int, what: str) -> None:
    if count > limit or count * least_bytes > source.file_bytes - source.position:
        raise source.fail(
            f"says it has {count} {what}, more than a file of {source.file_bytes} bytes can hold"
        )


def _name(source: _HeaderBytes, limit: int, what: str) -> str:
    name = source.string(limit, what)
    if not name or not name.isprintable():
        raise source.fail(f"{what} is {name[:80]!r}: empty, or with control characters")
    return name


def _value(source: _HeaderBytes, key: str) -> Any:
    what = f"metadata {key}"
    value_type = source.scalar("<I", what)
    item_type = source.scalar("<I", what) if value_type == _ARRAY else value_type
    if item_type != _STRING and item_type not in _SCALARS:
        raise source.fail(
            f"{what} has value type {item_type}, which GGUF doesn't define (or an array of arrays)"
        )
    name = "string" if item_type == _STRING else _SCALARS[item_type][0]
    name += "[]" if value_type == _ARRAY else ""
    expected = _TYPES_OF_KEY.get(key)
    if expected is not None and name not in expected:
        raise source.fail(f"{what} is {name}, expected {' or '.join(expected)}")
    if value_type == _ARRAY:
        return _array(source, item_type, what)
    if item_type == _STRING:
        return source.string(MAX_STRING_BYTES, what)
    value = source.scalar(_SCALARS[item_type][1], what)
    if item_type != _BOOL:
        return value
    if value > 1:
        raise source.fail(f"{what} is a bool with value {value}, expected 0 or 1")
    return bool(value)


def _array(source: _HeaderBytes, item_type: int, what: str) -> list[Any]:
    count = source.scalar("<Q", what)
    item_bytes = 8 if item_type == _STRING else struct.calcsize(_SCALARS[item_type][1])
    _check_count(source, count, MAX_ARRAY_ITEMS, item_bytes, f"items in {what}")
    if item_type == _STRING:
        return source.strings(count, what)
    source.need(count * item_bytes, what)
    dtype = np.dtype(_SCALARS[item_type][1])
    values: list[Any] = np.frombuffer(source.buffer, dtype, count, source.position).tolist()
    source.position += count * item_bytes
    if item_type == _BOOL:
        if any(value > 1 for value in values):
            raise source.fail(f"{what} has a bool that is neither 0 nor 1")
        return [bool(value) for value in values]
    return values


@dataclass(frozen=True)
class _TensorEntry:
    name: str
    dims: tuple[int, ...]  # innermost first, as stored
    ggml_type: int
    offset: int  # from the start of the data section


def _tensor_entry(source: _HeaderBytes, index: int) -> _TensorEntry:
    name = _name(source, MAX_NAME_BYTES, f"the name of tensor {index}")
    what = f"tensor {name!r}"
    num_dims = source.scalar("<I", what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise source.fail(f"{what} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
    dims = tuple(source.scalar("<Q", what) for _ in range(num_dims))
    return _TensorEntry(name, dims, source.scalar("<I", what), source.scalar("<Q", what))


def _place(
    source: _HeaderBytes, entries: list[_TensorEntry], data_start: int, alignment: int
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        what = f"tensor {entry.name!r}"
        scheme = BY_GGML_TYPE.get(entry.ggml_type)
        if scheme is None:
            supported = ", ".join(item.name for item in BY_GGML_TYPE.values())
            raise source.fail(
                f"{what} has ggml type {_type_name(entry.ggml_type)}, which isn't supported;"
                f" supported: {supported}"
            )
        if entry.name in tensors:
            raise source.fail(f"{what} appears twice")
        if 0 in entry.dims:
            raise source.fail(f"{what} has dimensions {list(entry.dims)}: one is zero")
        if entry.dims[0] % scheme.block_size:
            raise source.fail(
                f"{what} has rows of {entry.dims[0]}, not a multiple of the {scheme.block_size}"
                f" a {scheme.name} block holds"
            )
        if entry.offset % alignment:
            raise source.fail(f"{what} begins at {entry.offset}, not a multiple of the alignment {alignment}")
        info = TensorInfo(entry.name, entry.dims[::-1], scheme.name, source.path, data_start + entry.offset)
        if info.offset + info.num_bytes > source.file_bytes:  # Python integers: nothing wraps
            raise source.fail(
                f"{what} of dimensions {list(entry.dims)} ends at byte {info.offset + info.num_bytes},"
                f" the file at {source.file_bytes}: truncated or damaged"
            )
        tensors[entry.name] = info
    end, before = data_start, ""
    for info in sorted(tensors.values(), key=lambda item: item.offset):
        if info.offset < end:
            raise source.fail(f"tensors {before!r} and {info.name!r} overlap")
        end, before = info.offset + info.num_bytes, info.name
    return tensors


def _type_name(ggml_type: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return f"{GGMLQuantizationType(ggml_type).name} ({ggml_type})"
    except ValueError:
        return f"{ggml_type}, unknown"
