"""Random quantized weights for kernel tests, and what they mean according to gguf."""

import gguf
import numpy as np

from castiron.models.schemes import SCHEMES, row_bytes

LARGEST_Q = 127 * 256  # of an activation's two digits, 256 * high + low

# Where a block keeps its f16 scales (and minimums), in bytes.
_HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip


def random_rows(scheme: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Checkpoint rows uint8 [n, row_bytes]: codes and scale bits random, f16 scales finite, both signs."""
    if not SCHEMES[scheme].is_quantized:
        values = rng.standard_normal((n, k), dtype=np.float32)
        return encode_dense(scheme, values)
    rows = rng.integers(0, 256, (n, row_bytes(scheme, k)), dtype=np.uint8)
    scale = 0.02 / (1 if SCHEMES[scheme].block_size == 32 else 32)
    for half in range(len(_HALVES[scheme])):
        values = rng.standard_normal((n, k // SCHEMES[scheme].block_size)) * scale
        set_halves(scheme, rows, half, values.astype(np.float16))
    return rows


def encode_dense(scheme: str, values: np.ndarray) -> np.ndarray:
    """f32 values [n, k] as rows of a dense scheme (bf16: truncated)."""
    if scheme == "f32":
        return np.ascontiguousarray(values, np.float32).view(np.uint8)
    if scheme == "f16":
        return values.astype(np.float16).view(np.uint8)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16).view(np.uint8)


def set_halves(scheme: str, rows: np.ndarray, which: int, values: np.ndarray | float) -> None:
    """Overwrite every block's scale (`which` 0) or minimum (1)."""
    blocks = rows.reshape(rows.shape[0], -1, SCHEMES[scheme].block_bytes)
    start = _HALVES[scheme][which]
    halves = np.broadcast_to(np.asarray(values, np.float16), blocks.shape[:2])
    blocks[..., start : start + 2] = np.ascontiguousarray(halves)[..., None].view(np.uint8)


def set_codes(scheme: str, rows: np.ndarray, byte: int) -> None:
    """Overwrite all but the f16 scales: 0 and 255 are the smallest and the largest codes (q8_0: 0 and -1)."""
    blocks = rows.reshape(rows.shape[0], -1, SCHEMES[scheme].block_bytes)
    halves = [blocks[..., start : start + 2].copy() for start in _HALVES[scheme]]
    rows[...] = byte
    for start, half in zip(_HALVES[scheme], halves, strict=True):
        blocks[..., start : start + 2] = half


def dequantize(scheme: str, rows: np.ndarray) -> np.ndarray:
    """The rows' values, f32 [n, k], by the reference implementation of gguf."""
    if scheme == "bf16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if not SCHEMES[scheme].is_quantized:
        return rows.view(np.float32 if scheme == "f32" else np.float16).astype(np.float32)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(SCHEMES[scheme].ggml_type))


def quantize_q8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The op quantize_q8 of x f32 [T, K]: q int8 [T, 2, K], scale f32 [T, K / 32], sum f32 [T, K / 16]."""
    groups = x.reshape(x.shape[0], x.shape[1] // 32, 32).astype(np.float32)
    largest = np.abs(groups).max(-1)
    inverse = np.divide(np.float32(LARGEST_Q), largest, out=np.zeros_like(largest), where=largest > 0)
    values = np.rint(groups * inverse[..., None]).astype(np.int32).reshape(x.shape)
    low = (values + 128 & 255) - 128
    q = np.stack([values - low >> 8, np.maximum(low, -127)], axis=1).astype(np.int8)
    return q, (largest / np.float32(LARGEST_Q)).astype(np.float32), sum_q8(q, largest / np.float32(LARGEST_Q))


def sum_q8(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """f32 [T, K / 16]: scale times the sum of 16 values of q int8 [T, 2, K]."""
    values = 256 * q[:, 0].astype(np.int32) + q[:, 1]
    sums = values.reshape(len(q), values.shape[1] // 16, 16).sum(-1, dtype=np.int32)
    return (sums * np.repeat(scale, 2, axis=1)).astype(np.float32)


def dequantize_q8(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 [T, K] that q int8 [T, 2, K] and scale f32 [T, K / 32] stand for."""
    return (256.0 * q[:, 0] + q[:, 1]) * np.repeat(scale.astype(np.float64), 32, axis=1)
