"""CUDA kernels of one pass over rows: norms, element-wise ops and gathers."""

from collections.abc import Callable
from typing import Any

from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes

_EIGHT = 8  # elements a thread handles at once
_ELEMENT_THREADS = 256  # of the element-wise kernels
_BYTES_PER_MICROSECOND = 4.0e6
_CTAS_PER_SM = 8  # that element-wise kernels are launched with
_MAX_GRID_Y = 65535
_FP8_MICROSECONDS = 0.3  # of a norm's search for the largest magnitude and its divisions
_FP8_ARCHITECTURE = "sm_89"  # the first that converts to e4m3

# variant of the norms -> (threads of a CTA, threads of a row, chunks of 8 elements a thread holds, µs at one row)
_NORMS = {
    "512": (128, 32, 2, 1.0),
    "1024": (128, 128, 1, 1.1),
    "4096": (256, 256, 2, 1.3),
    "16384": (512, 512, 4, 1.6),
    "any": (512, 512, 0, 4.0),
}


# variant of the kernels that quantize rows -> (CTAs of a cluster, chunks of 8 elements a thread holds, µs at a
# short row, its arithmetic: twice where rows are computed again, more where no other CTA fits beside it)
_FP8_ROWS = {
    "4096": (1, 1, 1.2, 1.0),
    "16384": (1, 4, 1.3, 1.5),
    "pair": (2, 2, 1.5, 1.0),
    "cluster": (8, 1, 1.6, 1.0),
    "any": (1, 0, 3.0, 2.0),
}
_FP8_TURN_MICROSECONDS = 0.1  # of a CTA's part of a row: loads and barriers that nothing overlaps
_FP8_ROW_THREADS = 512  # kThreads of kernels/row_cluster.cuh
_FP8_CTA_THREADS_OF_SM = 1024  # that fit beside each other, by their registers


def _microseconds(fixed: float, num_bytes: int) -> float:
    return fixed + num_bytes / _BYTES_PER_MICROSECOND


