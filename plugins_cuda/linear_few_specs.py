"""linear for few tokens (kernels/linear_few.cu) and embedding (kernels/embedding.cu) as data."""

from collections.abc import Callable
from dataclasses import dataclass

from castiron.models.kernel_spec import parameters
from castiron.models.schemes import SCHEMES
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes
from castiron.plugins_cuda.layouts import PACKED_SCHEMES, TILE_ROWS, packed_bytes, tile_bytes, unit_columns

TOKENS = (8, 16, 32, 64)  # capacities a kernel is compiled for
SPLITS = (1, 2, 4, 8)  # CTAs of a cluster that share k
_WARPS = 8
_HALF_SM_BYTES = 115_000  # of shared memory, for two CTAs on a multiprocessor
_EMBEDDING_THREADS = 128
_EMBEDDING_COLUMNS = 4 * _EMBEDDING_THREADS

_FIXED_US = 1.3
_MEMORY_BYTES_PER_US = 4.0e6
_L2_BYTES_PER_US = 5.5e6
_SM_BYTES_PER_US = 0.04e6  # that one multiprocessor can take in
_WEIGHTS_PER_US = {True: 12e6, False: 5e6}  # dequantized: as integer codes, as bf16


@dataclass(frozen=True)
class Tiling:
    """What kernels/linear_few.cu derives from its scheme and number of tokens; the names are its own."""

    scheme: str
    tokens: int

    @property
    def scales_sums(self) -> bool:
        return self.scheme != "bf16" and self.tokens <= (8 if SCHEMES[self.scheme].group_size == 16 else 16)

    @property
    def rows(self) -> int:
        return TILE_ROWS if self.tokens <= 16 else 2 * TILE_ROWS

    @property
    def stage_tiles(self) -> int:
        """Along k."""
        row_warps = self.rows // 16 // (1 if self.scheme == "bf16" else 2)
        return 1 if unit_columns(self.scheme) > 64 else _WARPS // row_warps

    @property
    def columns(self) -> int:
        """Of a stage."""
        return self.stage_tiles * unit_columns(self.scheme)

    @property
    def shared_bytes(self) -> int:
        weights = self.rows // TILE_ROWS * self.stage_tiles * tile_bytes(self.scheme)
        stage = weights + self.tokens * (2 * self.columns + 16)
        return stage * min(8, max(3, _HALF_SM_BYTES // stage))


def _num_row_blocks(tiling: Tiling, sizes: Sizes) -> int:
    return -(-sizes["n"] // tiling.rows)


def _why_not(tiling: Tiling, split: int) -> Callable[[Sizes], str]:
    def why_not(sizes: Sizes) -> str:
        if sizes["rows"] > tiling.tokens:
            return f"holds {tiling.tokens} tokens, not {sizes['rows']}"
        if sizes["k"] % 32:
            return f"takes k in multiples of 32, not {sizes['k']}"
        if -(-sizes["k"] // tiling.columns) < split:
            return f"splits k into {split} parts of {tiling.columns} or more, not {sizes['k']}"
        return ""

    return why_not


def _cost(tiling: Tiling, split: int) -> Callable[[Sizes], float]:
    def cost(sizes: Sizes) -> float:
        n, k = sizes["n"], sizes["k"]
        row_blocks = _num_row_blocks(tiling, sizes)
        weight_bytes = TILE_ROWS * -(-n // TILE_ROWS) * -(-k // unit_columns(tiling.scheme)) * (
            tile_bytes(tiling.scheme) // TILE_ROWS
        )  # fmt: skip
        rate = min(_MEMORY_BYTES_PER_US, min(row_blocks * split, sizes["num_sms"]) * _SM_BYTES_PER_US)
        through_l2 = (weight_bytes + row_blocks * tiling.tokens * k * 2) / _L2_BYTES_PER_US
        share = min(1.0, row_blocks * split / sizes["num_sms"])  # of the multiprocessors that work
        dequantizing = (
            0.0 if tiling.scheme == "bf16" else n * k / (_WEIGHTS_PER_US[tiling.scales_sums] * share)
        )
        reduction = 0.0 if split == 1 else 0.3 + 0.05 * split + tiling.rows * tiling.tokens / 20_000
        return _FIXED_US + max(weight_bytes / rate, through_l2, dequantizing) + reduction

    return cost


def _linear(scheme: str, tokens: int, dtype: str, split: int) -> CudaKernelSpec:
    tiling = Tiling(scheme, tokens)
    defines = {
        "SCHEME": f"SCHEME_{scheme.upper()}",
        "TOKENS": tokens,
        "OUT_F32": int(dtype == "f32"),
        "SHARED_BYTES": tiling.shared_bytes,
    }

    def grid(sizes: Sizes) -> Grid:
        return (split, _num_row_blocks(tiling, sizes), 1)

    return CudaKernelSpec(
        name=f"linear_few.{scheme}.{tokens}"
        + (f".s{split}" if split > 1 else "")
        + (".f32" if dtype == "f32" else ""),
        op="linear",
        parameters=parameters(
            "x:p:in0.ptr weight:p:in1.ptr bias:p:in2.ptr? y:p:out0.ptr header:p:header.ptr "
            "x_stride:l:in0.stride0 y_stride:l:out0.stride0 count:i:in0.count n:i:in1.dim0 k:i:in1.dim1 pad:i:zero"
        ),
        params_struct="LinearParams",
        scheme=scheme,
        weight_input=1,
        k_multiple=32,
        source="linear_few.cu",
        entry="linear_few",
        threads=32 * _WARPS,
        grid=grid,
        operands={"in0": "bf16", "in2": "f32", "out0": dtype},
        defines=tuple((name, str(value)) for name, value in defines.items()),
        cluster=(split, 1, 1),
        shared_bytes=lambda _: tiling.shared_bytes,
        why_not=_why_not(tiling, split),
        cost=_cost(tiling, split),
    )


def _embedding(scheme: str) -> CudaKernelSpec:
    def grid(sizes: Sizes) -> Grid:
        return (sizes["rows"], -(-sizes["dim"] // _EMBEDDING_COLUMNS), 1)

    def cost(sizes: Sizes) -> float:
        row_bytes = packed_bytes(scheme, 1, sizes["dim"]) / TILE_ROWS + 4 * sizes["dim"]
        return 2.0 + sizes["rows"] * row_bytes / _MEMORY_BYTES_PER_US

    return CudaKernelSpec(
        name=f"embedding.{scheme}",
        op="embedding",
        parameters=parameters(
            "token_ids:p:in0.ptr last_token:p:in1.ptr table:p:in2.ptr y:p:out0.ptr header:p:header.ptr "
            "y_stride:l:out0.stride0 count:i:in0.count vocab:i:in2.dim0 dim:i:in2.dim1 max_rows:i:in1.dim0"
        ),
        params_struct="EmbeddingParams",
        scheme=scheme,
        weight_input=2,
        dense_inputs=(0,),
        source="embedding.cu",
        entry="embedding",
        threads=_EMBEDDING_THREADS,
        grid=grid,
        operands={"in0": "i32", "out0": "f32"},
        defines=(("SCHEME", f"SCHEME_{scheme.upper()}"),),
        cost=cost,
    )


SPECS: tuple[CudaKernelSpec, ...] = (
    *(
        _linear(scheme, tokens, dtype, split)
        for scheme in PACKED_SCHEMES
        for tokens in TOKENS
        for dtype in ("bf16", "f32")
        for split in SPLITS
    ),
    *(_embedding(scheme) for scheme in PACKED_SCHEMES),
)
