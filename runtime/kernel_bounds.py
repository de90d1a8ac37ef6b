"""What each CPU kernel touches, as a function of its parameters; used by params_check.py.

The parameter structs are those of plugins_cpu/abi.h (a test compares the two). An extent is the number of
bytes from a pointer that the kernel may read or write when the live counts are at the bucket's capacities.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from castiron.runtime.step_abi import MASK_WORD_BITS, MAX_BIASES_PER_ROW, MAX_LOGPROBS

NUMPY_TYPES = {"p": "<u8", "l": "<i8", "i": "<i4", "f": "<f4"}
F32 = I32 = 4
I64 = U64 = 8
PANEL_ROWS = 16  # packed weights come in panels of 16 rows (plugins_cpu/layouts.py)
# elements and bytes of a block of one row; bf16 takes columns in pairs
WEIGHT_BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (2, 4),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
OPTIONAL_POINTERS = ("bias",)  # may be null

# Pointers to weights, and to exactly one field of the step block, the rows or the staging memory: what they
# hold is used as an index, so no other data may be there. All other pointers are to the arena, but for
# `cache`.
WEIGHT_POINTERS = ("weight", "table", "bias", "inv_freq")
STEP_POINTERS = {  # parameter -> step field (slot_mapping and block_tables: of the cache's group)
    "token_ids": "token_ids",
    "positions": "positions",
    "query_starts": "query_starts",
    "seq_lens": "seq_lens",
    "rows": "logit_rows",
    "slot_mapping": "slot_mapping",
    "block_tables": "block_tables",
    "sample_rows": "sample_rows",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "output_position": "output_position",
    "num_logprobs": "num_logprobs",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "mask_rows": "mask_rows",
    "grammar_masks": "grammar_masks",
    "allowed_rows": "allowed_rows",
    "allowed_masks": "allowed_masks",
    "bias_starts": "bias_starts",
    "bias_token_ids": "bias_token_ids",
    "bias_values": "bias_values",
}
ROW_POINTERS = ("last_token", "token_counts")
STAGING_POINTERS = ("sampled_token_ids", "sampled_logprobs", "sampled_ranks", "top_token_ids", "top_logprobs")

# Parameter or capacity -> int64 [records]. Beside the parameters: num_rows (capacity of the live count the
# kernel runs over), max_tokens, max_seqs, max_logits, max_rows, weight_block_size, weight_block_bytes,
# cache_item_bytes.
Values = Mapping[str, np.ndarray]
Extent = Callable[[Values], np.ndarray]  # bytes [records] a pointer is used for


@dataclass(frozen=True)
class KernelBounds:
    """Parameters of one kernel struct, in order ("name:type"), and how far each pointer reaches."""

    parameters: tuple[tuple[str, str], ...]
    extents: Mapping[str, Extent]

    @property
    def dtype(self) -> np.dtype[np.void]:
        return np.dtype([(name, NUMPY_TYPES[kind]) for name, kind in self.parameters])


def _bounds(parameters: str, **extents: Extent) -> KernelBounds:
    pairs = [item.split(":") for item in parameters.split()]
    return KernelBounds(tuple((name, kind) for name, kind in pairs), extents)


def _rows(stride: str, *dims: str) -> Extent:
    """f32 rows, `stride` elements apart, of the product of `dims` elements each."""

    def extent(v: Values) -> np.ndarray:
        width = v[dims[0]]
        for dim in dims[1:]:
            width = width * v[dim]
        return ((v["num_rows"] - 1) * v[stride] + width) * F32

    return extent


def _all_tokens(stride: str, dim: str) -> Extent:
    return lambda v: ((v["max_tokens"] - 1) * v[stride] + v[dim]) * F32


def _dense(item_bytes: int, *dims: str, divisor: int = 1) -> Extent:
    """A dense array; dims are parameters or capacities, the last divided by `divisor`."""

    def extent(v: Values) -> np.ndarray:
        size = v[dims[-1]] // divisor
        for dim in dims[:-1]:
            size = size * v[dim]
        return size * item_bytes

    return extent


def _q8(dim: str) -> dict[str, Extent]:
    return {
        "q": _dense(2, "num_rows", dim),  # two int8 digits
        "scale": _dense(F32, "num_rows", dim, divisor=32),
        "sum": _dense(F32, "num_rows", dim, divisor=16),
    }


def _packed(rows: str, columns: str) -> Extent:
    """A packed weight [rows, columns]."""

    def extent(v: Values) -> np.ndarray:
        blocks_per_row = -(-v[columns] // v["weight_block_size"])
        result: np.ndarray = -(-v[rows] // PANEL_ROWS) * PANEL_ROWS * blocks_per_row * v["weight_block_bytes"]
        return result

    return extent


def _whole_block(v: Values) -> np.ndarray:
    """One block of a cache; params_check compares it with the cache tensor's."""
    result: np.ndarray = 2 * v["kv_heads"] * v["block_size"] * v["head_dim"] * v["cache_item_bytes"]
    return result


