"""linear on tensor cores without warpgroups (kernels/linear_mma.cu) as data: for GPUs that lack better kernels."""

from collections.abc import Callable
from dataclasses import dataclass

from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes
from castiron.plugins_cuda.layouts import PACKED_SCHEMES, TILE_ROWS, tile_bytes, unit_columns
from castiron.plugins_cuda.linear_inputs import linear_inputs

SHARED_BYTES = 101376  # of a block on the targets that have the least
_STEP = 64  # columns of a stage
_MOST_STAGES = 4
_GROUP_TOKENS = 2048  # over which the weight is read once

# Not measured on the GPUs this is for: 55 % of an A100's bf16 rate at the largest tile, less at smaller ones.
_SM_FLOPS_PER_MICROSECOND = 2.9e6
_EFFICIENCY = {(128, 128): 0.55, (128, 64): 0.45, (64, 64): 0.35, (64, 16): 0.15}  # by (rows, tokens)
_TILE_MICROSECONDS = (
    0.8  # to dequantize 64 x 64 weights, by a CTA; linear_many takes 0.33 with twice the warps
)
_MEMORY_BYTES_PER_MICROSECOND = 1.4e6
_CTA_BYTES_PER_MICROSECOND = 0.02e6
_START_MICROSECONDS = 4.0


@dataclass(frozen=True)
class Tiling:
    """What kernels/linear_mma.cu is compiled with beside its scheme."""

    rows: int  # of the weight
    tokens: int
    row_warps: int
    token_warps: int

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.tokens}"

    def ring_bytes(self, scheme: str, stages: int) -> int:
        """Stages of x, and the weight tiles that so many steps in a line may touch."""
        units = (stages - 2) // (unit_columns(scheme) // _STEP) + 2
        return stages * self.tokens * _STEP * 2 + units * self.rows // TILE_ROWS * tile_bytes(scheme)

    def stages(self, scheme: str) -> int:
        """As many as fit everywhere."""
        return max(s for s in range(2, _MOST_STAGES + 1) if self.ring_bytes(scheme, s) <= SHARED_BYTES)


_TILINGS = (Tiling(64, 16, 4, 1), Tiling(64, 64, 4, 1), Tiling(128, 64, 4, 2), Tiling(128, 128, 4, 2))
_F32_TILINGS = _TILINGS[:2]  # of logits


def _num_tiles(tiling: Tiling, sizes: Sizes) -> int:
    return -(-sizes["n"] // tiling.rows) * -(-sizes["rows"] // tiling.tokens)


def _why_not(sizes: Sizes) -> str:
    if sizes["k"] % 8:
        return f"copies rows of x by a multiple of 8 elements, not {sizes['k']}"
    return ""


def _cost(scheme: str, tiling: Tiling) -> Callable[[Sizes], float]:
    weight_bytes_of_element = tile_bytes(scheme) / (TILE_ROWS * unit_columns(scheme))
    rate = _SM_FLOPS_PER_MICROSECOND * _EFFICIENCY[tiling.rows, tiling.tokens]
    tile_time = 0.0 if scheme == "bf16" else _TILE_MICROSECONDS

    def cost(sizes: Sizes) -> float:
        tiles = _num_tiles(tiling, sizes)
        waves = -(-tiles // sizes["num_sms"])
        flops = waves * 2 * tiling.rows * tiling.tokens * sizes["k"] / rate
        dequantizing = waves * tiling.rows / TILE_ROWS * sizes["k"] / _STEP * tile_time
        passes = -(-sizes["rows"] // _GROUP_TOKENS)
        weight_bytes = -(-sizes["n"] // TILE_ROWS) * TILE_ROWS * sizes["k"] * weight_bytes_of_element * passes
        readers = min(-(-sizes["n"] // tiling.rows), sizes["num_sms"])
        memory = weight_bytes / min(_MEMORY_BYTES_PER_MICROSECOND, readers * _CTA_BYTES_PER_MICROSECOND)
        return _START_MICROSECONDS + max(flops, memory, dequantizing)

    return cost


def _spec(scheme: str, tiling: Tiling, dtype: str) -> CudaKernelSpec:
    stages = tiling.stages(scheme)
    defines = {
        "SCHEME": f"SCHEME_{scheme.upper()}",
        "ROWS": tiling.rows,
        "TOKENS": tiling.tokens,
        "ROW_WARPS": tiling.row_warps,
        "TOKEN_WARPS": tiling.token_warps,
        "STAGES": stages,
        "OUT_F32": int(dtype == "f32"),
    }

    def grid(sizes: Sizes) -> Grid:
        return (_num_tiles(tiling, sizes), 1, 1)

    return CudaKernelSpec(
        name=f"linear_mma.{scheme}.{tiling.name}" + (".f32" if dtype == "f32" else ""),
        op="linear",
        parameters=parameters(
            linear_inputs(scheme).parameters("p:in0.ptr", "x_stride:l:in0.stride0 y_stride:l:out0.stride0")
        ),
        params_struct="LinearParams",
        scheme=scheme,
        weight_input=1,
        source="linear_mma.cu",
        entry="linear_mma",
        threads=32 * tiling.row_warps * tiling.token_warps,
        grid=grid,
        operands={"in0": "bf16", "in2": "f32", "out0": dtype},
        defines=tuple((name, str(value)) for name, value in defines.items()),
        shared_bytes=lambda _: tiling.ring_bytes(scheme, stages),
        why_not=_why_not,
        cost=_cost(scheme, tiling),
    )


SPECS: tuple[CudaKernelSpec, ...] = tuple(
    _spec(scheme, tiling, dtype)
    for scheme in PACKED_SCHEMES
    for dtype, tilings in (("bf16", _TILINGS), ("f32", _F32_TILINGS))
    for tiling in tilings
)
