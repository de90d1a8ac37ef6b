"""Made-up weights from a counter-based generator: the same bytes wherever they are computed, in any slices.

An engine built with --weights dummy carries a list of DummyTensor records instead of weights. A record describes
the kernels' layout as a repeating unit of fields, each with a distribution, so nothing here knows schemes. Random
words are Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by the
tensor's name: 32 bytes for each value of the counter, which starts at 1. A byte of the tensor depends on the
random block at its own place (of "f16_multiple": at the place `distance` before), so blocks are made
independently of each other: here by numpy, on a GPU by plugins_cuda/kernels/fill_dummy.cu, byte for byte alike.
"""

import hashlib
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

MEMBER = "dummy_weights.json"
KERNEL_MEMBER = "kernels/fill_dummy.cubin"  # of engines for CUDA
BLOCK_BYTES = 32  # random bytes one counter value gives; what fields are made of
CHUNK_BYTES = 4 << 20
MAX_UNIT_BYTES = 1 << 16
MAX_FIELDS = 4  # kMaxFields of fill_dummy.cu

# Distributions of a field. u is uniform in [-1, 1) with the 16 bits of an element's lowest random bytes.
BITS = "bits"  # random bytes & mask
E4M3 = "e4m3"  # random bytes, those of NaN (0x7F, 0xFF) made the largest finite codes
F32, F16, BF16 = "f32", "f16", "bf16"  # mean + amplitude * u; bf16 rounds towards zero
F16_MULTIPLE = "f16_multiple"  # f16: factor * the f16 element `distance` bytes before it
KINDS = (BITS, E4M3, F32, F16, BF16, F16_MULTIPLE)  # at the number fill_dummy.cu knows them by


