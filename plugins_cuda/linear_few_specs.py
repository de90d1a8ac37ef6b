"""linear for few tokens (kernels/linear_few.cu) and embedding (kernels/embedding.cu) as data."""

from collections.abc import Callable
from dataclasses import dataclass

from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes
from castiron.plugins_cuda.layouts import (
    ALL_SCHEMES,
    PACKED_SCHEMES,
    TILE_ROWS,
    packed_bytes,
    tile_bytes,
    unit_columns,
)
from castiron.plugins_cuda.linear_inputs import linear_inputs

TOKENS = (8, 16)  # capacities a kernel is compiled for
SPLITS = (1, 2, 3, 4, 8)  # CTAs of a cluster that share k
QUARTER_SPLITS = (1, 2, 4, 6)  # of small CTAs
_CTA_BYTES = {1: 230_000, 2: 115_000, 4: 56_000}  # of shared memory, by CTAs that run on a multiprocessor
_MOST_WARPS, _FEWEST_WARPS, _QUARTER_WARPS = 8, 3, 4
_MOST_SLOTS = 4
_BARRIER_BYTES = 8 * (_MOST_WARPS * _MOST_SLOTS + 1)
# Of times on an H200; a CTA's rates are those of one alone on its multiprocessor.
_START_US = 1.7
_SPLIT_US = 0.7  # to send and add the sums of a cluster
_WAVE_US = 0.5  # to start another CTA of a cluster
_MEMORY_BYTES_PER_US = 4.3e6
_L2_BYTES_PER_US = 6.0e6
_CTA_BYTES_PER_US = 0.04e6
# by split, of CTAs of which two run on a multiprocessor: a cluster lies in one GPC
_CTAS_AT_ONCE = {1: 264, 2: 264, 3: 252, 4: 240, 6: 240, 8: 224}
_TILE_US = {8: 0.09, 16: 0.14}  # of 64 x 64 quantized weights on a multiprocessor, by tokens
_CTA_TILE_US = {8: 0.13, 16: 0.2}
_QUARTER_TILE_US = 0.07
_DENSE = ("bf16", "fp8")  # whose tiles are read as they are
_EMBEDDING_THREADS = 128
_EMBEDDING_COLUMNS = 4 * _EMBEDDING_THREADS


