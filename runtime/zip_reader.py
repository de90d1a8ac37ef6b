"""Strict reader of an engine file's ZIP directory: every byte must belong to a known header or member.

The standard library's zipfile is lenient (leading junk, overlaps, disagreeing headers); here each of these
is an EngineFormatError. Only what EngineFileWriter writes is accepted: no compression, encryption, comments
or foreign extra fields. Nothing is allocated beyond the directory (at most MAX_DIRECTORY_BYTES) and one
header.
"""

import os
import struct
from dataclasses import dataclass
from typing import NoReturn

from castiron.runtime.errors import EngineFormatError, EngineTargetError
from castiron.runtime.printable import printable
from castiron.runtime.zip_format import (
    CENTRAL,
    COMMENT_BYTES,
    COMMENT_PREFIX,
    END,
    EXTRA_PADDING,
    EXTRA_ZIP64,
    LIMIT_16,
    LIMIT_32,
    LOCAL,
    ZIP64_END,
    ZIP64_LOCATOR,
    is_member_name,
    required_alignment,
)

MAX_MEMBERS = 4096
MAX_DIRECTORY_BYTES = 4 << 20
_UTF8_NAMES = 0x800  # the one flag that changes nothing for ASCII names


@dataclass(frozen=True)
class ZipEntry:
    """One member: where its header and data lie, and the checksum both headers agree on."""

    name: str
    header_offset: int
    data_offset: int
    size: int
    crc: int


@dataclass(frozen=True)
class _CentralEntry:
    name: str
    header_offset: int
    size: int
    crc: int
    stamp: tuple[int, int, int, int]  # flags, method, time, date: the local header must say the same


