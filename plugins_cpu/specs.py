"""CPU kernels as data: which op and scheme each one computes, and how its parameter struct is filled.

Parameters and bindings: models/kernel_spec.py. `scheme` of a template spec is the weight's, `cache_dtype` the
cache's; a kernel's name is "op", "op.scheme" or "op.cache_dtype".
"""

from castiron.models.kernel_spec import KernelSpec
from castiron.models.kernel_spec import parameters as _parameters
from castiron.models.schemes import schemes_for

CACHE_DTYPES = ("f32", "f16")
Q8_GROUP = 32  # activations sharing a scale in the *_q8 kernels

_STRIDED_NORM = (
    "x_stride:l:in0.stride0 y_stride:l:out0.stride0 "
    "count:i:in0.count dim:i:in0.dim1 eps:f:attr.eps pad:i:zero"
)

_PLAIN = (
    KernelSpec(
        "rms_norm", "rms_norm",
        _parameters("x:p:in0.ptr weight:p:in1.ptr y:p:out0.ptr " + _STRIDED_NORM),
        "RmsNormParams",
    ),
    KernelSpec(
        "rms_norm_q8", "rms_norm_q8",
        _parameters(
            "x:p:in0.ptr weight:p:in1.ptr q:p:out0.ptr scale:p:out1.ptr sum:p:out2.ptr "
            "x_stride:l:in0.stride0 count:i:in0.count dim:i:in0.dim1 eps:f:attr.eps pad:i:zero"
        ),
        "RmsNormQ8Params", dense_outputs=(0, 1, 2), k_multiple=Q8_GROUP,
    ),
    KernelSpec(
        "add_rms_norm", "add_rms_norm",
        _parameters(
            "x:p:in0.ptr residual:p:in1.ptr weight:p:in2.ptr y:p:out0.ptr residual_out:p:out1.ptr "
            "x_stride:l:in0.stride0 residual_stride:l:in1.stride0 y_stride:l:out0.stride0 "
            "residual_out_stride:l:out1.stride0 count:i:in0.count dim:i:in0.dim1 eps:f:attr.eps pad:i:zero"
        ),
        "AddRmsNormParams",
    ),
    KernelSpec(
        "add_rms_norm_q8", "add_rms_norm_q8",
        _parameters(
            "x:p:in0.ptr residual:p:in1.ptr weight:p:in2.ptr q:p:out0.ptr scale:p:out1.ptr sum:p:out2.ptr "
            "residual_out:p:out3.ptr x_stride:l:in0.stride0 residual_stride:l:in1.stride0 "
            "residual_out_stride:l:out3.stride0 count:i:in0.count dim:i:in0.dim1 eps:f:attr.eps pad:i:zero"
        ),
        "AddRmsNormQ8Params", dense_outputs=(0, 1, 2), k_multiple=Q8_GROUP,
    ),
    KernelSpec(
        "quantize_q8", "quantize_q8",
        _parameters(
            "x:p:in0.ptr q:p:out0.ptr scale:p:out1.ptr sum:p:out2.ptr "
            "x_stride:l:in0.stride0 count:i:in0.count dim:i:in0.dim1"
        ),
        "QuantizeQ8Params", dense_outputs=(0, 1, 2), k_multiple=Q8_GROUP,
    ),
    KernelSpec(
        "rope_cos_sin", "rope_cos_sin",
        _parameters(
            "positions:p:in0.ptr inv_freq:p:in1.ptr cos:p:out0.ptr sin:p:out1.ptr "
            "count:i:in0.count half:i:in1.dim0 scaling:f:attr.scaling pad:i:zero"
        ),
        "RopeCosSinParams", dense_outputs=(0, 1),
    ),
    KernelSpec(
        "apply_rope", "apply_rope",
        _parameters(
            "x:p:in0.ptr cos:p:in1.ptr sin:p:in2.ptr y:p:out0.ptr x_stride:l:in0.stride0 y_stride:l:out0.stride0 "
            "count:i:in0.count num_heads:i:in0.dim1 head_dim:i:in0.dim2 half:i:in1.dim1"
        ),
        "ApplyRopeParams", dense_inputs=(1, 2),
    ),
    KernelSpec(
        "add", "add",
        _parameters(
            "a:p:in0.ptr b:p:in1.ptr y:p:out0.ptr a_stride:l:in0.stride0 b_stride:l:in1.stride0 "
            "y_stride:l:out0.stride0 count:i:in0.count dim:i:in0.dim1"
        ),
        "BinaryParams",
    ),
    KernelSpec(
        "mul", "mul",
        _parameters(
            "a:p:in0.ptr b:p:in1.ptr y:p:out0.ptr a_stride:l:in0.stride0 b_stride:l:in1.stride0 "
            "y_stride:l:out0.stride0 count:i:in0.count dim:i:in0.dim1"
        ),
        "BinaryParams",
    ),
    KernelSpec(
        "silu", "silu",
        _parameters(
            "x:p:in0.ptr y:p:out0.ptr x_stride:l:in0.stride0 y_stride:l:out0.stride0 count:i:in0.count dim:i:in0.dim1"
        ),
        "SiluParams",
    ),
    KernelSpec(
        "silu_mul", "silu_mul",
        _parameters(
            "a:p:in0.ptr b:p:in1.ptr y:p:out0.ptr a_stride:l:in0.stride0 b_stride:l:in1.stride0 "
            "y_stride:l:out0.stride0 count:i:in0.count dim:i:in0.dim1"
        ),
        "BinaryParams",
    ),
    KernelSpec(
        "silu_mul_q8", "silu_mul_q8",
        _parameters(
            "a:p:in0.ptr b:p:in1.ptr q:p:out0.ptr scale:p:out1.ptr sum:p:out2.ptr "
            "a_stride:l:in0.stride0 b_stride:l:in1.stride0 count:i:in0.count dim:i:in0.dim1"
        ),
        "SiluMulQ8Params", dense_outputs=(0, 1, 2), k_multiple=Q8_GROUP,
    ),
    KernelSpec(
        "gather_rows", "gather_rows",
        _parameters(
            "x:p:in0.ptr rows:p:in1.ptr y:p:out0.ptr x_stride:l:in0.stride0 y_stride:l:out0.stride0 "
            "count:i:in1.count dim:i:in0.dim1"
        ),
        "GatherRowsParams",
    ),
    KernelSpec(
        "sample_greedy", "sample_greedy",
        _parameters(
            "logits:p:in0.ptr sample_rows:p:in1.ptr num_logprobs:p:in2.ptr last_token:p:in3.ptr "
            "sampled_token_ids:p:out0.ptr sampled_logprobs:p:out1.ptr top_token_ids:p:out2.ptr "
            "top_logprobs:p:out3.ptr logits_stride:l:in0.stride0 count:i:in0.count vocab:i:in0.dim1"
        ),
        "SampleGreedyParams", dense_outputs=(0, 1, 2, 3),
    ),
    KernelSpec(
        "sample_random", "sample_random",
        _parameters(
            "logits:p:in0.ptr sample_rows:p:in1.ptr num_logprobs:p:in2.ptr temperature:p:in4.ptr top_k:p:in5.ptr "
            "top_p:p:in6.ptr min_p:p:in7.ptr seed:p:in8.ptr output_position:p:in9.ptr last_token:p:in3.ptr "
            "sampled_token_ids:p:out0.ptr sampled_logprobs:p:out1.ptr top_token_ids:p:out2.ptr "
            "top_logprobs:p:out3.ptr logits_stride:l:in0.stride0 count:i:in0.count vocab:i:in0.dim1"
        ),
        "SampleRandomParams", dense_outputs=(0, 1, 2, 3),
    ),
    KernelSpec(
        "mask_logits", "mask_logits",
        _parameters(
            "logits:p:in0.ptr mask_rows:p:in1.ptr grammar_masks:p:in2.ptr y:p:out0.ptr logits_stride:l:in0.stride0 "
            "y_stride:l:out0.stride0 count:i:in0.count vocab:i:in0.dim1"
        ),
        "MaskLogitsParams",
    ),
    KernelSpec(
        "adjust_logits", "adjust_logits",
        _parameters(
            "logits:p:in0.ptr sample_rows:p:in1.ptr token_counts:p:in2.ptr repetition_penalty:p:in3.ptr "
            "presence_penalty:p:in4.ptr frequency_penalty:p:in5.ptr bias_starts:p:in6.ptr bias_token_ids:p:in7.ptr "
            "bias_values:p:in8.ptr allowed_rows:p:in9.ptr allowed_masks:p:in10.ptr y:p:out0.ptr "
            "logits_stride:l:in0.stride0 y_stride:l:out0.stride0 count:i:in0.count vocab:i:in0.dim1"
        ),
        "AdjustLogitsParams",
    ),
    KernelSpec(
        "sample_full", "sample_full",
        _parameters(
            "logits:p:in0.ptr adjusted:p:in1.ptr sample_rows:p:in2.ptr num_logprobs:p:in3.ptr temperature:p:in5.ptr "
            "top_k:p:in6.ptr top_p:p:in7.ptr min_p:p:in8.ptr seed:p:in9.ptr output_position:p:in10.ptr "
            "last_token:p:in4.ptr sampled_token_ids:p:out0.ptr sampled_logprobs:p:out1.ptr sampled_ranks:p:out2.ptr "
            "top_token_ids:p:out3.ptr top_logprobs:p:out4.ptr logits_stride:l:in0.stride0 "
            "adjusted_stride:l:in1.stride0 count:i:in0.count vocab:i:in0.dim1"
        ),
        "SampleFullParams", dense_outputs=(0, 1, 2, 3, 4),
    ),
    KernelSpec(
        "count_tokens", "count_tokens",
        _parameters(
            "token_counts:p:in0.ptr sampled_token_ids:p:in1.ptr sample_rows:p:in2.ptr repetition_penalty:p:in3.ptr "
            "presence_penalty:p:in4.ptr frequency_penalty:p:in5.ptr count:i:in2.count vocab:i:in0.dim1"
        ),
        "CountTokensParams",
    ),
)  # fmt: skip


