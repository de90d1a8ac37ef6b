"""Random checkpoint rows of every weight scheme, and the values they stand for, with numpy alone.

The block formats are those of ggml-common.h and ggml-quants.c of ggml, and of models/schemes.py (int4).
"""

import numpy as np

from castiron.models.schemes import SCHEMES, row_bytes

# where a block keeps its f16 scales (and minimums), in bytes
_HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip


def random_rows(scheme: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Rows uint8 [n, row_bytes]: codes and scale bits random, f16 scales finite, both signs."""
    if scheme == "bf16":
        bits = rng.standard_normal((n, k), dtype=np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8)
    block_size, block_bytes = SCHEMES[scheme].block_size, SCHEMES[scheme].block_bytes
    rows = rng.integers(0, 256, (n, row_bytes(scheme, k)), dtype=np.uint8)
    blocks = rows.reshape(n, k // block_size, block_bytes)
    if scheme.startswith("int4"):
        scales = (rng.standard_normal(blocks.shape[:2]) * 0.02).astype(np.float32).view(np.uint32) >> 16
        blocks[..., :2] = scales.astype(np.uint16)[..., None].view(np.uint8)
        if scheme.endswith("z"):
            blocks[..., 2] &= 15
        return rows
    for start in _HALVES[scheme]:
        halves = rng.standard_normal(blocks.shape[:2]) * 0.02 / (1 if block_size == 32 else 32)
        blocks[..., start : start + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    return rows


def decode_rows(scheme: str, rows: np.ndarray) -> np.ndarray:
    """Values f32 [n, k] of rows uint8 [n, row_bytes]."""
    if scheme == "bf16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = rows.reshape(-1, SCHEMES[scheme].block_bytes)
    if scheme.startswith("int4"):
        values = _decode_int4(scheme, blocks)
    else:
        values = (
            _decode_k(scheme, blocks) if SCHEMES[scheme].block_size == 256 else _decode_32(scheme, blocks)
        )
    return values.astype(np.float32).reshape(rows.shape[0], -1)


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """f32 [blocks, 1] of the f16 at a byte."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _decode_32(scheme: str, blocks: np.ndarray) -> np.ndarray:
    scale = _half(blocks, 0)
    if scheme == "q8_0":
        return scale * blocks[:, 2:].view(np.int8)
    start = 4 if scheme in ("q4_1", "q5_1") else 2
    high = np.zeros((len(blocks), 32), np.int32)
    if scheme in ("q5_0", "q5_1"):
        word = np.ascontiguousarray(blocks[:, start : start + 4]).view(np.uint32)
        high = (word >> np.arange(32, dtype=np.uint32) & 1).astype(np.int32)
        start += 4
    nibbles = blocks[:, start:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.int32) | high << 4
    if scheme in ("q4_1", "q5_1"):
        return scale * codes + _half(blocks, 2)
    return scale * (codes - (8 if scheme == "q4_0" else 16))


def _decode_int4(scheme: str, blocks: np.ndarray) -> np.ndarray:
    scale = (np.ascontiguousarray(blocks[:, :2]).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    zero = blocks[:, 2:3].astype(np.float32) if scheme.endswith("z") else np.float32(8)
    nibbles = blocks[:, -SCHEMES[scheme].block_size // 2 :]
    codes = np.empty((len(blocks), SCHEMES[scheme].block_size), np.float32)
    codes[:, 0::2], codes[:, 1::2] = nibbles & 15, nibbles >> 4
    return scale * (codes - zero)


def _decode_k(scheme: str, blocks: np.ndarray) -> np.ndarray:
    if scheme == "q6_k":
        low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
        low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
        high = high >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3
        codes = (low | high << 4).astype(np.int32) - 32
        scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
        return (_half(blocks, 208) * scales)[:, :, None] * codes.reshape(-1, 16, 16)
    packed = blocks[:, 4:16].astype(np.int32)
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    nibbles = blocks[:, -128:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(-1, 8, 32).astype(np.int32)
    if scheme == "q5_k":
        high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes |= high.astype(np.int32) << 4
    return (_half(blocks, 0) * scales)[:, :, None] * codes - (_half(blocks, 2) * minimums)[:, :, None]