_BINARY = _bounds(
    "a:p b:p y:p a_stride:l b_stride:l y_stride:l count:i dim:i",
    a=_rows("a_stride", "dim"),
    b=_rows("b_stride", "dim"),
    y=_rows("y_stride", "dim"),
)
_PER_DIM = _dense(F32, "dim")
_PER_LOGIT = _dense(I32, "max_logits")
_SAMPLED: dict[str, Extent] = {
    "logits": _rows("logits_stride", "vocab"),
    "sample_rows": _PER_LOGIT,
    "num_logprobs": _PER_LOGIT,
    "last_token": _dense(I32, "max_rows"),
    "sampled_token_ids": _PER_LOGIT,
    "sampled_logprobs": _PER_LOGIT,
    "top_token_ids": lambda v: v["max_logits"] * MAX_LOGPROBS * I32,
    "top_logprobs": lambda v: v["max_logits"] * MAX_LOGPROBS * F32,
}

_DRAWN: dict[str, Extent] = {
    "temperature": _PER_LOGIT,
    "top_k": _PER_LOGIT,
    "top_p": _PER_LOGIT,
    "min_p": _PER_LOGIT,
    "seed": _dense(U64, "max_logits"),
    "output_position": _PER_LOGIT,
}
_PENALTIES: dict[str, Extent] = {
    "sample_rows": _PER_LOGIT,
    "token_counts": _dense(I32, "max_rows", "vocab"),
    "repetition_penalty": _PER_LOGIT,
    "presence_penalty": _PER_LOGIT,
    "frequency_penalty": _PER_LOGIT,
}


