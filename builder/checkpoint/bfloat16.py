"""float32 from and to bfloat16, which numpy lacks, as its bits in uint16."""

import numpy as np


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 of the same shape; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """uint16 of the same shape, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
