"""linear for many tokens (kernels/linear_many.cu) as data: tilings, and when which one is the fastest."""

from collections.abc import Callable
from dataclasses import dataclass

from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes
from castiron.plugins_cuda.layouts import ALL_SCHEMES, TILE_ROWS, tile_bytes, unit_columns
from castiron.plugins_cuda.linear_inputs import linear_inputs

SHARED_BYTES = {1: 232448, 2: 115712}  # kSharedBytes of the kernel, by CTAs on a multiprocessor
_THREADS = {1: 384, 2: 320}  # two warpgroups that multiply, and warps that copy
_BOX_BYTES = 128  # of a row of a box of x
_DENSE = ("bf16", "fp8")  # whose tiles are multiplied as they are
_GROUP_TOKENS = 2048  # over which the weight is read once

# Fitted to times on an H200 of bf16 weights (tests/plugins_cuda/linear_times.py); stored times win over them.
_FLOPS_PER_MICROSECOND = 724e6
_EFFICIENCY = {256: 1.01, 128: 0.98, 64: 0.9, 32: 0.6, 16: 0.35}  # tokens of a tile -> share of that rate
_MEMORY_BYTES_PER_MICROSECOND = {1: 3.6e6, 2: 4.1e6}  # by CTAs on a multiprocessor
_L2_BYTES_PER_MICROSECOND = 6e6
_SM_BYTES_PER_MICROSECOND = 0.1e6  # of one multiprocessor, from L2
_CTA_BYTES_PER_MICROSECOND = {1: 0.1e6, 2: 0.045e6}  # of one CTA's ring where the weight comes from memory
_CLUSTERS_AT_ONCE = {
    1: 1.0,
    2: 1.0,
    3: 0.96,
    4: 0.91,
    5: 0.84,
    6: 0.84,
    8: 0.85,
}  # a cluster lies in one GPC: some SMs idle
_START_MICROSECONDS = {1: 1.5, 2: 2.0}
# a tile that is split is a CTA's only one: nothing hides its start and sum
_SPLIT_MICROSECONDS = {1: 6.0, 2: 1.0}
_SPLIT_ELEMENTS_PER_MICROSECOND = {1: 9_500, 2: 16_000}  # of a tile
# two CTAs on a multiprocessor whose tiles are split take this much longer than the terms below say, by tokens
_SPLIT_SLOWDOWN = {16: 1.2, 32: 1.2, 64: 1.55, 128: 1.55}
# To dequantize and multiply 64 x 64 int4 weights, by CTAs that fit on a multiprocessor, and tokens; other
# quantized weights take longer.
_TILE_MICROSECONDS = {
    1: {32: 0.08, 64: 0.102, 128: 0.15, 256: 0.29},
    2: {16: 0.17, 32: 0.19, 64: 0.25, 128: 0.4},
}
_OTHER_TILES = 1.8


@dataclass(frozen=True)
class Tiling:
    rows: int  # of the weight
    tokens: int
    multicast: int = 1  # CTAs of a cluster that share x
    split_k: int = 1  # CTAs of a cluster that share a tile
    per_sm: int = 1  # CTAs on a multiprocessor

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.multicast * self.split_k

    @property
    def name(self) -> str:
        """As in a kernel's name: 128x256.m2, 256x128.s4."""
        suffix = f".m{self.multicast}" if self.multicast > 1 else f".s{self.split_k}"
        return f"{self.rows}x{self.tokens}{suffix if self.cluster > 1 else ''}"


_TILINGS = (
    Tiling(128, 256, multicast=2),
    Tiling(128, 128, multicast=2),
    Tiling(256, 128),
    Tiling(256, 128, split_k=2),
    Tiling(256, 128, split_k=3),
    Tiling(256, 128, split_k=4),
    Tiling(256, 128, split_k=5),
    Tiling(256, 128, split_k=8),
    Tiling(256, 128, split_k=6),
    *(Tiling(256, tokens, split_k=split) for tokens in (32, 64) for split in (1, 2, 4, 5, 6, 8)),
    *(Tiling(128, tokens, split_k=split, per_sm=2) for tokens in (16, 32, 64) for split in (1, 2, 3, 4)),
    *(Tiling(128, tokens, multicast=4, per_sm=2) for tokens in (32, 64)),
)
# dequantizing takes too many registers for two of these on a multiprocessor
_DENSE_TILINGS = tuple(Tiling(128, 128, split_k=split, per_sm=2) for split in (2, 3, 4))
_F32_TILINGS = (  # of logits: n is large
    Tiling(128, 256, multicast=2),
    Tiling(256, 128),
    Tiling(256, 64),
    *(Tiling(128, tokens, per_sm=2) for tokens in (16, 32, 64)),
)