def _norm_grid(threads: int, row_threads: int) -> Callable[[Sizes], Grid]:
    rows_per_cta = threads // row_threads

    def grid(sizes: Sizes) -> Grid:
        return (min(-(-sizes["rows"] // rows_per_cta), sizes["num_sms"] * (2048 // threads)), 1, 1)

    return grid


def _norm_why_not(held: int) -> Callable[[Sizes], str]:
    """`held`: elements of a row that fit into registers, 0 = rows are read again instead."""

    def why_not(sizes: Sizes) -> str:
        dim = sizes["dim"]
        if held and dim % _EIGHT:
            return f"takes rows of a multiple of {_EIGHT} elements, not {dim}"
        if held and dim > held:
            return f"holds up to {held} elements of a row, not {dim}"
        return ""

    return why_not


def _norm_cost(fixed: float, element_bytes: int) -> Callable[[Sizes], float]:
    return lambda sizes: _microseconds(fixed, sizes["rows"] * sizes["dim"] * element_bytes)


def _norms() -> list[CudaKernelSpec]:
    specs = []
    for variant, (threads, row_threads, chunks, fixed) in _NORMS.items():
        defines = (("THREADS", str(threads)), ("ROW_THREADS", str(row_threads)), ("CHUNKS", str(chunks)))
        held = row_threads * chunks * _EIGHT
        shared: dict[str, Any] = {
            "source": "rms_norm.cu", "threads": threads, "grid": _norm_grid(threads, row_threads),
            "why_not": _norm_why_not(held),
        }  # fmt: skip
        fp8: dict[str, Any] = {
            **shared, "defines": (*defines, ("OUT_FP8", "1")), "architecture": _FP8_ARCHITECTURE
        }  # fmt: skip
        specs.append(
            CudaKernelSpec(
                name=f"rms_norm.{variant}",
                op="rms_norm",
                parameters=parameters(
                    "x:p:in0.ptr weight:p:in1.ptr y:p:out0.ptr header:p:header.ptr x_stride:l:in0.stride0 "
                    "y_stride:l:out0.stride0 count:i:in0.count dim:i:in0.dim1 eps:f:attr.eps pad:i:zero"
                ),
                params_struct="RmsNormParams",
                entry="rms_norm",
                operands={"in0": "f32", "out0": "bf16"},
                defines=defines,
                cost=_norm_cost(fixed, 4 + 2),
                **shared,
            )
        )
        specs.append(
            CudaKernelSpec(
                name=f"add_rms_norm.{variant}",
                op="add_rms_norm",
                parameters=parameters(
                    "x:p:in0.ptr residual:p:in1.ptr weight:p:in2.ptr y:p:out0.ptr residual_out:p:out1.ptr "
                    "header:p:header.ptr x_stride:l:in0.stride0 residual_stride:l:in1.stride0 "
                    "y_stride:l:out0.stride0 residual_out_stride:l:out1.stride0 count:i:in0.count "
                    "dim:i:in0.dim1 eps:f:attr.eps pad:i:zero"
                ),
                params_struct="AddRmsNormParams",
                entry="add_rms_norm",
                operands={"in0": "bf16", "in1": "f32", "out0": "bf16", "out1": "f32"},
                defines=defines,
                cost=_norm_cost(fixed, 2 + 4 + 2 + 4),
                **shared,
            )
        )
        specs.append(
            CudaKernelSpec(
                name=f"rms_norm_fp8.{variant}",
                op="rms_norm_fp8",
                parameters=parameters(
                    "x:p:in0.ptr weight:p:in1.ptr y:p:out0.ptr scale:p:out1.ptr header:p:header.ptr "
                    "x_stride:l:in0.stride0 y_stride:l:out0.stride0 count:i:in0.count dim:i:in0.dim1 "
                    "eps:f:attr.eps input_scale:f:attr.input_scale"
                ),
                params_struct="RmsNormFp8Params",
                entry="rms_norm_fp8",
                operands={"in0": "f32", "out0": "fp8", "out1": "f32"},
                cost=_norm_cost(fixed + _FP8_MICROSECONDS, 4 + 1),
                **fp8,
            )
        )
        specs.append(
            CudaKernelSpec(
                name=f"add_rms_norm_fp8.{variant}",
                op="add_rms_norm_fp8",
                parameters=parameters(
                    "x:p:in0.ptr residual:p:in1.ptr weight:p:in2.ptr y:p:out0.ptr scale:p:out1.ptr "
                    "residual_out:p:out2.ptr header:p:header.ptr x_stride:l:in0.stride0 "
                    "residual_stride:l:in1.stride0 y_stride:l:out0.stride0 residual_out_stride:l:out2.stride0 "
                    "count:i:in0.count dim:i:in0.dim1 eps:f:attr.eps input_scale:f:attr.input_scale"
                ),
                params_struct="AddRmsNormFp8Params",
                entry="add_rms_norm_fp8",
                operands={"in0": "bf16", "in1": "f32", "out0": "fp8", "out1": "f32", "out2": "f32"},
                cost=_norm_cost(fixed + _FP8_MICROSECONDS, 2 + 4 + 1 + 4),
                **fp8,
            )
        )
    return specs


def _element_grid(bytes_per_thread: int, item_bytes: int) -> Callable[[Sizes], Grid]:
    """CTAs along a row, so that a thread has `bytes_per_thread` of it, then rows as the GPU has room."""
    columns = _ELEMENT_THREADS * bytes_per_thread // item_bytes

    def grid(sizes: Sizes) -> Grid:
        along = -(-sizes["dim"] // columns)
        rows = max(1, sizes["num_sms"] * _CTAS_PER_SM // along)
        return (along, min(sizes["rows"], rows, _MAX_GRID_Y), 1)

    return grid


def _element_cost(element_bytes: int) -> Callable[[Sizes], float]:
    return lambda sizes: _microseconds(1.0, sizes["rows"] * sizes["dim"] * element_bytes)


def _cluster_grid(ctas: int) -> Callable[[Sizes], Grid]:
    """A cluster of CTAs for each row that the GPU has room for at once."""

    def grid(sizes: Sizes) -> Grid:
        together = sizes["num_sms"] * _FP8_CTA_THREADS_OF_SM // _FP8_ROW_THREADS // ctas
        return (ctas * max(1, min(sizes["rows"], together)), 1, 1)

    return grid


def _fp8_rows_cost(variant: str, element_bytes: int, nanoseconds: float) -> Callable[[Sizes], float]:
    """`nanoseconds`: of a multiprocessor's arithmetic on an element."""
    ctas, _, fixed, work = _FP8_ROWS[variant]

    def cost(sizes: Sizes) -> float:
        rows, dim = sizes["rows"], sizes["dim"]
        turns = -(-rows * ctas // sizes["num_sms"])
        turn = _FP8_TURN_MICROSECONDS + dim / ctas * nanoseconds / 1000 * work
        return _microseconds(fixed + turns * turn, rows * dim * element_bytes)

    return cost


def _fp8_rows(
    op: str,
    source: str,
    struct: str,
    inputs: tuple[str, ...],
    nanoseconds: float,
    defines: tuple[tuple[str, str], ...],
) -> list[CudaKernelSpec]:
    """Kernels that quantize rows computed from bf16 `inputs`."""
    addresses = " ".join(f"{name}:p:in{i}.ptr" for i, name in enumerate(inputs))
    strides = " ".join(f"{name}_stride:l:in{i}.stride0" for i, name in enumerate(inputs))
    return [
        CudaKernelSpec(
            name=f"{op}.{variant}",
            op=op,
            parameters=parameters(
                f"{addresses} y:p:out0.ptr scale:p:out1.ptr header:p:header.ptr {strides} "
                "y_stride:l:out0.stride0 count:i:in0.count dim:i:in0.dim1 "
                "input_scale:f:attr.input_scale pad:i:zero"
            ),
            params_struct=struct,
            source=source,
            entry=op,
            threads=_FP8_ROW_THREADS,
            grid=_cluster_grid(ctas),
            operands={**{f"in{i}": "bf16" for i in range(len(inputs))}, "out0": "fp8", "out1": "f32"},
            defines=(("CTAS", str(ctas)), ("CHUNKS", str(chunks)), *defines),
            cluster=(ctas, 1, 1),
            static_shared_bytes=2 * ctas * (_FP8_ROW_THREADS // 32) * 8,
            architecture="sm_90" if ctas > 1 else _FP8_ARCHITECTURE,
            why_not=_norm_why_not(ctas * _FP8_ROW_THREADS * chunks * _EIGHT),
            cost=_fp8_rows_cost(variant, 2 * len(inputs) + 1, nanoseconds),
        )
        for variant, (ctas, chunks, *_) in _FP8_ROWS.items()
    ]


def _gather(dtype: str, item_bytes: int) -> CudaKernelSpec:
    return CudaKernelSpec(
        name=f"gather_rows.{dtype}",
        op="gather_rows",
        parameters=parameters(
            "x:p:in0.ptr rows:p:in1.ptr y:p:out0.ptr header:p:header.ptr x_stride:l:in0.stride0 "
            "y_stride:l:out0.stride0 count:i:in1.count dim:i:in0.dim1 item_bytes:i:in0.itemsize pad:i:zero"
        ),
        params_struct="GatherRowsParams",
        source="gather_rows.cu",
        entry="gather_rows",
        threads=_ELEMENT_THREADS,
        grid=_element_grid(16, item_bytes),
        operands={"in0": dtype, "in1": "i32", "out0": dtype},
        cost=_element_cost(2 * item_bytes),
    )


SPECS: tuple[CudaKernelSpec, ...] = (
    *_norms(),
    CudaKernelSpec(
        name="add",
        op="add",
        parameters=parameters(
            "a:p:in0.ptr b:p:in1.ptr y:p:out0.ptr header:p:header.ptr a_stride:l:in0.stride0 "
            "b_stride:l:in1.stride0 y_stride:l:out0.stride0 count:i:in0.count dim:i:in0.dim1"
        ),
        params_struct="AddParams",
        source="add.cu",
        entry="add",
        threads=_ELEMENT_THREADS,
        grid=_element_grid(16, 2),
        operands={"in0": "f32", "in1": "bf16", "out0": "f32"},
        cost=_element_cost(4 + 2 + 4),
    ),
    CudaKernelSpec(
        name="silu_mul",
        op="silu_mul",
        parameters=parameters(
            "a:p:in0.ptr b:p:in1.ptr y:p:out0.ptr header:p:header.ptr a_stride:l:in0.stride0 "
            "b_stride:l:in1.stride0 y_stride:l:out0.stride0 count:i:in0.count dim:i:in0.dim1"
        ),
        params_struct="SiluMulParams",
        source="silu_mul.cu",
        entry="silu_mul",
        threads=_ELEMENT_THREADS,
        grid=_element_grid(16, 2),
        operands={"in0": "bf16", "in1": "bf16", "out0": "bf16"},
        cost=_element_cost(2 + 2 + 2),
    ),
    *_fp8_rows("quantize_fp8", "quantize_fp8.cu", "QuantizeFp8Params", ("x",), 0.06, ()),
    *_fp8_rows("silu_mul_fp8", "silu_mul.cu", "SiluMulFp8Params", ("a", "b"), 0.1, (("OUT_FP8", "1"),)),
    _gather("bf16", 2),
    _gather("f32", 4),
)
