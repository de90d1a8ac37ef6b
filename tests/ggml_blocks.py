"""Writing float32 values as GGUF blocks, for tests. The legacy types come from the gguf package; the K types,
which it only reads, are quantized here (simply, without ggml's search for the best scale)."""

import gguf
import numpy as np

from castiron.models.schemes import SCHEMES


def quantize_rows(scheme: str, values: np.ndarray) -> np.ndarray:
    """float32 [..., k] as stored rows of any of the eleven schemes: uint8 [..., row_bytes]."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if scheme in _K_QUANTIZERS:
        blocks = _K_QUANTIZERS[scheme](values.reshape(-1, 256))
        return blocks.reshape(*values.shape[:-1], -1)
    return gguf.quants.quantize(values, ggml_type(scheme)).view(np.uint8).reshape(*values.shape[:-1], -1)


def dequantize_rows(scheme: str, rows: np.ndarray) -> np.ndarray:
    """float32 [..., k] of stored rows, by the gguf package."""
    return gguf.quants.dequantize(rows, ggml_type(scheme))


def ggml_type(scheme: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(SCHEMES[scheme].ggml_type)


def _half_bytes(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _asymmetric(blocks: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 [n, 8, 32] in 0..top, the 12 bytes of 6-bit scales and minimums, and d, dmin (4 bytes)."""
    groups = blocks.reshape(-1, 8, 32)
    low = np.maximum(-groups.min(axis=2), 0)  # what is subtracted, never negative
    step = (groups.max(axis=2) + low) / top
    d = (step.max(axis=1) / 63).astype(np.float16).astype(np.float32)
    dmin = (low.max(axis=1) / 63).astype(np.float16).astype(np.float32)
    scale = np.clip(np.rint(step / np.maximum(d, 1e-30)[:, None]), 0, 63).astype(np.uint8)
    minimum = np.clip(np.rint(low / np.maximum(dmin, 1e-30)[:, None]), 0, 63).astype(np.uint8)
    width = np.maximum(scale * d[:, None], 1e-30)[:, :, None]
    codes = np.clip(np.rint((groups + (minimum * dmin[:, None])[:, :, None]) / width), 0, top).astype(
        np.uint8
    )
    packed = np.empty((len(groups), 12), dtype=np.uint8)
    packed[:, 0:4] = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    packed[:, 4:8] = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    packed[:, 8:12] = (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4
    return codes, packed, np.concatenate([_half_bytes(d), _half_bytes(dmin)], axis=1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [n, 8, 32] -> [n, 128]: even groups in the low nibbles, odd groups in the high ones."""
    return ((codes[:, 0::2] & 15) | (codes[:, 1::2] & 15) << 4).reshape(-1, 128)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    codes, packed, scales = _asymmetric(blocks, 15)
    return np.concatenate([scales, packed, _nibbles(codes)], axis=1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    codes, packed, scales = _asymmetric(blocks, 31)
    high = np.zeros((len(codes), 32), dtype=np.uint8)
    for group in range(8):
        high |= (codes[:, group] >> 4) << group
    return np.concatenate([scales, packed, high, _nibbles(codes)], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    step = np.abs(groups).max(axis=2) / 31
    d = (step.max(axis=1) / 127).astype(np.float16).astype(np.float32)
    scale = np.clip(np.rint(step / np.maximum(d, 1e-30)[:, None]), 0, 127).astype(np.int8)
    width = np.maximum(scale * d[:, None], 1e-30)[:, :, None]
    codes = (np.clip(np.rint(groups / width), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (codes[:, :, 0:2] & 15) | (codes[:, :, 2:4] & 15) << 4  # [n, 2, 2, 32]
    high = np.zeros((len(codes), 2, 32), dtype=np.uint8)
    for quarter in range(4):
        high |= (codes[:, :, quarter] >> 4) << (2 * quarter)
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), scale.view(np.uint8), _half_bytes(d)]
    return np.concatenate(parts, axis=1)


_K_QUANTIZERS = {"q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k}
