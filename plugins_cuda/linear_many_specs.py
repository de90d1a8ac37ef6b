"""linear for many tokens (kernels/linear_many.cu) as data: tilings, and when which one is the fastest."""

from collections.abc import Callable
from dataclasses import dataclass

from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes
from castiron.plugins_cuda.layouts import PACKED_SCHEMES, TILE_ROWS, tile_bytes, unit_columns

SHARED_BYTES = 232448  # kSharedBytes of the kernel: all that a CTA may have
_THREADS = 384  # a warpgroup that copies, two that multiply
_STEP = 64  # k of a box of x
_FLOPS_PER_MICROSECOND = 650e6
_MEMORY_BYTES_PER_MICROSECOND = 4.0e6
_L2_BYTES_PER_MICROSECOND = 6.5e6
_SMS_OF_GPC = 16  # at least; a cluster lies in one
_STREAMING_CTAS = 100  # that reach the memory's rate together
_GROUP_TOKENS = 2048  # over which the weight is read once
_EFFICIENCY = {256: 1.0, 128: 0.88, 64: 0.6}  # tokens of a tile -> share of the rate, copies aside
_QUANTIZED_EFFICIENCY = 0.9  # dequantizing beside the tensor cores


@dataclass(frozen=True)
class Tiling:
    rows: int  # of the weight
    tokens: int
    multicast: int = 1  # CTAs of a cluster that share x
    split_k: int = 1  # CTAs of a cluster that share a tile

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
    Tiling(256, 64),
    Tiling(256, 64, split_k=2),
    Tiling(256, 64, split_k=4),
    Tiling(256, 64, split_k=8),
)
_F32_TILINGS = (Tiling(128, 256, multicast=2), Tiling(256, 128), Tiling(256, 64))  # of logits: n is large


def _num_tiles(tiling: Tiling, sizes: Sizes) -> int:
    """Tiles of clusters at the capacity."""
    rows = tiling.rows * tiling.multicast
    return -(-sizes["n"] // rows) * -(-sizes["rows"] // tiling.tokens)


def _grid(tiling: Tiling) -> Callable[[Sizes], Grid]:
    def grid(sizes: Sizes) -> Grid:
        clusters = _num_tiles(tiling, sizes)
        if tiling.split_k == 1:  # persistent
            clusters = min(clusters, sizes["num_sms"] // tiling.cluster)
        return (clusters * tiling.cluster, 1, 1)

    return grid


def _why_not(scheme: str, tiling: Tiling) -> Callable[[Sizes], str]:
    def why_not(sizes: Sizes) -> str:
        if sizes["k"] % 8:
            return f"copies rows of x by a multiple of 8 elements, not {sizes['k']}"
        if -(-sizes["k"] // unit_columns(scheme)) < tiling.split_k:
            return f"splits k into {tiling.split_k} parts of {unit_columns(scheme)} or more, not {sizes['k']}"
        return ""

    return why_not


def _cost(scheme: str, tiling: Tiling) -> Callable[[Sizes], float]:
    weight_bytes_per_k = tile_bytes(scheme) / (TILE_ROWS * unit_columns(scheme))  # of a row
    efficiency = _EFFICIENCY[tiling.tokens] * (1.0 if scheme == "bf16" else _QUANTIZED_EFFICIENCY)

    def cost(sizes: Sizes) -> float:
        num_sms, k = sizes["num_sms"], sizes["k"]
        num_ctas = _num_tiles(tiling, sizes) * tiling.cluster
        at_once = num_sms // tiling.cluster
        if tiling.cluster > 2:
            at_once = num_sms // _SMS_OF_GPC * (_SMS_OF_GPC // tiling.cluster)
        waves = -(-_num_tiles(tiling, sizes) // at_once)
        part_k = -(-k // tiling.split_k)
        flops = 2 * tiling.rows * tiling.tokens * part_k / (_FLOPS_PER_MICROSECOND * efficiency / num_sms)
        copied = part_k * (tiling.rows * weight_bytes_per_k + 2 * tiling.tokens / tiling.multicast)
        copies = copied / (_L2_BYTES_PER_MICROSECOND / num_sms)
        passes = -(-sizes["rows"] // _GROUP_TOKENS)
        weight_bytes = -(-sizes["n"] // TILE_ROWS) * TILE_ROWS * k * weight_bytes_per_k * passes
        memory = weight_bytes / (_MEMORY_BYTES_PER_MICROSECOND * min(1.0, num_ctas / _STREAMING_CTAS))
        # a tile that is split is a CTA's only one: nothing hides its start and its sum
        exposed = (
            0.0 if tiling.split_k == 1 else 2.5 * (waves - 1) + waves * tiling.rows * tiling.tokens / 16384
        )
        return 2.5 + exposed + max(waves * flops, waves * copies, memory)

    return cost


def _spec(scheme: str, tiling: Tiling, dtype: str) -> CudaKernelSpec:
    defines = {
        "SCHEME": f"SCHEME_{scheme.upper()}",
        "ROWS": tiling.rows,
        "TOKENS": tiling.tokens,
        "MULTICAST": tiling.multicast,
        "SPLIT_K": tiling.split_k,
        "OUT_F32": int(dtype == "f32"),
    }
    return CudaKernelSpec(
        name=f"linear_many.{scheme}.{tiling.name}" + (".f32" if dtype == "f32" else ""),
        op="linear",
        parameters=parameters(
            "x:t:in0.map weight:p:in1.ptr bias:p:in2.ptr? y:p:out0.ptr header:p:header.ptr "
            "y_stride:l:out0.stride0 count:i:in0.count n:i:in1.dim0 k:i:in1.dim1 pad:i:zero"
        ),
        params_struct="LinearTmaParams",
        scheme=scheme,
        weight_input=1,
        source="linear_many.cu",
        entry="linear_many",
        threads=_THREADS,
        grid=_grid(tiling),
        operands={"in0": "bf16", "in2": "f32", "out0": dtype},
        defines=tuple((name, str(value)) for name, value in defines.items()),
        cluster=(tiling.cluster, 1, 1),
        shared_bytes=lambda _: SHARED_BYTES,
        boxes={"x": (_STEP, tiling.tokens // tiling.multicast)},
        why_not=_why_not(scheme, tiling),
        cost=_cost(scheme, tiling),
    )


SPECS: tuple[CudaKernelSpec, ...] = tuple(
    _spec(scheme, tiling, dtype)
    for scheme in PACKED_SCHEMES
    for dtype, tilings in (("bf16", _TILINGS), ("f32", _F32_TILINGS))
    for tiling in tilings
)
