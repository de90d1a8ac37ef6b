"""The few ZIP structures an engine file is made of, shared by its writer and its strict reader.

Source: PKWARE APPNOTE.TXT 6.3 (local header 4.3.7, central directory 4.3.12, zip64 4.3.14 to 4.3.15 and
4.5.3).
"""

import re
import struct

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
ZIP64_END = struct.Struct("<4sQ2H2I4Q")
ZIP64_LOCATOR = struct.Struct("<4sIQI")

VERSION_PLAIN = 20
VERSION_ZIP64 = 45
LIMIT_16 = 0xFFFF  # these values mean "see the zip64 field"
LIMIT_32 = 0xFFFFFFFF

EXTRA_ZIP64 = 0x0001
EXTRA_PADDING = 0xCA57  # zeros that align the member's data
ZIP64_EXTRA_BYTES = 4 + 16  # both sizes
MIN_EXTRA_BYTES = (
    ZIP64_EXTRA_BYTES + 4
)  # room for zip64 sizes, known only once a member is written, and padding

MEMBER_ALIGNMENT = 4096
WEIGHTS_ALIGNMENT = 65536
MANIFEST_MEMBER = "engine.json"
COMMENT_PREFIX = b"castiron1 "  # then the sha256 of engine.json in hex
COMMENT_BYTES = len(COMMENT_PREFIX) + 64
MAX_NAME_BYTES = 200

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


def is_member_name(name: str) -> bool:
    """Whether `name` is a relative path of plain ASCII parts, none of them hidden, "." or ".."."""
    return len(name) <= MAX_NAME_BYTES and _NAME.fullmatch(name) is not None


def required_alignment(name: str) -> int:
    """Bytes a member's data must be aligned to."""
    return WEIGHTS_ALIGNMENT if name.startswith("weights/") else MEMBER_ALIGNMENT


def local_extra(size: int, num_bytes: int) -> bytes:
    """The local header's extra field, `num_bytes` long, of a member of `size` bytes."""
    fields = b""
    if size >= LIMIT_32:
        fields = struct.pack("<HHQQ", EXTRA_ZIP64, 16, size, size)
    padding = num_bytes - len(fields) - 4
    return fields + struct.pack("<HH", EXTRA_PADDING, padding) + bytes(padding)