@dataclass(frozen=True)
class Tiling:
    """What kernels/linear_few.cu is compiled with for its scheme and number of tokens."""

    scheme: str
    tokens: int
    quarter: bool = (
        False  # CTAs of 4 warps, of which four run on a multiprocessor: all at once, where n is large
    )

    @property
    def columns(self) -> int:
        """Of a tile, of which a warp has one at a time."""
        return unit_columns(self.scheme)

    @property
    def slot_bytes(self) -> int:
        return tile_bytes(self.scheme) + self.tokens * self.x_bytes * self.columns

    @property
    def x_bytes(self) -> int:
        """Of an element of x."""
        return linear_inputs(self.scheme).x_bytes

    @property
    def received_bytes(self) -> int:
        """Sums from the CTAs of the cluster."""
        return 18 * 16 * self.tokens  # kReceivedBytes

    @property
    def per_sm(self) -> int:
        """CTAs on a multiprocessor: two or four, but one where so few warps would have two tiles each."""
        if self.quarter:
            return 4
        return 2 if _CTA_BYTES[2] - self.received_bytes >= 2 * _FEWEST_WARPS * self.slot_bytes else 1

    @property
    def _ring_bytes(self) -> int:
        return _CTA_BYTES[self.per_sm] - self.received_bytes

    @property
    def fits(self) -> bool:
        """False for small CTAs whose warps haven't room for two tiles each."""
        return not self.quarter or 2 * _QUARTER_WARPS * self.slot_bytes <= self._ring_bytes

    @property
    def warps(self) -> int:
        if self.quarter:
            return _QUARTER_WARPS
        most = _MOST_WARPS if self.tokens == 8 else _MOST_WARPS - 2  # for more registers
        if self.scheme in _DENSE:  # tiles of 8 KB: more of them in flight matter more than more warps
            most = _MOST_WARPS // 2
        return min(most, self._ring_bytes // (2 * self.slot_bytes))

    @property
    def slots(self) -> int:
        """Tiles of a warp in shared memory."""
        return min(_MOST_SLOTS, self._ring_bytes // (self.warps * self.slot_bytes))

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.slots * self.slot_bytes + self.received_bytes


def _num_row_blocks(tiling: Tiling, sizes: Sizes) -> int:
    return -(-sizes["n"] // TILE_ROWS)


def _k_multiple(tiling: Tiling) -> int:
    return 32 // (3 - tiling.x_bytes)  # 16 bytes of fp8, 64 of bf16


def _why_not(tiling: Tiling, split: int) -> Callable[[Sizes], str]:
    def why_not(sizes: Sizes) -> str:
        if sizes["rows"] > tiling.tokens:
            return f"holds {tiling.tokens} tokens, not {sizes['rows']}"
        if sizes["k"] % (multiple := _k_multiple(tiling)):
            return f"takes k in multiples of {multiple}, not {sizes['k']}"
        if -(-sizes["k"] // tiling.columns) < split:
            return f"splits k into {split} parts of {tiling.columns} or more, not {sizes['k']}"
        return ""

    return why_not


def _cost(tiling: Tiling, split: int) -> Callable[[Sizes], float]:
    def cost(sizes: Sizes) -> float:
        row_blocks = _num_row_blocks(tiling, sizes)
        units = row_blocks * -(-sizes["k"] // tiling.columns)
        weight_bytes = units * tile_bytes(tiling.scheme)
        x_bytes = units * tiling.columns * tiling.x_bytes * min(tiling.tokens, sizes["rows"])
        ctas = row_blocks * split
        time = max(
            weight_bytes / min(_MEMORY_BYTES_PER_US, ctas * _CTA_BYTES_PER_US),
            (weight_bytes + x_bytes) / _L2_BYTES_PER_US,
        )
        if tiling.scheme not in _DENSE:
            tiles = units * tiling.columns / 64
            tile_us, cta_tile_us = _TILE_US[tiling.tokens], _CTA_TILE_US[tiling.tokens]
            if tiling.quarter:
                tile_us, cta_tile_us = _QUARTER_TILE_US, 2 * cta_tile_us
            rate = min(sizes["num_sms"] / tile_us, ctas / cta_tile_us)
            time = max(time, tiles / rate)
        if split > 1:
            waves = -(-ctas // (_CTAS_AT_ONCE[split] * tiling.per_sm // 2))
            time += _SPLIT_US + _WAVE_US * waves * (split - 1)
        return _START_US + time

    return cost


def _linear(tiling: Tiling, dtype: str, split: int) -> CudaKernelSpec:
    scheme, tokens = tiling.scheme, tiling.tokens
    inputs = linear_inputs(scheme)
    defines = {
        "SCHEME": f"SCHEME_{scheme.upper()}",
        "TOKENS": tokens,
        "OUT_F32": int(dtype == "f32"),
        "WARPS": tiling.warps,
        "SLOTS": tiling.slots,
        "SHARED_BYTES": tiling.shared_bytes,
        "PER_SM": tiling.per_sm,
    }

    def grid(sizes: Sizes) -> Grid:
        return (split, _num_row_blocks(tiling, sizes), 1)

    return CudaKernelSpec(
        name=f"linear_few.{scheme}.{tokens}"
        + (".quarter" if tiling.quarter else "")
        + (f".s{split}" if split > 1 else "")
        + (".f32" if dtype == "f32" else ""),
        op=inputs.op,
        parameters=parameters(
            inputs.parameters("p:in0.ptr", "x_stride:l:in0.stride0 y_stride:l:out0.stride0")
        ),
        params_struct="LinearParams",
        architecture="sm_90",  # bulk copies, clusters
        scheme=scheme,
        weight_input=inputs.weight_input,
        k_multiple=_k_multiple(tiling),
        source="linear_few.cu",
        entry="linear_few",
        threads=32 * tiling.warps,
        grid=grid,
        operands={**inputs.operands, "out0": dtype},
        defines=tuple((name, str(value)) for name, value in defines.items()),
        cluster=(split, 1, 1),
        shared_bytes=lambda _: tiling.shared_bytes,
        static_shared_bytes=_BARRIER_BYTES,
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


TILINGS = tuple(
    tiling
    for scheme in ALL_SCHEMES
    for tokens in TOKENS
    for quarter in ((False,) if scheme in _DENSE else (False, True))
    if (tiling := Tiling(scheme, tokens, quarter)).fits
)
SPECS: tuple[CudaKernelSpec, ...] = (
    *(
        _linear(tiling, dtype, split)
        for tiling in TILINGS
        for dtype in ("bf16", "f32")
        for split in (QUARTER_SPLITS if tiling.quarter else SPLITS)
    ),
    *(_embedding(scheme) for scheme in PACKED_SCHEMES),
)
