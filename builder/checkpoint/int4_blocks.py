"""Rows of the int4 schemes (models/schemes.py): joined, decoded, and made from float32 by rounding."""

import numpy as np

from castiron.builder.checkpoint.bfloat16 import from_bf16, to_bf16
from castiron.models.schemes import SCHEMES, row_bytes

_CACHED_ELEMENTS = 128 << 10  # of a quantization step whose arrays stay in the processor's caches
# scale = largest magnitude, with its sign, / divisor. -8 is the code with the largest magnitude: the first ones
# use it, clipping little or nothing; the last two are the mirrored range.
_DIVISORS = (-8.0, -8.5, -9.0, -7.5, 7.0, 7.5)


def join_int4(scheme: str, scale: np.ndarray, nibbles: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
    """Stored rows, uint8 [r, row_bytes], in fresh memory.

    scale: uint16 [r, groups], bits of bf16. nibbles: uint8 [r, k / 2], element 2i low and 2i + 1 high in byte i.
    zero: uint8 [r, groups], 0..15, of schemes that have zero points.
    """
    record = SCHEMES[scheme]
    num_rows, num_groups = scale.shape
    blocks = np.empty((num_rows, num_groups, record.block_bytes), np.uint8)
    blocks[..., :2] = np.ascontiguousarray(scale, dtype="<u2")[..., None].view(np.uint8)
    assert record.has_zero_points == (zero is not None)
    if zero is not None:
        blocks[..., 2] = zero
    blocks[..., -record.block_size // 2 :] = nibbles.reshape(num_rows, num_groups, record.block_size // 2)
    return blocks.reshape(num_rows, num_groups * record.block_bytes)


def dequantize_int4(scheme: str, rows: np.ndarray) -> np.ndarray:
    """float32 [r, k] of stored rows; exact."""
    record = SCHEMES[scheme]
    blocks = rows.reshape(rows.shape[0], -1, record.block_bytes)
    scale = from_bf16(np.ascontiguousarray(blocks[..., :2]).view("<u2"))  # [r, groups, 1]
    nibbles = blocks[..., -record.block_size // 2 :]
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(*blocks.shape[:2], -1)
    zero: np.ndarray | float = float(record.zero_point)
    if record.has_zero_points:
        zero = blocks[..., 2:3].astype(np.float32)
    values: np.ndarray = scale * (codes.astype(np.float32) - zero)
    return values.reshape(rows.shape[0], -1)


def quantize_int4(scheme: str, values: np.ndarray) -> np.ndarray:
    """float32 [r, k] rounded to a symmetric int4 scheme's stored rows, uint8 [r, row_bytes].

    Round to nearest. The scale of a group is the one of a few candidates around its largest magnitude / 8 that has
    the least squared error (the search of ggml's reference quantizers, shortened), itself rounded to bf16 first.
    """
    record = SCHEMES[scheme]
    assert record.scale_dtype == "bf16" and not record.has_zero_points, scheme
    num_rows, k = values.shape
    rows = np.empty((num_rows, row_bytes(scheme, k)), np.uint8)
    step = max(1, _CACHED_ELEMENTS // k)
    for start in range(0, num_rows, step):
        groups = values[start : start + step].reshape(-1, record.block_size)
        scale, codes = _round_groups(groups)
        nibbles = codes[:, 0::2] | codes[:, 1::2] << 4
        count = min(step, num_rows - start)
        rows[start : start + step] = join_int4(
            scheme, scale.reshape(count, -1), nibbles.reshape(count, -1), None
        )
    return rows


def _round_groups(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales, uint16 [n, 1] bits of bf16, and codes, uint8 [n, size] 0..15, of groups float32 [n, size]."""
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    largest = np.where(high > -low, high, low)
    best_error = np.full(len(groups), np.inf, np.float32)
    best_bits = np.zeros((len(groups), 1), np.uint16)
    codes, difference = np.empty_like(groups), np.empty_like(groups)
    for divisor in _DIVISORS:
        bits = to_bf16(largest / np.float32(divisor))
        scale = _nearest_codes(groups, bits, codes)
        np.multiply(scale, codes, out=difference)
        np.subtract(groups, difference, out=difference)
        error = np.einsum("ij,ij->i", difference, difference)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_bits[better] = bits[better]
    _nearest_codes(groups, best_bits, codes)
    codes += 8
    return best_bits, codes.astype(np.uint8)


def _nearest_codes(groups: np.ndarray, bits: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Write the codes -8..7 of groups for scales uint16 [n, 1] into `codes`; the scales in float32."""
    scale = from_bf16(bits)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    # of a scale whose inverse isn't finite (zero, or nearly), every value is as good as zero
    np.multiply(groups, np.where(np.isfinite(inverse), inverse, np.float32(0)), out=codes)
    np.rint(codes, out=codes)
    np.clip(codes, -8, 7, out=codes)
    return scale
