"""CUDA kernels from logits to token ids: a cluster of CTAs shares a row, or a CTA has it where there are none."""

from collections.abc import Callable

from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes

_CLUSTER = 8  # CTAs that share a row
_THREADS = 512  # kThreads of kernels/row_cluster.cuh
_HISTOGRAM_BYTES = 16 * _THREADS * 8  # of kernels/prefix_cut.cuh
_STATIC_SHARED_BYTES = 6144
# Fitted to times on an H200 (configs/tuning): bytes of logits per microsecond of all clusters by op, of all CTAs, and
# of one CTA that has a row to itself
_CLUSTER_RATE = {"sample_greedy": 2.9e6, "sample_random": 2.05e6, "sample_full": 1.3e6}
_CTAS_RATE, _CTA_RATE = 4.4e6, 0.1e6
_PASSES = {"sample_greedy": 1, "sample_random": 1, "sample_full": 2}
_PART_TOKENS, _PART_THREADS = 2048, 256  # of a CTA, in kernels/token_mask.cuh
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


def _cost(op: str, ctas: int) -> Callable[[Sizes], float]:
    def cost(sizes: Sizes) -> float:
        row_bytes = sizes["vocab"] * 4
        if ctas > 1:
            return 2.6 + sizes["rows"] * row_bytes / _CLUSTER_RATE[op]
        alone, together = row_bytes / _CTA_RATE, sizes["rows"] * row_bytes / _CTAS_RATE
        return 2.2 + _PASSES[op] * max(alone, together)

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
        cost=_cost("sample_greedy", ctas),
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
        cost=_cost("sample_random", ctas),
    )  # fmt: skip


def _full(ctas: int) -> CudaKernelSpec:
    return CudaKernelSpec(
        name=f"sample_full{_suffix(ctas)}",
        op="sample_full",
        parameters=parameters(
            "logits:p:in0.ptr adjusted:p:in1.ptr sample_rows:p:in2.ptr num_logprobs:p:in3.ptr temperature:p:in5.ptr "
            "top_k:p:in6.ptr top_p:p:in7.ptr min_p:p:in8.ptr seed:p:in9.ptr output_position:p:in10.ptr "
            "last_token:p:in4.ptr sampled_token_ids:p:out0.ptr sampled_logprobs:p:out1.ptr sampled_ranks:p:out2.ptr "
            "top_token_ids:p:out3.ptr top_logprobs:p:out4.ptr header:p:header.ptr logits_stride:l:in0.stride0 "
            "adjusted_stride:l:in1.stride0 count:i:in0.count vocab:i:in0.dim1"
        ),
        params_struct="SampleFullParams",
        dense_outputs=(0, 1, 2, 3, 4),
        source="sample_full.cu",
        entry="sample_full",
        threads=_THREADS,
        grid=_grid(ctas),
        operands={
            "in0": "f32", "in1": "f32", "in2": "i32", "in3": "i32", "in5": "f32", "in6": "i32", "in7": "f32",
            "in8": "f32", "in9": "u64", "in10": "i32", "out0": "i32", "out1": "f32", "out2": "i32", "out3": "i32",
            "out4": "f32",
        },
        defines=(("CTAS", str(ctas)),),
        cluster=(ctas, 1, 1),
        static_shared_bytes=_STATIC_SHARED_BYTES,
        architecture="sm_90" if ctas > 1 else "sm_80",
        shared_bytes=_random_shared_bytes(ctas),
        why_not=_random_why_not(ctas),
        cost=_cost("sample_full", ctas),
    )  # fmt: skip


def _parts_grid(sizes: Sizes) -> Grid:
    return (-(-sizes["vocab"] // _PART_TOKENS), sizes["rows"], 1)


def _elementwise_cost(sizes: Sizes) -> float:
    return 2.0 + sizes["rows"] * sizes["vocab"] * 8 / 3.5e6


_MASK = CudaKernelSpec(
    name="mask_logits",
    op="mask_logits",
    parameters=parameters(
        "logits:p:in0.ptr mask_rows:p:in1.ptr grammar_masks:p:in2.ptr y:p:out0.ptr header:p:header.ptr "
        "logits_stride:l:in0.stride0 y_stride:l:out0.stride0 count:i:in0.count vocab:i:in0.dim1"
    ),
    params_struct="MaskLogitsParams",
    source="mask_logits.cu",
    entry="mask_logits",
    threads=_PART_THREADS,
    grid=_parts_grid,
    operands={"in0": "f32", "in1": "i32", "in2": "u32", "out0": "f32"},
    cost=_elementwise_cost,
)
_ADJUST = CudaKernelSpec(
    name="adjust_logits",
    op="adjust_logits",
    parameters=parameters(
        "logits:p:in0.ptr sample_rows:p:in1.ptr token_counts:p:in2.ptr repetition_penalty:p:in3.ptr "
        "presence_penalty:p:in4.ptr frequency_penalty:p:in5.ptr bias_starts:p:in6.ptr bias_token_ids:p:in7.ptr "
        "bias_values:p:in8.ptr allowed_rows:p:in9.ptr allowed_masks:p:in10.ptr y:p:out0.ptr header:p:header.ptr "
        "logits_stride:l:in0.stride0 y_stride:l:out0.stride0 count:i:in0.count vocab:i:in0.dim1"
    ),
    params_struct="AdjustLogitsParams",
    source="adjust_logits.cu",
    entry="adjust_logits",
    threads=_PART_THREADS,
    grid=_parts_grid,
    operands={
        "in0": "f32", "in1": "i32", "in2": "u32", "in3": "f32", "in4": "f32", "in5": "f32", "in6": "i32", "in7": "i32",
        "in8": "f32", "in9": "i32", "in10": "u32", "out0": "f32",
    },
    static_shared_bytes=_PART_TOKENS * 4,
    cost=_elementwise_cost,
)  # fmt: skip
_COUNT_THREADS = 128
_COUNT = CudaKernelSpec(
    name="count_tokens",
    op="count_tokens",
    parameters=parameters(
        "token_counts:p:in0.ptr sampled_token_ids:p:in1.ptr sample_rows:p:in2.ptr repetition_penalty:p:in3.ptr "
        "presence_penalty:p:in4.ptr frequency_penalty:p:in5.ptr header:p:header.ptr count:i:in2.count vocab:i:in0.dim1"
    ),
    params_struct="CountTokensParams",
    source="count_tokens.cu",
    entry="count_tokens",
    threads=_COUNT_THREADS,
    grid=lambda sizes: (-(-sizes["rows"] // _COUNT_THREADS), 1, 1),
    operands={"in0": "u32", "in1": "i32", "in2": "i32", "in3": "f32", "in4": "f32", "in5": "f32"},
    cost=lambda _: 1.5,
)


def _suffix(ctas: int) -> str:
    return "" if ctas > 1 else ".cta"


SPECS: tuple[CudaKernelSpec, ...] = (
    _greedy(_CLUSTER),
    _greedy(1),
    _random(_CLUSTER),
    _random(1),
    _full(_CLUSTER),
    _full(1),
    _MASK,
    _ADJUST,
    _COUNT,
)
