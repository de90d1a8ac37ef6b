"""Made-up weights from a counter-based generator: the same bytes wherever they are computed, in any slices.

An engine built with --weights dummy carries a list of DummyTensor records instead of weights; they are
written straight in the kernels' layout, which a record describes as a repeating unit, so nothing here knows
schemes. Random words are Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011),
keyed by the tensor's name: 32 bytes for each value of the counter, which starts at 1.
"""

import hashlib
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

MEMBER = "dummy_weights.json"
COUNTER_BYTES = 32  # random bytes one counter value gives
CHUNK_BYTES = 4 << 20
MAX_UNIT_BYTES = 1 << 16

_ITEMSIZES = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "codes": 1}
_E4M3_NAN = np.uint8(0x7F)  # whatever the sign


class DummyTensor(msgspec.Struct, frozen=True):
    """One parameter to make up.

    Dense elements are mean + amplitude * u, u uniform in [-1, 1) with 16 bits. Of "e4m3", they are random bytes,
    NaN replaced by the largest number (its neighbour); mean and amplitude say nothing. Of "codes", every unit is random
    bytes that begin with `scales_per_unit` scales = mean + amplitude * u and, where minimum_factor isn't 0,
    as many f16 minimums = minimum_factor * scale; where has_zero_points, as many bytes 0..15.
    """

    name: str
    weights_offset: int  # bytes, in memory class `weights`
    num_bytes: int
    element: str  # "f32", "f16", "bf16", "e4m3", or "codes"
    mean: float
    amplitude: float
    unit_bytes: int = COUNTER_BYTES  # of "codes"; a multiple of 32
    minimum_factor: float = 0.0
    scales_per_unit: int = 16
    scale_element: str = "f16"  # or "bf16"
    has_zero_points: bool = False


def encode_dummy_tensors(tensors: Iterable[DummyTensor]) -> bytes:
    """The engine member that lists what to make up."""
    return msgspec.json.encode(tuple(tensors))


def decode_dummy_tensors(data: bytes, weights_bytes: int) -> tuple[DummyTensor, ...]:
    """The records of an engine member, each checked to lie inside `weights_bytes`.

    Raises ValueError (msgspec's included) naming what is wrong.
    """
    tensors = msgspec.json.decode(data, type=tuple[DummyTensor, ...])
    for tensor in tensors:
        if tensor.element not in _ITEMSIZES:
            raise ValueError(f"dummy tensor {tensor.name[:80]} has elements of {tensor.element!r:.80}")
        if tensor.scale_element not in ("f16", "bf16"):
            raise ValueError(f"dummy tensor {tensor.name[:80]} has scales of {tensor.scale_element!r:.80}")
        smallest = 4 * tensor.scales_per_unit
        is_unit = 0 < smallest <= tensor.unit_bytes <= MAX_UNIT_BYTES if tensor.element == "codes" else True
        if not is_unit or tensor.unit_bytes % COUNTER_BYTES or tensor.num_bytes % unit_bytes(tensor):
            raise ValueError(f"dummy tensor {tensor.name[:80]} isn't made of whole units")
        end = tensor.weights_offset + tensor.num_bytes
        if tensor.weights_offset < 0 or tensor.num_bytes < 0 or end > weights_bytes:
            raise ValueError(f"dummy tensor {tensor.name[:80]} lies outside the weights")
    return tensors


def fill_dummy_weights(tensors: Iterable[DummyTensor], weights: np.ndarray) -> None:
    """Write every tensor into `weights`, uint8 and flat."""
    for tensor in tensors:
        end = tensor.weights_offset
        for chunk in dummy_chunks(tensor):
            weights[end : end + chunk.size] = chunk
            end += chunk.size


def dummy_chunks(tensor: DummyTensor) -> Iterator[np.ndarray]:
    """The tensor's bytes in order, uint8, a few MiB at a time."""
    unit = unit_bytes(tensor)
    units_per_chunk = max(1, CHUNK_BYTES // unit)
    num_units = tensor.num_bytes // unit
    for first in range(0, num_units, units_per_chunk):
        yield dummy_units(tensor, first, min(units_per_chunk, num_units - first))


def unit_bytes(tensor: DummyTensor) -> int:
    """Bytes that are made independently of all others: the layout's unit, or one dense element."""
    return tensor.unit_bytes if tensor.element == "codes" else _ITEMSIZES[tensor.element]


def dummy_units(tensor: DummyTensor, first: int, count: int) -> np.ndarray:
    """Units first .. first + count of the tensor, uint8 and flat."""
    if tensor.element == "e4m3":
        codes = _random_bytes(tensor.name, first, count)
        codes -= (codes & _E4M3_NAN) == _E4M3_NAN
        return codes
    if tensor.element != "codes":
        return _dense(tensor, _random_bytes(tensor.name, 2 * first, 2 * count).view("<u2"))
    unit = tensor.unit_bytes
    packed = _random_bytes(tensor.name, first * unit, count * unit).reshape(count, unit)
    num_scales = tensor.scales_per_unit
    header = packed[:, : 4 * num_scales].view("<u2")
    values = tensor.mean + tensor.amplitude * _uniform(header[:, :num_scales])
    scales = values.astype("<f2")
    header[:, :num_scales] = _truncated(values) if tensor.scale_element == "bf16" else scales.view("<u2")
    if tensor.has_zero_points:
        packed[:, 2 * num_scales : 3 * num_scales] &= 15
    if tensor.minimum_factor:
        minimums = (scales.astype(np.float32) * np.float32(tensor.minimum_factor)).astype("<f2")
        header[:, num_scales:] = minimums.view("<u2")
    return packed.reshape(-1)


def _dense(tensor: DummyTensor, words: np.ndarray) -> np.ndarray:
    values = np.float32(tensor.mean) + np.float32(tensor.amplitude) * _uniform(words)
    if tensor.element == "bf16":
        return _truncated(values).view(np.uint8)
    return values.astype("<f4" if tensor.element == "f32" else "<f2").view(np.uint8)


def _truncated(values: np.ndarray) -> np.ndarray:
    """The bf16 bits of float32 values, rounded towards zero."""
    return (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")


def _uniform(words: np.ndarray) -> np.ndarray:
    """float32 in [-1, 1) from 16-bit words."""
    return words.astype(np.float32) * np.float32(2.0**-15) - np.float32(1)


def _random_bytes(name: str, start: int, count: int) -> np.ndarray:
    """Bytes start .. start + count of the tensor's stream, uint8."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    counter = start // COUNTER_BYTES
    skip = start - counter * COUNTER_BYTES
    num_words = -(-(skip + count) // 8)
    words = np.random.Philox(counter=counter, key=key).random_raw(num_words)
    return np.ascontiguousarray(words, dtype="<u8").view(np.uint8)[skip : skip + count]