def _num_row_tiles(tiling: Tiling, sizes: Sizes) -> int:
    """Tiles of clusters for one tile of tokens."""
    return -(-sizes["n"] // (tiling.rows * tiling.multicast))


def _num_tiles(tiling: Tiling, sizes: Sizes) -> int:
    """Tiles of clusters at the capacity."""
    return _num_row_tiles(tiling, sizes) * -(-sizes["rows"] // tiling.tokens)


def _grid(tiling: Tiling) -> Callable[[Sizes], Grid]:
    def grid(sizes: Sizes) -> Grid:
        clusters = _num_tiles(tiling, sizes)
        if tiling.split_k == 1:  # persistent
            clusters = min(clusters, sizes["num_sms"] * tiling.per_sm // tiling.cluster)
        return (clusters * tiling.cluster, 1, 1)

    return grid


def _why_not(scheme: str, tiling: Tiling) -> Callable[[Sizes], str]:
    multiple = 16 // linear_inputs(scheme).x_bytes

    def why_not(sizes: Sizes) -> str:
        if sizes["k"] % multiple:
            return f"copies rows of x by a multiple of {multiple} elements, not {sizes['k']}"
        if -(-sizes["k"] // unit_columns(scheme)) < tiling.split_k:
            return f"splits k into {tiling.split_k} parts of {unit_columns(scheme)} or more, not {sizes['k']}"
        return ""

    return why_not


def _cost(scheme: str, tiling: Tiling) -> Callable[[Sizes], float]:
    weight_bytes_per_k = tile_bytes(scheme) / (TILE_ROWS * unit_columns(scheme))  # of a row
    per_sm = tiling.per_sm
    x_bytes = linear_inputs(scheme).x_bytes

    def cost(sizes: Sizes) -> float:
        num_sms, n, k = sizes["num_sms"], sizes["n"], sizes["k"]
        num_tiles = _num_tiles(tiling, sizes)
        at_once = int(num_sms * per_sm * _CLUSTERS_AT_ONCE[tiling.cluster] / tiling.cluster)
        waves = -(-num_tiles // at_once)
        num_ctas = num_tiles * tiling.cluster  # in all waves
        ctas_of_sm = min(per_sm, -(-num_ctas // num_sms))  # at once
        part_k = -(-k // tiling.split_k)
        rate = _FLOPS_PER_MICROSECOND * _EFFICIENCY[tiling.tokens] / num_sms * (2 // x_bytes)
        flops = waves * ctas_of_sm * 2 * tiling.rows * tiling.tokens * part_k / rate
        x_copied = x_bytes * tiling.tokens / tiling.multicast
        copied = part_k * (tiling.rows * weight_bytes_per_k + x_copied)  # of a CTA
        copies = waves * ctas_of_sm * copied / _SM_BYTES_PER_MICROSECOND
        passes = -(-sizes["rows"] // _GROUP_TOKENS)
        weight_bytes = -(-n // TILE_ROWS) * TILE_ROWS * k * weight_bytes_per_k * passes
        readers = min(_num_row_tiles(tiling, sizes), at_once) * tiling.cluster
        memory = weight_bytes / min(
            _MEMORY_BYTES_PER_MICROSECOND[per_sm], readers * _CTA_BYTES_PER_MICROSECOND[per_sm]
        )
        through_l2 = num_ctas * copied / _L2_BYTES_PER_MICROSECOND if per_sm > 1 else 0.0
        dequantizing = 0.0
        if scheme not in _DENSE:
            tile_time = _TILE_MICROSECONDS[per_sm][tiling.tokens]
            tile_time *= 1.0 if scheme.startswith("int4") else _OTHER_TILES
            dequantizing = waves * tiling.rows / TILE_ROWS * part_k / 64 * tile_time
        split = 0.0
        if tiling.split_k > 1:
            elements = tiling.rows * tiling.tokens
            split = waves * (_SPLIT_MICROSECONDS[per_sm] + elements / _SPLIT_ELEMENTS_PER_MICROSECOND[per_sm])
        time = _START_MICROSECONDS[per_sm] + split + max(flops, copies, memory, through_l2, dequantizing)
        if tiling.split_k > 1 and per_sm > 1 and scheme in _DENSE:
            time *= _SPLIT_SLOWDOWN[tiling.tokens]
        return time

    return cost


def _spec(scheme: str, tiling: Tiling, dtype: str) -> CudaKernelSpec:
    defines = {
        "SCHEME": f"SCHEME_{scheme.upper()}",
        "ROWS": tiling.rows,
        "TOKENS": tiling.tokens,
        "MULTICAST": tiling.multicast,
        "SPLIT_K": tiling.split_k,
        "PER_SM": tiling.per_sm,
        "OUT_F32": int(dtype == "f32"),
    }
    inputs = linear_inputs(scheme)
    return CudaKernelSpec(
        name=f"linear_many.{scheme}.{tiling.name}" + (".f32" if dtype == "f32" else ""),
        op=inputs.op,
        parameters=parameters(inputs.parameters("t:in0.map", "y_stride:l:out0.stride0")),
        params_struct="LinearTmaParams",
        architecture="sm_90a",  # warpgroup multiplies
        scheme=scheme,
        weight_input=inputs.weight_input,
        source="linear_many.cu",
        entry="linear_many",
        threads=_THREADS[tiling.per_sm],
        grid=_grid(tiling),
        operands={**inputs.operands, "out0": dtype},
        defines=tuple((name, str(value)) for name, value in defines.items()),
        cluster=(tiling.cluster, 1, 1),
        shared_bytes=lambda _: SHARED_BYTES[tiling.per_sm],
        boxes={"x": (_BOX_BYTES // inputs.x_bytes, tiling.tokens // tiling.multicast)},
        order=f"linear_many.s{tiling.split_k}",  # k in turn in each part, then the parts: no tile size changes it
        why_not=_why_not(scheme, tiling),
        cost=_cost(scheme, tiling),
    )


SPECS: tuple[CudaKernelSpec, ...] = tuple(
    _spec(scheme, tiling, dtype)
    for scheme in ALL_SCHEMES
    for dtype, tilings in (
        ("bf16", _TILINGS + (_DENSE_TILINGS if scheme in _DENSE else ())),
        ("f32", _F32_TILINGS),
    )
    for tiling in tilings
)
