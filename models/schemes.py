"""Quantization schemes as records: what a stored weight element means, without any code per format.

A block of `block_size` consecutive elements of one row shares a scale (and a minimum). Values are
    w = scale * q + minimum        (has_minimum)
    w = scale * (q - zero_point)   (symmetric)
    w = scale * (q - zero of the group)   (has_zero_points)
GGUF blocks and compressed-tensors' pack-quantized and float-quantized weights, and later NVFP4, map onto these without
loss.
Byte layouts of the GGUF blocks: ggml-common.h and ggml-quants.c of ggml (facts); see plugins_cpu/layouts.py
for ours. The int4 schemes have no block format of their own in a file; theirs here is, for a group of G elements,
    bf16 scale, [u8 zero point 0..15], G / 2 bytes of nibbles: element 2i low, 2i + 1 high in byte i.
A row of fp8 is an f32 scale, then a byte for each element: w = scale * e4m3(code). The codes are OCP's "fn" kind of
e4m3: 448 at most, no infinities, NaN is 0x7F and 0xFF (OCP 8-bit Floating Point Specification, revision 1.0).
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
    has_zero_points: bool = False  # one per group, stored
    row_header_bytes: int = 0  # before a row's first block: its scale
    kinds: tuple[str, ...] = ("cpu", "cuda")  # of hardware with kernels that read it, or single targets

    def is_read_on(self, kind: str) -> bool:
        """Whether some target of the kind has kernels that read it."""
        return kind in self.kinds or (kind == "cuda" and any(name.startswith("sm_") for name in self.kinds))

    @property
    def is_quantized(self) -> bool:
        return bool(self.scale_dtype)


def _int4(group: int) -> tuple[Scheme, Scheme]:
    """Symmetric, and with zero points."""
    kinds, num_bytes = ("cuda",), group // 2
    return (
        Scheme(
            f"int4_g{group}", 4, group, 2 + num_bytes, group, zero_point=8, scale_dtype="bf16", kinds=kinds
        ),
        Scheme(
            f"int4_g{group}z", 4, group, 3 + num_bytes, group, has_zero_points=True, scale_dtype="bf16", kinds=kinds
        ),
    )  # fmt: skip


_ALL = (
    Scheme("f32", 32, 1, 4, ggml_type=0, kinds=("cpu",)),
    Scheme("f16", 16, 1, 2, ggml_type=1, kinds=("cpu",)),
    Scheme("bf16", 16, 1, 2, ggml_type=30),
    Scheme("q4_0", 4, 32, 18, 32, zero_point=8, scale_dtype="f16", ggml_type=2),
    Scheme("q4_1", 4, 32, 20, 32, has_minimum=True, scale_dtype="f16", ggml_type=3),
    Scheme("q5_0", 5, 32, 22, 32, zero_point=16, scale_dtype="f16", ggml_type=6),
    Scheme("q5_1", 5, 32, 24, 32, has_minimum=True, scale_dtype="f16", ggml_type=7),
    Scheme("q8_0", 8, 32, 34, 32, scale_dtype="f16", ggml_type=8),
    Scheme("q4_k", 4, 256, 144, 32, has_minimum=True, scale_dtype="f16*u6", ggml_type=12),
    Scheme("q5_k", 5, 256, 176, 32, has_minimum=True, scale_dtype="f16*u6", ggml_type=13),
    Scheme("q6_k", 6, 256, 210, 16, zero_point=32, scale_dtype="f16*i8", ggml_type=14),
    *_int4(32),
    *_int4(64),
    *_int4(128),
    Scheme("fp8", 8, 1, 1, scale_dtype="f32", kinds=("sm_90",), row_header_bytes=4),
)

SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _ALL}
DENSE_SCHEMES = tuple(s.name for s in _ALL if not s.is_quantized)
BY_GGML_TYPE: dict[int, Scheme] = {s.ggml_type: s for s in _ALL if s.ggml_type is not None}


def row_bytes(scheme: str, k: int) -> int:
    """Bytes of one checkpoint row of k elements. Raises ValueError if k isn't a positive multiple of the block."""
    record = SCHEMES[scheme]
    if k < 1 or k % record.block_size:
        raise ValueError(
            f"{scheme} row has {k} elements, expected a positive multiple of {record.block_size}"
        )
    return record.row_header_bytes + k // record.block_size * record.block_bytes


def schemes_for(kind: str, quantized: bool | None = None) -> tuple[str, ...]:
    """Names of the schemes, all or only the quantized or dense ones, that kernels on `kind` ("cpu", "cuda") read."""
    return tuple(s.name for s in _ALL if s.is_read_on(kind) and quantized in (None, s.is_quantized))