def _per_scheme() -> list[KernelSpec]:
    specs = []
    for scheme in schemes_for("cpu"):
        specs.append(
            KernelSpec(
                f"embedding.{scheme}",
                "embedding",
                _parameters(
                    "token_ids:p:in0.ptr last_token:p:in1.ptr table:p:in2.ptr y:p:out0.ptr "
                    "y_stride:l:out0.stride0 count:i:in0.count vocab:i:in2.dim0 dim:i:in2.dim1 "
                    "max_rows:i:in1.dim0"
                ),
                "EmbeddingParams",
                scheme=scheme,
                weight_input=2,
            )
        )
        specs.append(
            KernelSpec(
                f"linear.{scheme}",
                "linear",
                _parameters(
                    "x:p:in0.ptr weight:p:in1.ptr bias:p:in2.ptr? y:p:out0.ptr x_stride:l:in0.stride0 "
                    "y_stride:l:out0.stride0 count:i:in0.count n:i:in1.dim0 k:i:in1.dim1 pad:i:zero"
                ),
                "LinearParams",
                scheme=scheme,
                weight_input=1,
            )
        )
    for scheme in schemes_for("cpu", quantized=True):
        specs.append(
            KernelSpec(
                f"linear_q8.{scheme}",
                "linear_q8",
                _parameters(
                    "q:p:in0.ptr scale:p:in1.ptr sum:p:in2.ptr weight:p:in3.ptr bias:p:in4.ptr? y:p:out0.ptr "
                    "y_stride:l:out0.stride0 count:i:in0.count n:i:in3.dim0 k:i:in3.dim1 pad:i:zero"
                ),
                "LinearQ8Params",
                scheme=scheme,
                weight_input=3,
                dense_inputs=(0, 1, 2),
                k_multiple=Q8_GROUP,
            )
        )
    return specs


