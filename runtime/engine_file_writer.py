"""Writes engine files: one ZIP, everything stored, members aligned, reproducible, complete or absent.

    with EngineFileWriter(path) as writer:
        writer.add("graph.onnx", data)
        writer.begin("weights/model-00001.safetensors", WEIGHTS_ALIGNMENT)
        writer.write(chunk)
        writer.end()
        manifest = writer.finish(manifest_without_members)

The file is written beside its final name and renamed once it is whole and on the disk; leaving the block in
any other way removes it. Alignment padding lives in the extra field of a member's local header, so there is
no byte in the file that doesn't belong to a header or a member. ZIP: PKWARE APPNOTE.TXT 6.3.
"""

import errno
import hashlib
import os
import shutil
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import msgspec
import numpy as np

from castiron.runtime.errors import InputError, WorkFailedError
from castiron.runtime.manifest import Manifest, Member
from castiron.runtime.output_file import check_output_file
from castiron.runtime.zip_format import (
    CENTRAL,
    COMMENT_PREFIX,
    END,
    LIMIT_16,
    LIMIT_32,
    LOCAL,
    MANIFEST_MEMBER,
    MEMBER_ALIGNMENT,
    MIN_EXTRA_BYTES,
    VERSION_PLAIN,
    VERSION_ZIP64,
    ZIP64_END,
    ZIP64_LOCATOR,
    is_member_name,
    local_extra,
    required_alignment,
)

Buffer = bytes | bytearray | memoryview | np.ndarray  # contiguous

MAX_EXTRA_BYTES = 0xFFFF
DOS_DATE = 0x0021  # 1980-01-01: builds of the same input are the same bytes
UNIX_FILE_MODE = 0o100644 << 16
MADE_ON_UNIX = 3 << 8


@dataclass(frozen=True)
class _Entry:
    """One finished member, as the central directory needs it."""

    name: bytes
    header_offset: int
    crc: int
    size: int


