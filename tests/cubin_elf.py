"""What tests read from a cubin, which is an ELF file: its architecture and its sections. Source: the ELF-64 format."""

import struct


def sm_number(cubin: bytes) -> int:
    """80 of sm_80, 120 of sm_120a: the second byte of e_flags."""
    assert cubin[:4] == b"\x7fELF"
    (flags,) = struct.unpack_from("<I", cubin, 48)
    return int(flags >> 8 & 0xFF)


def static_shared_bytes(cubin: bytes, entry: str) -> int:
    """Of the kernel in a cubin for sm_90, whose section of it begins with a KiB that is the driver's."""
    (sections_start,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 58)

    def section(index: int) -> tuple[int, int, int]:
        """Place of its name, offset, size."""
        start = sections_start + index * entry_size
        (name,) = struct.unpack_from("<I", cubin, start)
        offset, size = struct.unpack_from("<QQ", cubin, start + 24)
        return name, offset, size

    _, names, _ = section(names_index)
    wanted = f".nv.shared.{entry}\0".encode()
    sizes = (section(index) for index in range(count))
    return next(size for name, _, size in sizes if cubin.startswith(wanted, names + name)) - 1024
