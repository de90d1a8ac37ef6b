"""Ops that only passes create: fusions, and linears on activations quantized to pairs of int8. Registered like
ops.py's.

A quantized activation is three tensors: q i8[T, 2, K], scale f32[T, K / 32] and sum f32[T, K / 16]. Each value
is two 8-bit digits, value = (256 * q[:, 0] + q[:, 1]) * scale, so that int8 dot products give it 15 bits: one
digit alone moves a small model's logprobs by 0.1 (perf/LOG.md). sum is scale * (sum of 16 of those integers),
which kernels need for weights with a minimum or zero point.
"""

import torch
from torch import Tensor

from castiron.models.ops import REFERENCES, SHAPE_RULES, kv_write_shape, linear_shape, op

GROUP = 32  # values sharing a scale
SUM_GROUP = 16  # values sharing a sum
DIGITS = 2  # int8 digits of a value, the high one first
LARGEST_Q = 127 * 256  # of 256 * high + low

_apply_rope, _kv_write, _rms_norm = (REFERENCES[name] for name in ("apply_rope", "kv_write", "rms_norm"))


def _quantized_like(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, k = x.shape
    assert k % GROUP == 0, f"{k} columns, expected a multiple of {GROUP}"
    return (
        x.new_empty((rows, DIGITS, k), dtype=torch.int8),
        x.new_empty((rows, k // GROUP)),
        x.new_empty((rows, k // SUM_GROUP)),
    )


def _quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, k = x.shape
    groups = x.float().reshape(rows, k // GROUP, GROUP)
    amax = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(amax > 0, LARGEST_Q / amax, torch.zeros_like(amax))
    q = torch.round(groups * inverse).to(torch.int32)  # half to even
    low = ((q + 128) & 255) - 128
    high = (q - low) >> 8
    low = torch.clamp(low, min=-127)  # -128 has no int8 negative: one more there
    q = 256 * high + low
    scale = amax[..., 0] / LARGEST_Q
    sums = q.reshape(rows, k // SUM_GROUP, SUM_GROUP).sum(-1) * scale.repeat_interleave(2, dim=1)
    digits = torch.stack([high.reshape(rows, k), low.reshape(rows, k)], dim=1)
    return digits.to(torch.int8), scale, sums


def dequantize_q8(q: Tensor, scale: Tensor) -> Tensor:
    """q i8[T, 2, K], scale f32[T, K / 32] -> f32[T, K]."""
    return (q[:, 0].float() * 256 + q[:, 1].float()) * scale.repeat_interleave(GROUP, dim=1)


@op(_quantized_like)
def quantize_q8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x f32[T, K] -> (q, scale, sum): per 32 values scale = amax / 32512, and round half even(x * (32512 / amax))
    in two digits, the low one from -127 to 127.
    """
    return _quantize(x)


def _linear_q8_shape(
    q: Tensor, scale: Tensor, sum: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    k = q.shape[2]
    assert q.shape[1] == DIGITS, f"{q.shape[1]} digits, expected {DIGITS}"
    assert (scale.shape[1] * GROUP, sum.shape[1] * SUM_GROUP) == (k, k), "scales don't fit"
    return linear_shape(q[:, 0], weight, bias)


@op(_linear_q8_shape)
def linear_q8(q: Tensor, scale: Tensor, sum: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear of the dequantized activation; weight f32[N, K] holds its scheme's exact values -> f32[T, N]."""
    return torch.nn.functional.linear(dequantize_q8(q, scale), weight, bias)


def _add_norm_shape(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.shape == residual.shape and x.shape[1:] == weight.shape, (
        f"{x.shape}, {residual.shape}, {weight.shape}"
    )
    return torch.empty_like(x), torch.empty_like(x)


@op(_add_norm_shape)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), all f32[T, D]."""
    residual_out = x + residual
    return _rms_norm(residual_out, weight, eps), residual_out


@op(lambda x, weight, eps: _quantized_like(SHAPE_RULES["rms_norm"](x, weight, eps)))
def rms_norm_q8(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_q8(rms_norm(x))."""
    return _quantize(_rms_norm(x, weight, eps))


def _add_norm_q8_shape(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, residual_out = _add_norm_shape(x, residual, weight, eps)
    return *_quantized_like(y), residual_out


@op(_add_norm_q8_shape)
def add_rms_norm_q8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(*quantize_q8(rms_norm(x + residual)), x + residual)."""
    residual_out = x + residual
    return *_quantize(_rms_norm(residual_out, weight, eps)), residual_out


def _silu_mul_shape(a: Tensor, b: Tensor) -> Tensor:
    assert a.shape == b.shape, f"{a.shape}, {b.shape}"
    return torch.empty_like(a)


@op(_silu_mul_shape)
def silu_mul(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b, f32[T, D]."""
    return torch.nn.functional.silu(a) * b


@op(lambda a, b: _quantized_like(_silu_mul_shape(a, b)))
def silu_mul_q8(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_q8(silu(a) * b)."""
    return _quantize(torch.nn.functional.silu(a) * b)


def _rope_kv_write_shape(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    rotated_k = SHAPE_RULES["apply_rope"](k, cos, sin)
    return SHAPE_RULES["apply_rope"](q, cos, sin), kv_write_shape(cache, rotated_k, v, slot_mapping)


@op(_rope_kv_write_shape)
def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """(apply_rope(q), kv_write(cache, apply_rope(k), v)): q f32[T, H, Dh], k and v f32[T, Hk, Dh]."""
    rotated_k = _apply_rope(k, cos, sin)
    return _apply_rope(q, cos, sin), _kv_write(cache, rotated_k, v, slot_mapping)
