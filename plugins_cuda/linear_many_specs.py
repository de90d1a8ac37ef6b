"""linear for many tokens (kernels/linear_many.cu) as data: tilings, and when which one is the fastest."""

from collections.abc import Callable
from dataclasses import dataclass

from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes
from castiron.plugins_cuda.layouts import PACKED_SCHEMES, TILE_ROWS, tile_bytes, unit_columns

SHARED_BYTES = {1: 232448, 2: 115712}  # kSharedBytes of the kernel, by CTAs on a multiprocessor
_THREADS = {1: 384, 2: 320}  # two warpgroups that multiply, and warps that copy
_STEP = 64  # k of a box of x
_GROUP_TOKENS = 2048  # over which the weight is read once

# Fitted to times on an H200 of bf16 weights (tests/plugins_cuda/test_linear_costs.py holds what they must decide).
_FLOPS_PER_MICROSECOND = 724e6
_EFFICIENCY = {256: 1.01, 128: 0.98, 64: 0.9, 32: 0.6, 16: 0.35}  # tokens of a tile -> share of that rate
_MEMORY_BYTES_PER_MICROSECOND = {1: 3.6e6, 2: 4.1e6}  # by CTAs on a multiprocessor
_L2_BYTES_PER_MICROSECOND = 6e6
_SM_BYTES_PER_MICROSECOND = 0.1e6  # of one multiprocessor, from L2
_CTA_BYTES_PER_MICROSECOND = {1: 0.1e6, 2: 0.045e6}  # of one CTA's ring where the weight comes from memory
_CLUSTERS_AT_ONCE = {1: 1.0, 2: 1.0, 4: 0.91}  # by size: a cluster lies in one GPC, some SMs stay idle
_START_MICROSECONDS = {1: 1.5, 2: 2.0}
_SHARING_MICROSECONDS = 3.0
_SHARED_ELEMENTS_PER_MICROSECOND = 16_000  # of a tile
# To dequantize and multiply 64 x 64 int4 weights, by CTAs on a multiprocessor and tokens; other quantized
# weights take longer.
_TILE_MICROSECONDS = {
    1: {32: 0.1, 64: 0.125, 128: 0.18, 256: 0.36},
    2: {16: 0.2, 32: 0.23, 64: 0.28, 128: 0.45},
}
_OTHER_TILES = 1.5


@dataclass(frozen=True)
class Tiling:
    rows: int  # of the weight
    tokens: int
    multicast: int = 1  # tiles of rows of a cluster, which share x
    shares_k: bool = False  # tiles are dealt out by units of k
    per_sm: int = 1  # CTAs on a multiprocessor

    @property
    def name(self) -> str:
        """As in a kernel's name: 128x256.m2, 256x64.k."""
        multicast = f".m{self.multicast}" if self.multicast > 1 else ""
        return f"{self.rows}x{self.tokens}{multicast}{'.k' if self.shares_k else ''}"


_TILINGS = (
    Tiling(128, 256, multicast=2),
    Tiling(128, 128, multicast=2),
    *(Tiling(256, tokens, shares_k=shares) for tokens in (32, 64, 128) for shares in (False, True)),
    *(Tiling(128, tokens, 1, shares, per_sm=2) for tokens in (16, 32, 64) for shares in (False, True)),
    *(Tiling(256, tokens, 2, True) for tokens in (64, 128)),
    *(Tiling(128, tokens, 2, shares, per_sm=2) for tokens in (32, 64) for shares in (False, True)),
    *(Tiling(128, tokens, 4, per_sm=2) for tokens in (32, 64)),
    Tiling(128, 256, multicast=2, shares_k=True),
    Tiling(128, 128, multicast=2, shares_k=True),
)
# dequantizing takes too many registers for two of these on a multiprocessor
_DENSE_TILINGS = (Tiling(128, 128, shares_k=True, per_sm=2),)
_F32_TILINGS = (  # of logits: n is large
    Tiling(128, 256, multicast=2),
    Tiling(256, 128),
    Tiling(256, 64),
    *(Tiling(128, tokens, per_sm=2) for tokens in (16, 32, 64)),
)


