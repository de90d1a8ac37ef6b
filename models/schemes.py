"""Quantization schemes as records: what a stored weight element means, without any code per format.

A block of `block_size` consecutive elements of one row shares a scale (and a minimum). Values are
    w = scale * q + minimum        (has_minimum)
    w = scale * (q - zero_point)   (symmetric)
GGUF blocks, and later compressed-tensors, NVFP4 and FP8, map onto these without loss.
Byte layouts of the GGUF blocks: ggml-common.h and ggml-quants.c of ggml (facts); see plugins_cpu/layouts.py
for ours.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """How one weight matrix is stored. Dense types are schemes with block_size 1 and no scale."""

    name: str
    bits: int  # of one element's code
    block_size: int  # elements a checkpoint block holds
    block_bytes: int  # bytes of such a block in the checkpoint
    group_size: int = 1  # elements sharing one scale
    zero_point: int = 0
    has_minimum: bool = False
    scale_dtype: str = ""  # "" for dense
    ggml_type: int | None = None

    @property
    def is_quantized(self) -> bool:
        return bool(self.scale_dtype)


_ALL = (
    Scheme("f32", 32, 1, 4, ggml_type=0),
    Scheme("f16", 16, 1, 2, ggml_type=1),
    Scheme("bf16", 16, 1, 2, ggml_type=30),
    Scheme("q4_0", 4, 32, 18, 32, zero_point=8, scale_dtype="f16", ggml_type=2),
    Scheme("q4_1", 4, 32, 20, 32, has_minimum=True, scale_dtype="f16", ggml_type=3),
    Scheme("q5_0", 5, 32, 22, 32, zero_point=16, scale_dtype="f16", ggml_type=6),
    Scheme("q5_1", 5, 32, 24, 32, has_minimum=True, scale_dtype="f16", ggml_type=7),
    Scheme("q8_0", 8, 32, 34, 32, scale_dtype="f16", ggml_type=8),
    Scheme("q4_k", 4, 256, 144, 32, has_minimum=True, scale_dtype="f16*u6", ggml_type=12),
    Scheme("q5_k", 5, 256, 176, 32, has_minimum=True, scale_dtype="f16*u6", ggml_type=13),
    Scheme("q6_k", 6, 256, 210, 16, zero_point=32, scale_dtype="f16*i8", ggml_type=14),
)

SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _ALL}
DENSE_SCHEMES = tuple(s.name for s in _ALL if not s.is_quantized)
QUANTIZED_SCHEMES = tuple(s.name for s in _ALL if s.is_quantized)
BY_GGML_TYPE: dict[int, Scheme] = {s.ggml_type: s for s in _ALL if s.ggml_type is not None}
