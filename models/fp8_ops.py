"""Ops on activations quantized to float8 (e4m3), which weights of scheme fp8 are multiplied by. Registered like
ops.py's.

A quantized activation is two tensors: q float8_e4m3fn[T, K] and scale f32[T], value = scale * q. input_scale is the
scale of every token (static), or 0: each token has its own, its largest magnitude / 448 (dynamic).
"""

import torch
from torch import Tensor

from castiron.models import lowered_ops
from castiron.models.ops import REFERENCES, SHAPE_RULES, linear_shape, op

LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = 1e-12  # of a token of zeros, or nearly
DTYPE = torch.float8_e4m3fn

__ = lowered_ops  # imported to register add_rms_norm and silu_mul
_rms_norm, _add_rms_norm, _silu_mul = (REFERENCES[name] for name in ("rms_norm", "add_rms_norm", "silu_mul"))


def _quantized_like(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=DTYPE), x.new_empty(x.shape[0], dtype=torch.float32)


def _quantize(x: Tensor, input_scale: float) -> tuple[Tensor, Tensor]:
    x = x.float()
    if input_scale:
        scale = torch.full((x.shape[0],), input_scale)
    else:
        scale = (x.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    q = (x / scale[:, None]).clamp(-LARGEST, LARGEST)  # NaN stays
    return q.to(DTYPE), scale


@op(lambda x, input_scale: _quantized_like(x))
def quantize_fp8(x: Tensor, input_scale: float) -> tuple[Tensor, Tensor]:
    """x f32[T, K] -> (q, scale): x / scale, clamped to +-448, rounded to the nearest e4m3, ties to even."""
    return _quantize(x, input_scale)


def _linear_fp8_shape(q: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert q.dtype == DTYPE, f"q is {q.dtype}"
    assert scale.shape == q.shape[:1], f"scales {tuple(scale.shape)} of {q.shape[0]} tokens"
    return linear_shape(q, weight, bias)


@op(_linear_fp8_shape)
def linear_fp8(q: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(q . weight^T) * scale (+ bias); weight f32[N, K] holds its scheme's values -> f32[T, N]."""
    y = torch.nn.functional.linear(q.float(), weight) * scale[:, None]
    return y if bias is None else y + bias


@op(lambda x, weight, eps, input_scale: _quantized_like(SHAPE_RULES["rms_norm"](x, weight, eps)))
def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, input_scale: float) -> tuple[Tensor, Tensor]:
    """quantize_fp8(rms_norm(x))."""
    return _quantize(_rms_norm(x, weight, eps), input_scale)


def _add_norm_fp8_shape(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, input_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, residual_out = SHAPE_RULES["add_rms_norm"](x, residual, weight, eps)
    return *_quantized_like(y), residual_out


@op(_add_norm_fp8_shape)
def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, input_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(*quantize_fp8(rms_norm(x + residual)), x + residual)."""
    y, residual_out = _add_rms_norm(x, residual, weight, eps)
    return *_quantize(y, input_scale), residual_out


@op(lambda a, b, input_scale: _quantized_like(SHAPE_RULES["silu_mul"](a, b)))
def silu_mul_fp8(a: Tensor, b: Tensor, input_scale: float) -> tuple[Tensor, Tensor]:
    """quantize_fp8(silu(a) * b)."""
    return _quantize(_silu_mul(a, b), input_scale)
