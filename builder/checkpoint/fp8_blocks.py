"""Rows of scheme fp8 (models/schemes.py): joined, decoded, checked, and made from float32 by rounding."""

import ml_dtypes
import numpy as np

from castiron.models.schemes import SCHEMES
from castiron.runtime.errors import CheckpointError

LARGEST = 448.0  # of e4m3
_HEADER_BYTES = SCHEMES["fp8"].row_header_bytes
_NAN = 0x7F  # whatever the sign
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_SMALLEST_SCALE = np.finfo(np.float32).tiny  # of rows of zeros, or nearly


def join_fp8(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Stored rows, uint8 [r, 4 + k], in fresh memory, of scales float32 [r] and codes uint8 [r, k]."""
    rows = np.empty((codes.shape[0], _HEADER_BYTES + codes.shape[1]), np.uint8)
    rows[:, :_HEADER_BYTES] = np.ascontiguousarray(scale, dtype="<f4")[:, None].view(np.uint8)
    rows[:, _HEADER_BYTES:] = codes
    return rows


def split_fp8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales float32 [r] and codes uint8 [r, k] of stored rows."""
    scale = np.ascontiguousarray(rows[:, :_HEADER_BYTES]).view("<f4")[:, 0]
    return scale, rows[:, _HEADER_BYTES:]


def dequantize_fp8(rows: np.ndarray) -> np.ndarray:
    """float32 [r, k] of stored rows; exact where the product of scale and code is a float32, else rounded to one."""
    scale, codes = split_fp8(rows)
    values: np.ndarray = _VALUES[codes] * scale[:, None]
    return values


def quantize_fp8(values: np.ndarray) -> np.ndarray:
    """float32 [r, k], finite, rounded to stored rows, uint8 [r, 4 + k]: scale = row's largest magnitude / 448."""
    scale = np.maximum(np.abs(values).max(axis=1) / np.float32(LARGEST), _SMALLEST_SCALE)
    scaled = np.clip(values / scale[:, None], -LARGEST, LARGEST)  # a rounded-down scale would give more
    return join_fp8(scale, scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def check_fp8(rows: np.ndarray, tensor_name: str) -> None:
    """Raise CheckpointError if a scale of stored rows isn't a positive number or a code is NaN."""
    scale, codes = split_fp8(rows)
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise CheckpointError(
            f"tensor {tensor_name}: a scale of its float8 rows is not a positive number: the checkpoint is damaged"
        )
    if ((codes & _NAN) == _NAN).any():
        raise CheckpointError(f"tensor {tensor_name}: a float8 value is NaN: the checkpoint is damaged")
