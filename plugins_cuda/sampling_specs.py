"""CUDA kernels from logits to token ids: a cluster of CTAs shares a row."""

from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes

_CTAS = 8  # kCtas and
_THREADS = 512  # kThreads of kernels/row_cluster.cuh
_HISTOGRAM_BYTES = 16 * _THREADS * 8  # of kernels/prefix_cut.cuh
MAX_VOCAB = 1 << 18  # of sample_random: a CTA's share of a row lies in shared memory


def _grid(sizes: Sizes) -> Grid:
    return (_CTAS, sizes["rows"], 1)


def _random_shared_bytes(sizes: Sizes) -> int:
    quads = -(-sizes["vocab"] // 4)
    return _HISTOGRAM_BYTES + -(-quads // _CTAS) * 16


def _random_why_not(sizes: Sizes) -> str:
    if sizes["vocab"] > MAX_VOCAB:
        return f"takes up to {MAX_VOCAB} token ids, not {sizes['vocab']}"
    return ""


def _cost(sizes: Sizes) -> float:
    return 2.5 + sizes["rows"] * sizes["vocab"] * 4 / 4.0e6


SPECS: tuple[CudaKernelSpec, ...] = (
    CudaKernelSpec(
        name="sample_greedy",
        op="sample_greedy",
        parameters=parameters(
            "logits:p:in0.ptr sample_rows:p:in1.ptr num_logprobs:p:in2.ptr last_token:p:in3.ptr "
            "sampled_token_ids:p:out0.ptr sampled_logprobs:p:out1.ptr top_token_ids:p:out2.ptr "
            "top_logprobs:p:out3.ptr header:p:header.ptr logits_stride:l:in0.stride0 count:i:in0.count "
            "vocab:i:in0.dim1"
        ),
        params_struct="SampleGreedyParams",
        dense_outputs=(0, 1, 2, 3),
        source="sample_greedy.cu",
        entry="sample_greedy",
        threads=_THREADS,
        grid=_grid,
        operands={
            "in0": "f32", "in1": "i32", "in2": "i32", "out0": "i32", "out1": "f32", "out2": "i32", "out3": "f32"
        },
        cluster=(_CTAS, 1, 1),
        cost=_cost,
    ),
    CudaKernelSpec(
        name="sample_random",
        op="sample_random",
        parameters=parameters(
            "logits:p:in0.ptr sample_rows:p:in1.ptr num_logprobs:p:in2.ptr temperature:p:in4.ptr top_k:p:in5.ptr "
            "top_p:p:in6.ptr min_p:p:in7.ptr seed:p:in8.ptr output_position:p:in9.ptr last_token:p:in3.ptr "
            "sampled_token_ids:p:out0.ptr sampled_logprobs:p:out1.ptr top_token_ids:p:out2.ptr "
            "top_logprobs:p:out3.ptr header:p:header.ptr logits_stride:l:in0.stride0 count:i:in0.count "
            "vocab:i:in0.dim1"
        ),
        params_struct="SampleRandomParams",
        dense_outputs=(0, 1, 2, 3),
        source="sample_random.cu",
        entry="sample_random",
        threads=_THREADS,
        grid=_grid,
        operands={
            "in0": "f32", "in1": "i32", "in2": "i32", "in4": "f32", "in5": "i32", "in6": "f32", "in7": "f32",
            "in8": "u64", "in9": "i32", "out0": "i32", "out1": "f32", "out2": "i32", "out3": "f32",
        },
        cluster=(_CTAS, 1, 1),
        shared_bytes=_random_shared_bytes,
        why_not=_random_why_not,
        cost=_cost,
    ),
)  # fmt: skip
