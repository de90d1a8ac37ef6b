"""Stored rows to float32 and back to dense types; and the check that no stored scale is NaN or infinite."""

import numpy as np

from castiron.builder.checkpoint.bfloat16 import from_bf16, to_bf16
from castiron.builder.checkpoint.fp8_blocks import check_fp8, dequantize_fp8
from castiron.builder.checkpoint.int4_blocks import dequantize_int4
from castiron.models.schemes import DENSE_SCHEMES, SCHEMES
from castiron.runtime.errors import CheckpointError

_CHUNK_ELEMENTS = 4 << 20
_CACHED_ELEMENTS = 256 << 10  # values whose intermediate arrays stay in the processor's caches
# byte offsets of the 16-bit scales inside a block
_SCALE_OFFSETS = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    **{f"int4_g{size}{kind}": (0,) for size in (32, 64, 128) for kind in ("", "z")},
}
# a value is NaN or infinite when all its exponent bits are set
_EXPONENT_BITS = {"f32": (np.uint32, 0x7F800000), "f16": (np.uint16, 0x7C00), "bf16": (np.uint16, 0x7F80)}


def dequantize(scheme: str, rows: np.ndarray, k: int, out: np.ndarray | None = None) -> np.ndarray:
    """float32 [r, k] from stored rows, uint8 [r, row_bytes] (C order); exact. Written to `out` if given."""
    result = np.empty((rows.shape[0], k), dtype=np.float32) if out is None else out
    step = max(1, _CACHED_ELEMENTS // max(k, 1))
    for start in range(0, rows.shape[0], step):
        result[start : start + step] = _dequantize_chunk(scheme, rows[start : start + step], k)
    return result


def _dequantize_chunk(scheme: str, rows: np.ndarray, k: int) -> np.ndarray:
    if scheme == "f32":
        return rows.view(np.float32)
    if scheme == "f16":
        return rows.view(np.float16).astype(np.float32)
    if scheme == "bf16":
        return from_bf16(rows.view(np.uint16))
    if scheme == "fp8":
        return dequantize_fp8(rows)
    if scheme.startswith("int4"):
        return dequantize_int4(scheme, rows)
    from gguf import GGMLQuantizationType, quants

    ggml_type = SCHEMES[scheme].ggml_type
    assert ggml_type is not None
    # as one long row: gguf takes 16 rows at a time, which are few values
    return quants.dequantize(rows.reshape(1, -1), GGMLQuantizationType(ggml_type)).reshape(-1, k)


def to_dense(scheme: str, values: np.ndarray) -> np.ndarray:
    """float32 [r, k] as stored rows of a dense scheme, uint8 [r, row_bytes]; rounds to nearest even."""
    assert scheme in DENSE_SCHEMES, scheme
    values = np.ascontiguousarray(values, dtype=np.float32)
    if scheme == "f32":
        return values.view(np.uint8)
    if scheme == "f16":
        with np.errstate(over="ignore"):  # the caller looks for infinities
            return values.astype(np.float16).view(np.uint8)
    return to_bf16(values).view(np.uint8)


def check_finite(scheme: str, rows: np.ndarray, tensor_name: str) -> None:
    """Raise CheckpointError if a dense value, or a scale of a block or row, is NaN or infinite (of fp8 see check_fp8).

    rows: uint8 [r, row_bytes] as stored, C order.
    """
    if scheme == "fp8":
        check_fp8(rows, tensor_name)
        return
    if scheme in _EXPONENT_BITS:
        dtype, mask = _EXPONENT_BITS[scheme]
        words = rows.reshape(-1).view(dtype)
    else:
        mask = 0x7F80 if SCHEMES[scheme].scale_dtype == "bf16" else 0x7C00
        blocks = rows.reshape(-1, SCHEMES[scheme].block_bytes)
        offsets = _SCALE_OFFSETS[scheme]
        width = 2 * len(offsets)  # the scales lie side by side
        words = np.ascontiguousarray(blocks[:, offsets[0] : offsets[0] + width]).view(np.uint16).reshape(-1)
    for start in range(0, words.size, _CHUNK_ELEMENTS):
        chunk = words[start : start + _CHUNK_ELEMENTS] & mask
        if (chunk == mask).any():
            kind = "a value" if scheme in _EXPONENT_BITS else "a block scale"
            raise CheckpointError(
                f"tensor {tensor_name}: {kind} is NaN or infinite: the checkpoint is damaged"
            )