def _per_cache_dtype() -> list[KernelSpec]:
    specs = []
    for dtype in CACHE_DTYPES:
        specs.append(
            KernelSpec(
                f"kv_write.{dtype}",
                "kv_write",
                _parameters(
                    "k:p:in1.ptr v:p:in2.ptr cache:p:in0.ptr slot_mapping:p:in3.ptr k_stride:l:in1.stride0 "
                    "v_stride:l:in2.stride0 count:i:in1.count kv_heads:i:in1.dim1 block_size:i:in0.dim3 "
                    "head_dim:i:in1.dim2"
                ),
                "KvWriteParams",
                cache_dtype=dtype,
            )
        )
        specs.append(
            KernelSpec(
                f"rope_kv_write.{dtype}",
                "rope_kv_write",
                _parameters(
                    "q:p:in0.ptr k:p:in1.ptr v:p:in2.ptr cos:p:in3.ptr sin:p:in4.ptr q_out:p:out0.ptr "
                    "cache:p:in5.ptr slot_mapping:p:in6.ptr q_stride:l:in0.stride0 k_stride:l:in1.stride0 "
                    "v_stride:l:in2.stride0 q_out_stride:l:out0.stride0 count:i:in0.count num_heads:i:in0.dim1 "
                    "kv_heads:i:in1.dim1 head_dim:i:in0.dim2 half:i:in3.dim1 block_size:i:in5.dim3"
                ),
                "RopeKvWriteParams",
                cache_dtype=dtype,
                dense_inputs=(3, 4),
            )
        )
        specs.append(
            KernelSpec(
                f"paged_attention.{dtype}",
                "paged_attention",
                _parameters(
                    "q:p:in0.ptr cache:p:in1.ptr block_tables:p:in2.ptr seq_lens:p:in3.ptr query_starts:p:in4.ptr "
                    "y:p:out0.ptr q_stride:l:in0.stride0 y_stride:l:out0.stride0 num_heads:i:in0.dim1 "
                    "kv_heads:i:in1.dim2 head_dim:i:in0.dim2 block_size:i:in1.dim3 table_width:i:in2.dim1 "
                    "scale:f:attr.scale"
                ),
                "PagedAttentionParams",
                cache_dtype=dtype,
            )
        )
    return specs


SPECS: dict[str, KernelSpec] = {s.name: s for s in (*_PLAIN, *_per_scheme(), *_per_cache_dtype())}