class DummyField(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes of a unit that are alike. Fields follow each other."""

    num_bytes: int  # a multiple of 32
    kind: str  # of KINDS
    mask: int = 255  # of BITS
    mean: float = 0.0  # of F32, F16, BF16, and of the elements that F16_MULTIPLE multiplies
    amplitude: float = 0.0
    factor: float = 0.0  # of F16_MULTIPLE
    distance: int = 0  # bytes, a multiple of 32


class DummyTensor(msgspec.Struct, frozen=True):
    """Memory to make up: units of these fields one after another, the last one cut where the bytes end."""

    name: str  # the generator's key
    weights_offset: int  # bytes, in memory class `weights`; a multiple of 32
    num_bytes: int
    fields: tuple[DummyField, ...]

    @property
    def unit_bytes(self) -> int:
        """Bytes of a whole unit."""
        return sum(field.num_bytes for field in self.fields)

    @property
    def num_units(self) -> int:
        """Units, a cut one at the end included."""
        return -(-self.num_bytes // self.unit_bytes)


def encode_dummy_tensors(tensors: Iterable[DummyTensor]) -> bytes:
    """The engine member that lists what to make up."""
    return msgspec.json.encode(tuple(tensors))


def decode_dummy_tensors(data: bytes, weights_bytes: int) -> tuple[DummyTensor, ...]:
    """The records of an engine member, each checked to lie inside `weights_bytes`.

    Raises ValueError (msgspec's included) naming what is wrong.
    """
    tensors = msgspec.json.decode(data, type=tuple[DummyTensor, ...])
    for tensor in tensors:
        label = f"dummy tensor {tensor.name[:80]}"
        if not 1 <= len(tensor.fields) <= MAX_FIELDS:
            raise ValueError(f"{label} has {len(tensor.fields)} fields, expected 1 to {MAX_FIELDS}")
        start = 0
        for field in tensor.fields:
            _check_field(label, field, start)
            start += field.num_bytes
        if start > MAX_UNIT_BYTES:
            raise ValueError(f"{label} has units of {start} bytes, expected at most {MAX_UNIT_BYTES}")
        end = tensor.weights_offset + tensor.num_bytes
        if tensor.weights_offset < 0 or tensor.num_bytes < 0 or end > weights_bytes:
            raise ValueError(f"{label} lies outside the weights")
        if tensor.weights_offset % BLOCK_BYTES:
            raise ValueError(f"{label} starts at {tensor.weights_offset}, no multiple of {BLOCK_BYTES}")
    return tensors


def _check_field(label: str, field: DummyField, start: int) -> None:
    if field.kind not in KINDS:
        raise ValueError(
            f"{label} has a field of kind {field.kind!r:.80}, expected one of {', '.join(KINDS)}"
        )
    if field.num_bytes <= 0 or field.num_bytes % BLOCK_BYTES:
        raise ValueError(f"{label} has a field of {field.num_bytes} bytes, no multiple of {BLOCK_BYTES}")
    if not 0 <= field.mask <= 255:
        raise ValueError(f"{label} has a mask of {field.mask}, expected 0 to 255")
    is_before = field.num_bytes <= field.distance <= start and field.distance % BLOCK_BYTES == 0
    if field.kind == F16_MULTIPLE and not is_before:
        raise ValueError(f"{label} has multiples of what lies {field.distance} bytes before byte {start}")
    largest = float(np.finfo(np.float32).max)
    if not all(abs(number) <= largest for number in (field.mean, field.amplitude, field.factor)):
        raise ValueError(f"{label} has a number that isn't a finite float32")


def fill_dummy_weights(tensors: Iterable[DummyTensor], weights: np.ndarray) -> None:
    """Write every tensor into `weights`, uint8 and flat."""
    for tensor in tensors:
        end = tensor.weights_offset
        for chunk in dummy_chunks(tensor):
            weights[end : end + chunk.size] = chunk
            end += chunk.size


def dummy_chunks(tensor: DummyTensor) -> Iterator[np.ndarray]:
    """The tensor's bytes in order, uint8, a few MiB at a time."""
    units_per_chunk = max(1, CHUNK_BYTES // tensor.unit_bytes)
    for first in range(0, tensor.num_units, units_per_chunk):
        yield dummy_units(tensor, first, min(units_per_chunk, tensor.num_units - first))


def dummy_units(tensor: DummyTensor, first: int, count: int) -> np.ndarray:
    """Units first .. first + count of the tensor, uint8 and flat, cut where the tensor ends."""
    unit = tensor.unit_bytes
    units = _random_bytes(tensor.name, first * unit, count * unit).reshape(count, unit)
    end = unit
    for field in reversed(tensor.fields):  # multiples are made while what they multiply is still random
        start = end - field.num_bytes
        _make_field(field, units, start, end)
        end = start
    return units.reshape(-1)[: tensor.num_bytes - first * unit]


def _make_field(field: DummyField, units: np.ndarray, start: int, end: int) -> None:
    """Turn bytes start .. end of each unit (uint8 [count, unit_bytes]) from random ones into the field's."""
    part = units[:, start:end]
    if field.kind == BITS:
        if field.mask != 255:
            part &= np.uint8(field.mask)
    elif field.kind == E4M3:
        part ^= ((part & 0x7F) == 0x7F).astype(np.uint8)
    elif field.kind == F32:
        part.view("<f4")[...] = _uniform(field, part.view("<u4").astype("<u2"))
    elif field.kind == F16:
        part.view("<f2")[...] = _uniform(field, part.view("<u2"))
    elif field.kind == BF16:
        part.view("<u2")[...] = _uniform(field, part.view("<u2")).view("<u4") >> np.uint32(16)
    else:
        source = units[:, start - field.distance : end - field.distance].view("<u2")
        scales = _uniform(field, source).astype("<f2").astype(np.float32)
        part.view("<f2")[...] = scales * np.float32(field.factor)


def _uniform(field: DummyField, words: np.ndarray) -> np.ndarray:
    """float32 mean + amplitude * u of 16-bit words; the product and the sum are rounded, u is exact."""
    uniform = words.astype(np.float32) * np.float32(2.0**-15) - np.float32(1)
    return np.float32(field.mean) + np.float32(field.amplitude) * uniform


def generator_key(name: str) -> int:
    """The 128-bit key of a tensor's random words."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")


def _random_bytes(name: str, start: int, count: int) -> np.ndarray:
    """Bytes start .. start + count of the tensor's stream, uint8; both are multiples of 32."""
    philox = np.random.Philox(counter=start // BLOCK_BYTES, key=generator_key(name))
    return np.ascontiguousarray(philox.random_raw(count // 8), dtype="<u8").view(np.uint8)
