"""What made-up weights of each scheme look like: finite codes, standard deviation 1 / sqrt(fan-in)."""

import math
from collections.abc import Iterable

import numpy as np

from castiron.builder.checkpoint.dequantize import dequantize
from castiron.builder.parameters import Parameter
from castiron.builder.plan.layouts import layout_of
from castiron.builder.plan.weights import WeightsLayout
from castiron.models.schemes import SCHEMES
from castiron.runtime.dummy_weights import DummyTensor, dummy_chunks

_NORM_SPREAD = 0.3  # norm weights are 1 +- this: a dropped one shows
_BIAS_SPREAD = 0.1
_SCALE_SPREAD = 0.25  # of a block's scale, relative


def dummy_tensor(parameter: Parameter, weights_offset: int) -> DummyTensor:
    """How to make up a parameter that isn't a constant, in its layout."""
    assert parameter.constant is None
    scheme = SCHEMES[parameter.scheme]
    layout = layout_of(parameter)
    if len(parameter.shape) == 1:
        is_bias = parameter.name.endswith(".bias")
        num_bytes = layout.row_bytes(parameter.scheme, parameter.shape[0])
        mean, spread = (0.0, _BIAS_SPREAD) if is_bias else (1.0, _NORM_SPREAD)
        return DummyTensor(parameter.name, weights_offset, num_bytes, scheme.name, mean, spread)
    n, k = parameter.shape
    num_bytes = layout.packed_bytes(scheme.name, n, k)
    deviation = 1 / math.sqrt(k)
    if not scheme.is_quantized:
        return DummyTensor(
            parameter.name, weights_offset, num_bytes, scheme.name, 0.0, deviation * math.sqrt(3)
        )
    code_deviation, minimum_factor = _code_statistics(scheme.name)
    scale = deviation / code_deviation
    return DummyTensor(
        name=parameter.name,
        weights_offset=weights_offset,
        num_bytes=num_bytes,
        element="codes",
        mean=scale,
        amplitude=scale * _SCALE_SPREAD,
        unit_bytes=layout.unit_bytes(scheme.name),
        minimum_factor=minimum_factor,
        scales_per_unit=layout.scales_per_unit(scheme.name),
        scale_element="bf16" if scheme.scale_dtype == "bf16" else "f16",
        has_zero_points=scheme.has_zero_points,
    )


def dummy_tensors(parameters: Iterable[Parameter], layout: WeightsLayout) -> list[DummyTensor]:
    """How to make up all parameters that aren't constants, at their places."""
    return [dummy_tensor(p, layout.places[p.name][0]) for p in parameters if p.constant is None]


def dummy_values(parameter: Parameter) -> np.ndarray:
    """The float32 values, of the parameter's shape, that its made-up bytes stand for."""
    tensor = dummy_tensor(parameter, 0)
    packed = np.concatenate(list(dummy_chunks(tensor)))
    if len(parameter.shape) == 1:
        return dequantize(parameter.scheme, packed.reshape(1, -1), parameter.shape[0]).reshape(-1)
    n, k = parameter.shape
    return dequantize(parameter.scheme, layout_of(parameter).unpack(parameter.scheme, packed, n, k), k)


def _code_statistics(name: str) -> tuple[float, float]:
    """Standard deviation of a block's values for scale 1, and minimum / scale that makes their mean 0.

    All codes are uniform. For two-level schemes the inner scales and minimums are uniform 6-bit (or signed
    8-bit) numbers, and the minimum is subtracted.
    """
    scheme = SCHEMES[name]
    mean, square = _moments(0, 2**scheme.bits)
    variance = square - mean * mean
    if name == "q8_0":
        return math.sqrt(_moments(-128, 128)[1]), 0.0
    if name == "q6_k":
        return math.sqrt(_moments(-32, 32)[1] * _moments(-128, 128)[1]), 0.0
    if scheme.scale_dtype == "f16*u6":
        scale_mean, scale_square = _moments(0, 64)
        product = scale_square * square + mean * mean * scale_square - 2 * (mean * scale_mean) ** 2
        return math.sqrt(product), mean
    if scheme.has_zero_points:  # as uniform as the codes
        return math.sqrt(2 * variance), 0.0
    if scheme.has_minimum:
        return math.sqrt(variance), -mean
    return math.sqrt(_moments(-scheme.zero_point, 2**scheme.bits - scheme.zero_point)[1]), 0.0


def _moments(start: int, stop: int) -> tuple[float, float]:
    """Mean and mean square of the integers start .. stop - 1, all equally likely."""
    values = np.arange(start, stop, dtype=np.float64)
    return float(values.mean()), float((values * values).mean())
