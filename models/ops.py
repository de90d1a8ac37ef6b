"""The op vocabulary that model files are written in, as torch custom ops of namespace `castiron`.

Each op is a plain torch function that defines its meaning (float32, clear rather than fast) and a shape rule
for tracing on meta tensors. Ops are functional: one that writes a state takes it and returns a new one
(`STATES`). Fused and lowered ops, which only passes create, are in lowered_ops.py; sampling is in
sampling_ops.py.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

NAMESPACE = "castiron"
_Op = TypeVar("_Op", bound=Callable[..., Any])

# op -> (input that is a state, output that is its next version); the builder gives both one storage
STATES: dict[str, tuple[int, int]] = {
    "kv_write": (0, 0),
    "rope_kv_write": (5, 1),
    "sample_greedy": (3, 4),
    "sample_random": (3, 4),
    "sample_full": (4, 5),
    "count_tokens": (0, 0),
}

# op -> its plain torch function
REFERENCES: dict[str, Callable[..., Any]] = {}

# op -> empty results from meta arguments; asserts what the op demands of its arguments' shapes
SHAPE_RULES: dict[str, Callable[..., Any]] = {}


def op(shape_rule: Callable[..., Any]) -> Callable[[_Op], _Op]:
    """Register a function as castiron::<its name>; `shape_rule` makes empty results from (meta) arguments."""

    def register(function: _Op) -> _Op:
        name = function.__name__
        assert name not in REFERENCES, f"op {name} is registered twice"
        qualified = f"{NAMESPACE}::{name}"
        # not torch.library.custom_op: its autograd wrapper costs a third of a trace, and nothing is trained
        # here
        torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(qualified, "CompositeExplicitAutograd", function)
        torch.library.register_fake(qualified, shape_rule)
        REFERENCES[name] = function
        SHAPE_RULES[name] = shape_rule
        traceable: _Op = getattr(getattr(torch.ops, NAMESPACE), name)
        return traceable

    return register


def _like_first(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


@op(lambda token_ids, last_token, table: table.new_empty(token_ids.shape[0], table.shape[1]))
def embedding(token_ids: Tensor, last_token: Tensor, table: Tensor) -> Tensor:
    """token_ids i32[T], last_token i32[R], table f32[V, D] -> f32[T, D].

    A token id v < 0 means last_token[-1 - v], the id sampled for that row by an earlier step.
    """
    ids = token_ids.long()
    sampled = last_token.long()[(-1 - ids).clamp(min=0)] if last_token.numel() else torch.zeros_like(ids)
    return table[torch.where(ids < 0, sampled, ids)].clone()


def _norm_shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.shape[1] == weight.shape[0], f"{x.shape[1]} columns, weight has {weight.shape[0]}"
    return torch.empty_like(x)


@op(_norm_shape)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x f32[T, D], weight f32[D] -> f32[T, D]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Shape rule of linears: x [T, K], weight [N, K], bias [N] -> f32[T, N]."""
    assert x.shape[1] == weight.shape[1], f"{x.shape[1]} columns, weight has {weight.shape[1]}"
    assert bias is None or bias.shape == weight.shape[:1], f"bias {bias}, weight has {weight.shape[0]} rows"
    return weight.new_empty(x.shape[0], weight.shape[0])


@op(linear_shape)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x . weight^T (+ bias); x f32[T, K], weight f32[N, K], bias f32[N] -> f32[T, N]."""
    return torch.nn.functional.linear(x, weight, bias)


def _cos_sin_shape(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


@op(_cos_sin_shape)
def rope_cos_sin(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """scaling * cos and sin of position * inv_freq;

    positions i32[T], inv_freq f32[half] -> 2 x f32[T, half].
    """
    angles = positions.float()[:, None] * inv_freq
    return torch.cos(angles) * scaling, torch.sin(angles) * scaling


def _rope_shape(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    assert cos.shape == sin.shape and 2 * cos.shape[1] <= x.shape[2], f"{cos.shape[1]} pairs of {x.shape[2]}"
    return torch.empty_like(x)


@op(_rope_shape)
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of the first 2 * half dims of each head; x f32[T, H, Dh] -> f32[T, H, Dh].

    Source: the split-half form of RoFormer (arXiv:2104.09864) that Hugging Face's Llama uses.
    """
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def kv_write_shape(cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> Tensor:
    """Shape rule: k and v alike, of the cache's heads."""
    assert k.shape == v.shape and k.shape[1:] == (cache.shape[2], cache.shape[4]), (
        f"{k.shape[1:]}, {cache.shape}"
    )
    return torch.empty_like(cache)


@op(kv_write_shape)
def kv_write(cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> Tensor:
    """The cache with k and v f32[T, Hk, Dh] written at slot_mapping i64[T] (-1 = don't write).

    cache f32 or f16 [num_blocks, 2, Hk, block_size, Dh]; slot = block * block_size + offset.
    """
    cache = cache.clone()
    live = slot_mapping >= 0
    block_size = cache.shape[3]
    block, offset = slot_mapping[live] // block_size, slot_mapping[live] % block_size
    cache[block, 0, :, offset] = k[live].to(cache.dtype)
    cache[block, 1, :, offset] = v[live].to(cache.dtype)
    return cache


def _attention_shape(
    q: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, query_starts: Tensor, scale: float
) -> Tensor:
    assert q.shape[2] == cache.shape[4] and q.shape[1] % cache.shape[2] == 0, (
        f"{q.shape[1:]}, {cache.shape[2:]}"
    )
    return torch.empty_like(q)


@op(_attention_shape)
def paged_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, query_starts: Tensor, scale: float
) -> Tensor:
    """Causal attention of q f32[T, H, Dh] over the cached keys and values of its sequence -> f32[T, H, Dh].

    block_tables i32[S, W], seq_lens i32[S] (with this step's tokens), query_starts i32[S + 1]; query token j
    of sequence i sits at position seq_lens[i] - num_queries[i] + j. Head h reads kv head h // (H / Hk).
    """
    result = torch.zeros_like(q)
    kv_heads, block_size = cache.shape[2], cache.shape[3]
    repeats = q.shape[1] // kv_heads
    starts = query_starts.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        start, stop = starts[i], starts[i + 1]
        if start == stop:
            continue
        blocks = cache[block_tables[i, : -(-length // block_size)].long()].float()
        keys, values = (
            blocks[:, side].transpose(1, 2).reshape(-1, kv_heads, q.shape[2])[:length] for side in (0, 1)
        )  # [length, Hk, Dh]
        keys, values = (t.repeat_interleave(repeats, dim=1).transpose(0, 1) for t in (keys, values))
        scores = q[start:stop].transpose(0, 1) @ keys.transpose(1, 2) * scale  # [H, queries, length]
        positions = torch.arange(length - (stop - start), length)
        future = torch.arange(length)[None, :] > positions[:, None]
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        result[start:stop] = (weights @ values).transpose(0, 1)
    return result


@op(_like_first)
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), elementwise."""
    return torch.nn.functional.silu(x)


@op(lambda x, rows: x.new_empty(rows.shape[0], x.shape[1]))
def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x f32[T, D], rows i32[L] (0 .. T - 1) -> f32[L, D]."""
    return x[rows.long()]