class EngineFileWriter:
    """Context manager around one engine file being written; see the module's docstring.

    `expected_bytes`, if known, is compared with the free space before anything is written.
    Raises InputError for a bad output path, WorkFailedError when the disk fails or is full.
    """

    def __init__(self, path: str | os.PathLike[str], expected_bytes: int = 0) -> None:
        self.path = Path(path)
        self.members: list[Member] = []
        self._expected_bytes = expected_bytes
        self._entries: list[_Entry] = []
        self._fd = -1
        self._end = 0  # bytes written so far
        self._finished = False
        self._open_name = ""  # member between begin and end
        self._header_offset = 0
        self._data_offset = 0
        self._extra_bytes = 0
        self._crc = 0
        self._sha256 = hashlib.sha256()

    def __enter__(self) -> "EngineFileWriter":
        check_output_file(self.path, ".engine")
        folder = self.path.parent
        free = shutil.disk_usage(folder).free
        if self._expected_bytes > free:
            raise WorkFailedError(self._disk_full(self._expected_bytes, free))
        self._temporary = folder / f".{self.path.name}.{os.getpid()}.partial"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
            self._fd = os.open(self._temporary, flags, 0o666)
        except OSError as error:
            raise InputError(f"cannot write in {folder}: {error.strerror}; choose another output") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if not self._finished:
            self._temporary.unlink(missing_ok=True)
            assert kind is not None, "the block ended without finish()"

    def add(self, name: str, data: Buffer) -> Member:
        """Write a whole member; returns its place and hash."""
        self.begin(name, required_alignment(name))
        self.write(data)
        return self.end()

    def begin(self, name: str, alignment: int = MEMBER_ALIGNMENT) -> None:
        """Start a member whose data will begin at a multiple of `alignment` (4096 to 65536)."""
        assert not self._open_name, f"member {self._open_name} is still open"
        assert is_member_name(name), f"{name!r} is not a member name"
        assert all(name != member.name for member in self.members), f"member {name} was written before"
        assert alignment % required_alignment(name) == 0 and alignment <= 65536, f"alignment {alignment}"
        name_bytes = name.encode("ascii")
        unaligned = self._end + LOCAL.size + len(name_bytes) + MIN_EXTRA_BYTES
        extra_bytes = MIN_EXTRA_BYTES + -unaligned % alignment
        if (
            extra_bytes > MAX_EXTRA_BYTES
        ):  # an extra field is too short for it: an empty member takes up the rest
            self.add(f"padding/{len(self.members)}", b"")
            return self.begin(name, alignment)
        self._open_name = name
        self._header_offset = self._end
        self._extra_bytes = extra_bytes
        self._append(bytes(LOCAL.size + len(name_bytes) + extra_bytes))  # patched by end()
        self._data_offset = self._end
        self._crc = 0
        self._sha256 = hashlib.sha256()

    def write(self, chunk: Buffer) -> None:
        """Append bytes (any contiguous buffer) to the open member."""
        assert self._open_name, "no member is open"
        data = _bytes_of(chunk)
        self._crc = zlib.crc32(data, self._crc)
        self._sha256.update(data)
        self._append(data)

    def end(self) -> Member:
        """Finish the open member; returns its place and hash."""
        assert self._open_name, "no member is open"
        name = self._open_name.encode("ascii")
        size = self._end - self._data_offset
        is_big = size >= LIMIT_32
        size_32 = LIMIT_32 if is_big else size
        header = LOCAL.pack(
            b"PK\x03\x04",
            VERSION_ZIP64 if is_big else VERSION_PLAIN,
            0,
            0,
            0,
            DOS_DATE,
            self._crc,
            size_32,
            size_32,
            len(name),
            self._extra_bytes,
        )
        self._write_at(header + name + local_extra(size, self._extra_bytes), self._header_offset)
        self._entries.append(_Entry(name, self._header_offset, self._crc, size))
        member = Member(self._open_name, self._data_offset, size, self._sha256.hexdigest())
        self.members.append(member)
        self._open_name = ""
        return member

    def finish(self, manifest: Manifest) -> Manifest:
        """Write engine.json (`manifest` with its members filled in) and put the file in place; returns it."""
        manifest = msgspec.structs.replace(manifest, members=tuple(self.members))
        encoded = encode_manifest(manifest)
        self.add(MANIFEST_MEMBER, encoded)
        self._append(self._directory(COMMENT_PREFIX + hashlib.sha256(encoded).hexdigest().encode("ascii")))
        try:
            os.fsync(self._fd)
            self._temporary.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            self._fail(error, self._end, 0)
        self._finished = True
        return manifest

    def _directory(self, comment: bytes) -> bytes:
        """Central directory and end records for what has been written."""
        start = self._end
        parts = []
        for entry in self._entries:
            wide = [value for value in (entry.size, entry.size) if value >= LIMIT_32]
            wide += [entry.header_offset] if entry.header_offset >= LIMIT_32 else []
            extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            version = VERSION_ZIP64 if wide else VERSION_PLAIN
            size_32 = min(entry.size, LIMIT_32)
            parts.append(
                CENTRAL.pack(
                    b"PK\x01\x02",
                    MADE_ON_UNIX | version,
                    version,
                    0,
                    0,
                    0,
                    DOS_DATE,
                    entry.crc,
                    size_32,
                    size_32,
                    len(entry.name),
                    len(extra),
                    0,
                    0,
                    0,
                    UNIX_FILE_MODE,
                    min(entry.header_offset, LIMIT_32),
                )
                + entry.name
                + extra
            )
        directory = b"".join(parts)
        count = len(self._entries)
        end = b""
        if start >= LIMIT_32 or count >= LIMIT_16:
            end_offset = start + len(directory)
            version = VERSION_ZIP64
            end += ZIP64_END.pack(
                b"PK\x06\x06",
                ZIP64_END.size - 12,
                MADE_ON_UNIX | version,
                version,
                0,
                0,
                count,
                count,
                len(directory),
                start,
            )
            end += ZIP64_LOCATOR.pack(b"PK\x06\x07", 0, end_offset, 1)
        count_16 = min(count, LIMIT_16)
        end += END.pack(
            b"PK\x05\x06", 0, 0, count_16, count_16, len(directory), min(start, LIMIT_32), len(comment)
        )
        return directory + end + comment

    def _append(self, data: bytes | memoryview) -> None:
        self._write_at(data, self._end)
        self._end += len(data)

    def _write_at(self, data: bytes | memoryview, offset: int) -> None:
        rest = memoryview(data)
        try:
            while rest.nbytes:
                written = os.pwrite(self._fd, rest, offset)
                rest, offset = rest[written:], offset + written
        except OSError as error:
            self._fail(error, offset, rest.nbytes)

    def _fail(self, error: OSError, num_written: int, num_pending: int) -> NoReturn:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = max(self._expected_bytes, num_written + num_pending)
            free = shutil.disk_usage(self.path.parent).free
            raise WorkFailedError(self._disk_full(needed, num_written + free)) from error
        raise WorkFailedError(
            f"cannot write {self.path}: {error.strerror}; check the disk and try again"
        ) from error

    def _disk_full(self, needed: int, free: int) -> str:
        return (
            f"disk full: {self.path} needs at least {needed} bytes, {free} are free in {self.path.parent}: "
            "free some space or choose another output folder"
        )


def encode_manifest(manifest: Manifest) -> bytes:
    """engine.json: indented, in a fixed order, so that equal manifests are equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1)


def _bytes_of(chunk: Buffer) -> memoryview:
    """A flat view of the buffer's bytes."""
    view = chunk.data if isinstance(chunk, np.ndarray) else memoryview(chunk)
    return view.cast("B") if view.nbytes else memoryview(b"")