def _num_tiles(tiling: Tiling, sizes: Sizes) -> int:
    """Tiles of clusters at the capacity."""
    rows = tiling.rows * tiling.multicast
    return -(-sizes["n"] // rows) * -(-sizes["rows"] // tiling.tokens)


def _num_units(scheme: str, tiling: Tiling, sizes: Sizes) -> int:
    """Units of k of all tiles at the capacity."""
    return _num_tiles(tiling, sizes) * -(-sizes["k"] // unit_columns(scheme))


def _num_clusters(scheme: str, tiling: Tiling, sizes: Sizes) -> int:
    """As many as run at once, or as have work."""
    work = _num_units(scheme, tiling, sizes) if tiling.shares_k else _num_tiles(tiling, sizes)
    return min(work, sizes["num_sms"] * tiling.per_sm // tiling.multicast)


def _grid(scheme: str, tiling: Tiling) -> Callable[[Sizes], Grid]:
    return lambda sizes: (_num_clusters(scheme, tiling, sizes) * tiling.multicast, 1, 1)


def _scratch_bytes(scheme: str, tiling: Tiling) -> Callable[[Sizes], int]:
    """Sums of the first and the last tile of every CTA."""

    def scratch_bytes(sizes: Sizes) -> int:
        ctas = _num_clusters(scheme, tiling, sizes) * tiling.multicast
        return ctas * 2 * tiling.rows * tiling.tokens * 4

    return scratch_bytes


def _counters_bytes(tiling: Tiling) -> Callable[[Sizes], int]:
    """One for each tile."""
    return lambda sizes: _num_tiles(tiling, sizes) * tiling.multicast * 4


def _why_not(sizes: Sizes) -> str:
    if sizes["k"] % 8:
        return f"copies rows of x by a multiple of 8 elements, not {sizes['k']}"
    return ""


def _cost(scheme: str, tiling: Tiling) -> Callable[[Sizes], float]:
    weight_bytes_per_k = tile_bytes(scheme) / (TILE_ROWS * unit_columns(scheme))  # of a row
    per_sm = tiling.per_sm

    def cost(sizes: Sizes) -> float:
        num_sms, n, k = sizes["num_sms"], sizes["n"], sizes["k"]
        num_tiles = _num_tiles(tiling, sizes)
        clusters = _num_clusters(scheme, tiling, sizes)
        at_once = int(clusters * _CLUSTERS_AT_ONCE[tiling.multicast])
        waves = num_tiles / clusters if tiling.shares_k else -(-num_tiles // at_once)  # tiles of a CTA
        ctas_of_sm = min(per_sm, -(-clusters * tiling.multicast // num_sms))  # at once
        rate = _FLOPS_PER_MICROSECOND * _EFFICIENCY[tiling.tokens] / num_sms
        flops = waves * ctas_of_sm * 2 * tiling.rows * tiling.tokens * k / rate
        copied = k * (tiling.rows * weight_bytes_per_k + 2 * tiling.tokens / tiling.multicast)  # of a tile
        copies = waves * ctas_of_sm * copied / _SM_BYTES_PER_MICROSECOND
        passes = -(-sizes["rows"] // _GROUP_TOKENS)
        weight_bytes = -(-n // TILE_ROWS) * TILE_ROWS * k * weight_bytes_per_k * passes
        memory = weight_bytes / min(
            _MEMORY_BYTES_PER_MICROSECOND[per_sm],
            clusters * tiling.multicast * _CTA_BYTES_PER_MICROSECOND[per_sm],
        )
        through_l2 = num_tiles * tiling.multicast * copied / _L2_BYTES_PER_MICROSECOND
        dequantizing = 0.0
        if scheme != "bf16":
            tile_time = _TILE_MICROSECONDS[per_sm][tiling.tokens] * (
                1.0 if scheme.startswith("int4") else _OTHER_TILES
            )
            dequantizing = waves * tiling.rows / TILE_ROWS * k / 64 * tile_time
        sharing = 0.0
        if tiling.shares_k:
            sharing = _SHARING_MICROSECONDS + tiling.rows * tiling.tokens / _SHARED_ELEMENTS_PER_MICROSECOND
        return _START_MICROSECONDS[per_sm] + sharing + max(flops, copies, memory, through_l2, dequantizing)

    return cost


def _spec(scheme: str, tiling: Tiling, dtype: str) -> CudaKernelSpec:
    defines = {
        "SCHEME": f"SCHEME_{scheme.upper()}",
        "ROWS": tiling.rows,
        "TOKENS": tiling.tokens,
        "MULTICAST": tiling.multicast,
        "SHARED_K": int(tiling.shares_k),
        "PER_SM": tiling.per_sm,
        "OUT_F32": int(dtype == "f32"),
    }
    scratch = "partials:p:scratch.ptr counters:p:counters.ptr"
    if not tiling.shares_k:
        scratch = "partials:l:zero counters:l:zero"
    return CudaKernelSpec(
        name=f"linear_many.{scheme}.{tiling.name}" + (".f32" if dtype == "f32" else ""),
        op="linear",
        parameters=parameters(
            f"x:t:in0.map weight:p:in1.ptr bias:p:in2.ptr? y:p:out0.ptr {scratch} header:p:header.ptr "
            "y_stride:l:out0.stride0 count:i:in0.count n:i:in1.dim0 k:i:in1.dim1 pad:i:zero"
        ),
        params_struct="LinearTmaParams",
        scheme=scheme,
        weight_input=1,
        source="linear_many.cu",
        entry="linear_many",
        threads=_THREADS[tiling.per_sm],
        grid=_grid(scheme, tiling),
        operands={"in0": "bf16", "in2": "f32", "out0": dtype},
        defines=tuple((name, str(value)) for name, value in defines.items()),
        cluster=(tiling.multicast, 1, 1),
        shared_bytes=lambda _: SHARED_BYTES[tiling.per_sm],
        scratch_bytes=_scratch_bytes(scheme, tiling) if tiling.shares_k else lambda _: 0,
        counters_bytes=_counters_bytes(tiling) if tiling.shares_k else lambda _: 0,
        boxes={"x": (_STEP, tiling.tokens // tiling.multicast)},
        why_not=_why_not,
        cost=_cost(scheme, tiling),
    )


SPECS: tuple[CudaKernelSpec, ...] = tuple(
    _spec(scheme, tiling, dtype)
    for scheme in PACKED_SCHEMES
    for dtype, tilings in (
        ("bf16", _TILINGS + (_DENSE_TILINGS if scheme == "bf16" else ())),
        ("f32", _F32_TILINGS),
    )
    for tiling in tilings
)