def _masks(v: Values) -> np.ndarray:
    result: np.ndarray = v["max_logits"] * -(-v["vocab"] // MASK_WORD_BITS) * I32
    return result


def _biases(v: Values) -> np.ndarray:
    return v["max_logits"] * MAX_BIASES_PER_ROW * I32


BOUNDS: dict[str, KernelBounds] = {
    "embedding": _bounds(
        "token_ids:p last_token:p table:p y:p y_stride:l count:i vocab:i dim:i max_rows:i",
        token_ids=_dense(I32, "num_rows"),
        last_token=_dense(I32, "max_rows"),
        table=_packed("vocab", "dim"),
        y=_rows("y_stride", "dim"),
    ),
    "rms_norm": _bounds(
        "x:p weight:p y:p x_stride:l y_stride:l count:i dim:i eps:f pad:i",
        x=_rows("x_stride", "dim"),
        weight=_PER_DIM,
        y=_rows("y_stride", "dim"),
    ),
    "rms_norm_q8": _bounds(
        "x:p weight:p q:p scale:p sum:p x_stride:l count:i dim:i eps:f pad:i",
        x=_rows("x_stride", "dim"),
        weight=_PER_DIM,
        **_q8("dim"),
    ),
    "add_rms_norm": _bounds(
        "x:p residual:p weight:p y:p residual_out:p x_stride:l residual_stride:l y_stride:l "
        "residual_out_stride:l count:i dim:i eps:f pad:i",
        x=_rows("x_stride", "dim"),
        residual=_rows("residual_stride", "dim"),
        weight=_PER_DIM,
        y=_rows("y_stride", "dim"),
        residual_out=_rows("residual_out_stride", "dim"),
    ),
    "add_rms_norm_q8": _bounds(
        "x:p residual:p weight:p q:p scale:p sum:p residual_out:p x_stride:l residual_stride:l "
        "residual_out_stride:l count:i dim:i eps:f pad:i",
        x=_rows("x_stride", "dim"),
        residual=_rows("residual_stride", "dim"),
        weight=_PER_DIM,
        residual_out=_rows("residual_out_stride", "dim"),
        **_q8("dim"),
    ),
    "quantize_q8": _bounds(
        "x:p q:p scale:p sum:p x_stride:l count:i dim:i", x=_rows("x_stride", "dim"), **_q8("dim")
    ),
    "linear": _bounds(
        "x:p weight:p bias:p y:p x_stride:l y_stride:l count:i n:i k:i pad:i",
        x=_rows("x_stride", "k"),
        weight=_packed("n", "k"),
        bias=_dense(F32, "n"),
        y=_rows("y_stride", "n"),
    ),
    "linear_q8": _bounds(
        "q:p scale:p sum:p weight:p bias:p y:p y_stride:l count:i n:i k:i pad:i",
        weight=_packed("n", "k"),
        bias=_dense(F32, "n"),
        y=_rows("y_stride", "n"),
        **_q8("k"),
    ),
    "rope_cos_sin": _bounds(
        "positions:p inv_freq:p cos:p sin:p count:i half:i scaling:f pad:i",
        positions=_dense(I32, "num_rows"),
        inv_freq=_dense(F32, "half"),
        cos=_dense(F32, "num_rows", "half"),
        sin=_dense(F32, "num_rows", "half"),
    ),
    "apply_rope": _bounds(
        "x:p cos:p sin:p y:p x_stride:l y_stride:l count:i num_heads:i head_dim:i half:i",
        x=_rows("x_stride", "num_heads", "head_dim"),
        cos=_dense(F32, "num_rows", "half"),
        sin=_dense(F32, "num_rows", "half"),
        y=_rows("y_stride", "num_heads", "head_dim"),
    ),
    "kv_write": _bounds(
        "k:p v:p cache:p slot_mapping:p k_stride:l v_stride:l count:i kv_heads:i block_size:i head_dim:i",
        k=_rows("k_stride", "kv_heads", "head_dim"),
        v=_rows("v_stride", "kv_heads", "head_dim"),
        cache=_whole_block,
        slot_mapping=_dense(I64, "num_rows"),
    ),
    "rope_kv_write": _bounds(
        "q:p k:p v:p cos:p sin:p q_out:p cache:p slot_mapping:p q_stride:l k_stride:l v_stride:l "
        "q_out_stride:l count:i num_heads:i kv_heads:i head_dim:i half:i block_size:i",
        q=_rows("q_stride", "num_heads", "head_dim"),
        k=_rows("k_stride", "kv_heads", "head_dim"),
        v=_rows("v_stride", "kv_heads", "head_dim"),
        cos=_dense(F32, "num_rows", "half"),
        sin=_dense(F32, "num_rows", "half"),
        q_out=_rows("q_out_stride", "num_heads", "head_dim"),
        cache=_whole_block,
        slot_mapping=_dense(I64, "num_rows"),
    ),
    "paged_attention": _bounds(
        "q:p cache:p block_tables:p seq_lens:p query_starts:p y:p q_stride:l y_stride:l num_heads:i "
        "kv_heads:i head_dim:i block_size:i table_width:i scale:f",
        q=_rows("q_stride", "num_heads", "head_dim"),
        cache=_whole_block,
        block_tables=_dense(I32, "max_seqs", "table_width"),
        seq_lens=_dense(I32, "max_seqs"),
        query_starts=lambda v: (v["max_seqs"] + 1) * I32,
        y=_rows("y_stride", "num_heads", "head_dim"),
    ),
    "add": _BINARY,
    "mul": _BINARY,
    "silu_mul": _BINARY,
    "silu": _bounds(
        "x:p y:p x_stride:l y_stride:l count:i dim:i", x=_rows("x_stride", "dim"), y=_rows("y_stride", "dim")
    ),
    "silu_mul_q8": _bounds(
        "a:p b:p q:p scale:p sum:p a_stride:l b_stride:l count:i dim:i",
        a=_rows("a_stride", "dim"),
        b=_rows("b_stride", "dim"),
        **_q8("dim"),
    ),
    "gather_rows": _bounds(
        "x:p rows:p y:p x_stride:l y_stride:l count:i dim:i",
        x=_all_tokens("x_stride", "dim"),
        rows=_dense(I32, "num_rows"),
        y=_rows("y_stride", "dim"),
    ),
    "sample_greedy": _bounds(
        "logits:p sample_rows:p num_logprobs:p last_token:p sampled_token_ids:p sampled_logprobs:p "
        "top_token_ids:p top_logprobs:p logits_stride:l count:i vocab:i",
        **_SAMPLED,
    ),
    "sample_random": _bounds(
        "logits:p sample_rows:p num_logprobs:p temperature:p top_k:p top_p:p min_p:p seed:p "
        "output_position:p last_token:p sampled_token_ids:p sampled_logprobs:p top_token_ids:p "
        "top_logprobs:p logits_stride:l count:i vocab:i",
        **_DRAWN,
        **_SAMPLED,
    ),
    "mask_logits": _bounds(
        "logits:p mask_rows:p grammar_masks:p y:p logits_stride:l y_stride:l count:i vocab:i",
        logits=_rows("logits_stride", "vocab"),
        mask_rows=_PER_LOGIT,
        grammar_masks=_masks,
        y=_rows("y_stride", "vocab"),
    ),
    "adjust_logits": _bounds(
        "logits:p sample_rows:p token_counts:p repetition_penalty:p presence_penalty:p frequency_penalty:p "
        "bias_starts:p bias_token_ids:p bias_values:p allowed_rows:p allowed_masks:p y:p logits_stride:l "
        "y_stride:l count:i vocab:i",
        logits=_rows("logits_stride", "vocab"),
        bias_starts=lambda v: (v["max_logits"] + 1) * I32,
        bias_token_ids=_biases,
        bias_values=_biases,
        allowed_rows=_PER_LOGIT,
        allowed_masks=_masks,
        y=_rows("y_stride", "vocab"),
        **_PENALTIES,
    ),
    "sample_full": _bounds(
        "logits:p adjusted:p sample_rows:p num_logprobs:p temperature:p top_k:p top_p:p min_p:p seed:p "
        "output_position:p last_token:p sampled_token_ids:p sampled_logprobs:p sampled_ranks:p top_token_ids:p "
        "top_logprobs:p logits_stride:l adjusted_stride:l count:i vocab:i",
        adjusted=_rows("adjusted_stride", "vocab"),
        sampled_ranks=_PER_LOGIT,
        **_DRAWN,
        **_SAMPLED,
    ),
    "count_tokens": _bounds(
        "token_counts:p sampled_token_ids:p sample_rows:p repetition_penalty:p presence_penalty:p "
        "frequency_penalty:p count:i vocab:i",
        sampled_token_ids=_PER_LOGIT,
        **_PENALTIES,
    ),
}
