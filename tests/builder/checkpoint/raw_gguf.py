"""GGUF files written field by field, so that each field can be wrong."""

import struct
from dataclasses import dataclass, field

STRING, UINT8, UINT32, INT32, FLOAT32, BOOL, ARRAY = 8, 0, 4, 5, 6, 7, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, payload: bytes) -> bytes:
    """One metadata pair with its payload as given."""
    return text(key) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(
    name: str, dims: tuple[int, ...], ggml_type: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, ggml_type, offset)


ARCHITECTURE = pair("general.architecture", STRING, text("llama"))


@dataclass
class RawGguf:
    """Defaults make a sound file with one f32 tensor of 4 x 8."""

    pairs: list[bytes] = field(default_factory=lambda: [ARCHITECTURE])
    tensors: list[bytes] = field(default_factory=lambda: [tensor("a", (8, 4))])
    data: bytes = bytes(128)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_pairs: int | None = None
    alignment: int = 32

    def encode(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_pairs)
        head += b"".join(self.pairs) + b"".join(self.tensors)
        return head + bytes(-len(head) % self.alignment) + self.data