class ZipReader:
    """The directory of the open file `fd`; `label` names it in errors."""

    def __init__(self, fd: int, label: str) -> None:
        self._fd = fd
        self._label = label
        self._file_size = os.fstat(fd).st_size

    def read_directory(self) -> tuple[list[ZipEntry], bytes]:
        """All members in file order, and the sha256 hex of engine.json from the ZIP comment.

        Raises EngineFormatError for anything that EngineFileWriter would not have written, EngineTargetError
        for a container of another generation.
        """
        directory_offset, directory_end, count, comment_hash = self._read_end()
        directory = self.read(directory_offset, directory_end - directory_offset)
        central = self._parse_central(directory, count)
        central.sort(key=lambda entry: entry.header_offset)
        entries = []
        end = 0
        for item in central:
            if item.header_offset != end:
                what = "overlaps the one before" if item.header_offset < end else "follows unlisted bytes"
                self._refuse(f"member {item.name} at byte {item.header_offset} {what}, expected it at {end}")
            entry = self._check_local(item, directory_offset)
            entries.append(entry)
            end = entry.data_offset + entry.size
        if end != directory_offset:
            self._refuse(f"{directory_offset - end} unlisted bytes lie before the central directory")
        return entries, comment_hash

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes at `offset`, or EngineFormatError."""
        if offset < 0 or size < 0 or offset + size > self._file_size:
            self._refuse(f"bytes {offset} to {offset + size} lie outside the file of {self._file_size} bytes")
        data = os.pread(self._fd, size, offset)
        while len(data) < size:
            more = os.pread(self._fd, size - len(data), offset + len(data))
            if not more:
                self._refuse(f"the file ended at byte {offset + len(data)} while it was read")
            data += more
        return data

    def _refuse(self, what: str) -> NoReturn:
        raise EngineFormatError(f"{self._label} is not a sound engine file: {what}; copy or build it again")

    def _read_end(self) -> tuple[int, int, int, bytes]:
        """(directory offset, directory end, number of members, comment's hash) from the end records."""
        tail_bytes = END.size + COMMENT_BYTES
        if self._file_size < tail_bytes:
            self._refuse(f"it has {self._file_size} bytes, too few for any")
        end_offset = self._file_size - tail_bytes
        tail = self.read(end_offset, tail_bytes)
        comment = tail[END.size :]
        signature, disk, first_disk, count_here, count, size, offset, comment_bytes = END.unpack_from(tail)
        if signature != b"PK\x05\x06" or comment_bytes != COMMENT_BYTES:
            self._refuse_unknown(self.read(0, 4))
        if (
            comment[:8] == COMMENT_PREFIX[:8]
            and comment[8:9].isdigit()
            and comment[8:10] != COMMENT_PREFIX[8:]
        ):
            generation = comment[8:].split(b" ")[0].decode("ascii", "replace")
            raise EngineTargetError(
                f"{self._label} is an engine container of generation {generation}, this runtime reads 1: "
                "rebuild it with build-engine of this version or update castiron"
            )
        if comment[: len(COMMENT_PREFIX)] != COMMENT_PREFIX:
            self._refuse("its ZIP comment is not that of an engine file")
        directory_end = end_offset
        needs_zip64 = count == LIMIT_16 or offset == LIMIT_32 or size == LIMIT_32
        if needs_zip64:
            directory_end, count, size, offset = self._read_zip64_end(end_offset)
        elif count_here != count:
            self._refuse("it is one part of a split ZIP")
        if disk or first_disk:
            self._refuse("it is one part of a split ZIP")
        if not 1 <= count <= MAX_MEMBERS:
            self._refuse(f"it lists {count} members, expected 1 to {MAX_MEMBERS}")
        if size > MAX_DIRECTORY_BYTES or offset + size != directory_end:
            self._refuse(f"its central directory ({size} bytes at {offset}) doesn't end at {directory_end}")
        return offset, directory_end, count, comment[len(COMMENT_PREFIX) :]

    def _refuse_unknown(self, magic: bytes) -> NoReturn:
        if magic == b"GGUF":
            raise EngineFormatError(
                f"{self._label} is a GGUF checkpoint, not an engine: "
                f"build one with `build-engine {self._label} -o OUT.engine`"
            )
        if magic != b"PK\x03\x04":
            raise EngineFormatError(f"{self._label} is not an engine file: expected what build-engine writes")
        self._refuse("its end record is missing, so it was cut or is another ZIP")

    def _read_zip64_end(self, end_offset: int) -> tuple[int, int, int, int]:
        """(directory end, number of members, directory size, directory offset) of the zip64 end record."""
        locator_offset = end_offset - ZIP64_LOCATOR.size
        record_offset = locator_offset - ZIP64_END.size
        if record_offset < 0:
            self._refuse("its zip64 end record is missing")
        signature, disk, offset, disks = ZIP64_LOCATOR.unpack(self.read(locator_offset, ZIP64_LOCATOR.size))
        if (signature, disk, offset, disks) != (b"PK\x06\x07", 0, record_offset, 1):
            self._refuse("its zip64 locator is wrong")
        record = ZIP64_END.unpack(self.read(record_offset, ZIP64_END.size))
        signature, record_bytes, _, _, disk, first_disk, count_here, count, size, start = record
        if (signature, record_bytes, disk, first_disk) != (b"PK\x06\x06", ZIP64_END.size - 12, 0, 0):
            self._refuse("its zip64 end record is wrong")
        if count_here != count:
            self._refuse("it is one part of a split ZIP")
        return record_offset, count, size, start

    def _parse_central(self, directory: bytes, count: int) -> list[_CentralEntry]:
        entries = []
        names: set[str] = set()
        position = 0
        for index in range(count):
            if position + CENTRAL.size > len(directory):
                self._refuse(f"its central directory ends before member {index} of {count}")
            values = CENTRAL.unpack_from(directory, position)
            signature, _, _, flags, method, time, date, crc, packed, size = values[:10]
            name_bytes, extra_bytes, comment_bytes, disk, _, _, offset = values[10:]
            position += CENTRAL.size
            if signature != b"PK\x01\x02" or position + name_bytes + extra_bytes > len(directory):
                self._refuse(f"entry {index} of its central directory is damaged")
            name = self._member_name(directory[position : position + name_bytes])
            extra = directory[position + name_bytes : position + name_bytes + extra_bytes]
            position += name_bytes + extra_bytes
            if name in names:
                self._refuse(f"member {name} is listed twice")
            names.add(name)
            if flags & ~_UTF8_NAMES:
                self._refuse(
                    f"member {name} has ZIP flags {flags:#x}, encryption and streaming are not accepted"
                )
            if method:
                self._refuse(f"member {name} is compressed (method {method}), expected stored data")
            wide = self._zip64_values(name, extra, sum(value == LIMIT_32 for value in (size, packed, offset)))
            size = wide.pop(0) if size == LIMIT_32 else size
            packed = wide.pop(0) if packed == LIMIT_32 else packed
            offset = wide.pop(0) if offset == LIMIT_32 else offset
            if packed != size or comment_bytes or disk:
                self._refuse(f"member {name} has an entry this reader doesn't accept")
            entries.append(_CentralEntry(name, offset, size, crc, (flags, method, time, date)))
        if position != len(directory):
            self._refuse(f"{len(directory) - position} unlisted bytes end its central directory")
        return entries

    def _check_local(self, entry: _CentralEntry, limit: int) -> ZipEntry:
        """The member's place, after its local header was found to say what the central entry says."""
        name = entry.name.encode("ascii")
        fixed_bytes = LOCAL.size + len(name)
        if entry.header_offset + fixed_bytes > limit:
            self._refuse(f"member {entry.name} lies outside the file")
        header = self.read(entry.header_offset, fixed_bytes)
        values = LOCAL.unpack_from(header)
        signature, _, flags, method, time, date, crc, packed, size, name_bytes, extra_bytes = values
        if signature != b"PK\x03\x04" or name_bytes != len(name) or header[LOCAL.size :] != name:
            self._refuse(f"the local header of member {entry.name} is damaged")
        data_offset = entry.header_offset + fixed_bytes + extra_bytes
        if data_offset > limit:
            self._refuse(f"member {entry.name} lies outside the file")
        extra = self.read(entry.header_offset + fixed_bytes, extra_bytes)
        wide = self._zip64_values(entry.name, extra, 2 if LIMIT_32 in (size, packed) else 0)
        if wide:
            size, packed = wide
        stamp = (flags, method, time, date)
        if (stamp, crc, size, packed) != (entry.stamp, entry.crc, entry.size, entry.size):
            self._refuse(f"the two headers of member {entry.name} disagree")
        if entry.size > limit - data_offset:
            self._refuse(f"member {entry.name} ({entry.size} bytes at {data_offset}) lies outside the file")
        if data_offset % required_alignment(entry.name):
            self._refuse(f"member {entry.name} at byte {data_offset} is not aligned")
        return ZipEntry(entry.name, entry.header_offset, data_offset, entry.size, entry.crc)

    def _member_name(self, raw: bytes) -> str:
        name = raw.decode("ascii", "replace")
        if not is_member_name(name):
            self._refuse(f"it lists a member named {printable(name)}")
        return name

    def _zip64_values(self, name: str, extra: bytes, num_expected: int) -> list[int]:
        """The zip64 values of an extra field, which may hold nothing else but zero padding."""
        values: list[int] = []
        position = 0
        while position < len(extra):
            if position + 4 > len(extra):
                self._refuse(f"the extra field of member {name} is damaged")
            kind, num_bytes = struct.unpack_from("<HH", extra, position)
            body = extra[position + 4 : position + 4 + num_bytes]
            position += 4 + num_bytes
            if position > len(extra):
                self._refuse(f"the extra field of member {name} is damaged")
            if kind == EXTRA_ZIP64 and not values and num_bytes == 8 * num_expected:
                values = list(struct.unpack(f"<{num_expected}Q", body))
            elif kind != EXTRA_PADDING or body.count(0) != len(body):
                self._refuse(f"the extra field of member {name} holds more than padding")
        if len(values) != num_expected:
            self._refuse(f"the extra field of member {name} lacks its zip64 sizes")
        return values
