"""A checkpoint: named tensors that are read row by row, and what the files say about the model."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from castiron.builder.checkpoint.bfloat16 import to_bf16
from castiron.builder.checkpoint.dequantize import dequantize
from castiron.builder.checkpoint.fp8_blocks import join_fp8
from castiron.builder.checkpoint.int4_blocks import join_int4
from castiron.models.schemes import row_bytes
from castiron.runtime.errors import CheckpointError

# of an element; these hold no weights by themselves, only pieces of quantized ones
PIECE_BYTES = {"i32": 4, "i64": 8, "e4m3": 1}
_HASH_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` is row major: (rows, cols) for a matrix."""

    name: str
    shape: tuple[int, ...]
    scheme: str  # models.schemes.SCHEMES or PIECE_BYTES key
    file: Path
    offset: int  # of the first byte, from the start of the file
    # what it is put together from; file and offset are the first one's
    pieces: "PackedPieces | Float8Pieces | None" = None

    @property
    def num_rows(self) -> int:
        """Rows `read_rows` counts: all leading dims together; 1 for vectors and scalars."""
        rows = 1
        for dim in self.shape[:-1]:
            rows *= dim
        return rows

    @property
    def num_cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        if self.scheme in PIECE_BYTES:
            return self.num_cols * PIECE_BYTES[self.scheme]
        return row_bytes(self.scheme, self.num_cols)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class PackedPieces:
    """The tensors of an int4 weight [n, k] in compressed-tensors' "pack-quantized" format."""

    packed: TensorInfo  # i32 [n, k / 8]: element 8j + i in bits 4i.. of word j
    scale: TensorInfo  # bf16, f16 or f32 [n, k / (repeat * group)]
    zero_point: TensorInfo | None  # i32 [ceil(n / 8), as scale]: row 8j + i in bits 4i.. of word j
    repeat: int  # groups of the scheme that one stored scale is for


@dataclass(frozen=True)
class Float8Pieces:
    """The tensors of a float8 weight [n, k] (float_quantized.py)."""

    codes: TensorInfo  # e4m3 [n, k]
    scale: TensorInfo  # bf16, f16 or f32; of one element for all rows, or n
    input_scale: float  # of the activations; 0: each token has its own


@dataclass
class Checkpoint:
    """An opened checkpoint. Holds file descriptors, no tensor data: close it, or use it as a context."""

    source_format: str  # "safetensors" or "gguf"
    name: str  # of the folder or file, without suffix
    architecture: str  # architectures[0] of config.json, or general.architecture
    config: dict[str, Any]  # config.json, or the GGUF metadata under its own keys
    tensors: Mapping[str, TensorInfo]
    files: dict[str, Path]  # file name -> path, every file read
    generation_config: dict[str, Any]  # of generation_config.json; {} when there is none
    folder: Path | None  # of a Hugging Face checkpoint; None for GGUF
    _descriptors: dict[Path, int] = field(default_factory=dict, repr=False)

    @property
    def tokenizer_source(self) -> Path | None:
        """Folder holding tokenizer.json; None: the tokenizer is in the GGUF metadata."""
        return self.folder

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of a tensor as stored: uint8 [stop - start, row_bytes], in fresh memory.

        A vector is one row. Raises CheckpointError for a name the checkpoint lacks, for a file that
        shrank, and ValueError for rows out of range.
        """
        info = self.tensor(name)
        if not 0 <= start <= stop <= info.num_rows:
            raise ValueError(f"rows {start}..{stop} of {name}, which has {info.num_rows}")
        return self.read_stored(info, start, stop) if info.pieces is None else self._joined(info, start, stop)

    def read_stored(self, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor that lies in one place, as `read_rows`."""
        rows = np.empty((stop - start, info.row_bytes), dtype=np.uint8)
        remaining = rows.data.cast("B") if rows.size else memoryview(b"")
        position = info.offset + start * info.row_bytes
        descriptor = self._descriptor(info.file)
        while remaining:
            try:
                count = os.preadv(descriptor, [remaining], position)
            except OSError as error:
                raise CheckpointError(
                    f"{info.file}: can't read tensor {info.name}: {error.strerror}"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{info.file}: ends inside tensor {info.name}: it changed since it was opened"
                )
            remaining = remaining[count:]
            position += count
        return rows

    def tensor(self, name: str) -> TensorInfo:
        """The tensor's record. Raises CheckpointError for a name the checkpoint lacks."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.name}: no tensor {name} in the checkpoint")
        return info

    def hash_files(self) -> dict[str, str]:
        """sha256 (hex) of every file, by name."""
        hashes = {}
        for name, path in self.files.items():
            digest = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
            hashes[name] = digest.hexdigest()
        return hashes

    def close(self) -> None:
        """Close the files. Reading later opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _joined(self, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Rows of a weight in its scheme's form; scales of int4 are rounded to bf16."""
        pieces = info.pieces
        assert pieces is not None
        if isinstance(pieces, Float8Pieces):
            return join_fp8(
                self._row_scales(pieces.scale, start, stop), self.read_stored(pieces.codes, start, stop)
            )
        nibbles = self.read_stored(pieces.packed, start, stop)  # little-endian words: in the scheme's order
        stored = self.read_stored(pieces.scale, start, stop)
        scale = to_bf16(dequantize(pieces.scale.scheme, stored, pieces.scale.num_cols))
        zero = None
        if pieces.zero_point is not None:
            words = self.read_stored(pieces.zero_point, start // 8, -(-stop // 8)).view("<u4")
            shifts = 4 * np.arange(8, dtype=np.uint32)[:, None]
            zero = (words[:, None] >> shifts & 15).astype(np.uint8).reshape(-1, words.shape[1])
            zero = zero[start % 8 : start % 8 + stop - start].repeat(pieces.repeat, axis=1)
        return join_int4(info.scheme, scale.repeat(pieces.repeat, axis=1), nibbles, zero)

    def _row_scales(self, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start] of a tensor that holds a scale for each row, [n] or [n, 1], or one for all."""
        if info.num_rows > 1:
            values = dequantize(info.scheme, self.read_stored(info, start, stop), 1).reshape(-1)
        else:
            values = dequantize(info.scheme, self.read_stored(info, 0, 1), info.num_cols).reshape(-1)
            values = values[start:stop] if values.size > 1 else values.repeat(stop - start)
        return values

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{path}: can't open: {error.strerror}") from error
            if self._descriptors.setdefault(path, descriptor) != descriptor:
                os.close(descriptor)  # another thread was first
        return self._descriptors[path]
