"""CUDA kernels from logits to token ids: a cluster of CTAs shares a row, or a CTA has it where there are none."""

from collections.abc import Callable

from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes

_CLUSTER = 8  # CTAs that share a row
_THREADS = 512  # kThreads of kernels/row_cluster.cuh
_HISTOGRAM_BYTES = 16 * _THREADS * 8  # of kernels/prefix_cut.cuh
_STATIC_SHARED_BYTES = 6144
_CTA_BYTES_PER_MICROSECOND = 0.05e6  # of one CTA, over a row it reads several times
MAX_VOCAB = 1 << 18  # of sample_random: a CTA's share of a row lies in shared memory


def _grid(ctas: int) -> Callable[[Sizes], Grid]:
    return lambda sizes: (ctas, sizes["rows"], 1)


def _random_shared_bytes(ctas: int) -> Callable[[Sizes], int]:
    def shared_bytes(sizes: Sizes) -> int:
        quads = -(-sizes["vocab"] // 4)
        return _HISTOGRAM_BYTES + (-(-quads // ctas) * 16 if ctas > 1 else 0)

    return shared_bytes


def _random_why_not(ctas: int) -> Callable[[Sizes], str]:
    def why_not(sizes: Sizes) -> str:
        if ctas > 1 and sizes["vocab"] > MAX_VOCAB:
            return f"takes up to {MAX_VOCAB} token ids, not {sizes['vocab']}"
        return ""

    return why_not


def _cost(ctas: int) -> Callable[[Sizes], float]:
    def cost(sizes: Sizes) -> float:
        together = 2.5 + sizes["rows"] * sizes["vocab"] * 4 / 4.0e6
        return together if ctas > 1 else 1.5 + together + sizes["vocab"] * 4 / _CTA_BYTES_PER_MICROSECOND

    return cost


def _greedy(ctas: int) -> CudaKernelSpec:
    return CudaKernelSpec(
        name=f"sample_greedy{_suffix(ctas)}",
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
        grid=_grid(ctas),
        operands={
            "in0": "f32", "in1": "i32", "in2": "i32", "out0": "i32", "out1": "f32", "out2": "i32", "out3": "f32"
        },
        defines=(("CTAS", str(ctas)),),
        cluster=(ctas, 1, 1),
        static_shared_bytes=_STATIC_SHARED_BYTES,
        architecture="sm_90" if ctas > 1 else "sm_80",
        cost=_cost(ctas),
    )  # fmt: skip


def _random(ctas: int) -> CudaKernelSpec:
    return CudaKernelSpec(
        name=f"sample_random{_suffix(ctas)}",
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
        grid=_grid(ctas),
        operands={
            "in0": "f32", "in1": "i32", "in2": "i32", "in4": "f32", "in5": "i32", "in6": "f32", "in7": "f32",
            "in8": "u64", "in9": "i32", "out0": "i32", "out1": "f32", "out2": "i32", "out3": "f32",
        },
        defines=(("CTAS", str(ctas)),),
        cluster=(ctas, 1, 1),
        static_shared_bytes=_STATIC_SHARED_BYTES,
        architecture="sm_90" if ctas > 1 else "sm_80",
        shared_bytes=_random_shared_bytes(ctas),
        why_not=_random_why_not(ctas),
        cost=_cost(ctas),
    )  # fmt: skip


def _suffix(ctas: int) -> str:
    return "" if ctas > 1 else ".cta"


SPECS: tuple[CudaKernelSpec, ...] = (_greedy(_CLUSTER), _greedy(1), _random(_CLUSTER), _random(1))
