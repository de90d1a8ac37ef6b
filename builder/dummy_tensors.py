"""What made-up weights of each scheme look like: finite codes, standard deviation 1 / sqrt(fan-in)."""

import itertools
import math
from collections.abc import Iterable, Iterator
from types import ModuleType

import numpy as np

from castiron.builder.checkpoint.dequantize import dequantize
from castiron.builder.checkpoint.fp8_blocks import dequantize_fp8, join_fp8
from castiron.builder.parameters import Parameter
from castiron.builder.plan.layouts import layout_of
from castiron.builder.plan.weights import WeightsLayout
from castiron.models.schemes import SCHEMES, Scheme, row_bytes
from castiron.runtime.dummy_weights import (
    BF16,
    BITS,
    BLOCK_BYTES,
    E4M3,
    F16,
    F16_MULTIPLE,
    F32,
    DummyField,
    DummyTensor,
    dummy_chunks,
)

_NORM_SPREAD = 0.3  # norm weights are 1 +- this: a dropped one shows
_BIAS_SPREAD = 0.1
_SCALE_SPREAD = 0.25  # of a block's scale, relative


def made_up(parameter: Parameter, weights_offset: int) -> tuple[DummyTensor, ...]:
    """How to make up a parameter that isn't a constant, in its layout: what lies at `weights_offset`, in order."""
    assert parameter.constant is None
    if parameter.scheme == "fp8":
        return _fp8_tensors(parameter, weights_offset)
    scheme = SCHEMES[parameter.scheme]
    layout = layout_of(parameter)
    if len(parameter.shape) == 1:
        is_bias = parameter.name.endswith(".bias")
        num_bytes = row_bytes(parameter.scheme, parameter.shape[0])
        mean, spread = (0.0, _BIAS_SPREAD) if is_bias else (1.0, _NORM_SPREAD)
        fields: tuple[DummyField, ...] = (DummyField(BLOCK_BYTES, scheme.name, mean=mean, amplitude=spread),)
    else:
        n, k = parameter.shape
        num_bytes = layout.packed_bytes(scheme.name, n, k)
        deviation = 1 / math.sqrt(k)
        if scheme.is_quantized:
            fields = _block_fields(scheme, layout, deviation)
        else:
            fields = (DummyField(BLOCK_BYTES, scheme.name, amplitude=deviation * math.sqrt(3)),)
    return (DummyTensor(parameter.name, weights_offset, num_bytes, fields),)


def _fp8_tensors(parameter: Parameter, weights_offset: int) -> tuple[DummyTensor, DummyTensor]:
    """The codes in tiles, then the rows' scales."""
    n, k = parameter.shape
    layout = layout_of(parameter)
    scale_bytes = layout.tail_bytes("fp8", n)
    code_bytes = layout.packed_bytes("fp8", n, k) - scale_bytes
    scale = 1 / math.sqrt(k) / _fp8_deviation()
    scales = DummyField(BLOCK_BYTES, F32, mean=scale, amplitude=scale * _SCALE_SPREAD)
    return (
        DummyTensor(parameter.name, weights_offset, code_bytes, (DummyField(BLOCK_BYTES, E4M3),)),
        DummyTensor(f"{parameter.name}.scales", weights_offset + code_bytes, scale_bytes, (scales,)),
    )


def _fp8_deviation() -> float:
    """Standard deviation of made-up e4m3 values: every finite code alike, but the largest twice."""
    codes = np.arange(256, dtype=np.uint8)
    codes -= (codes & 0x7F) == 0x7F
    values = dequantize_fp8(join_fp8(np.ones(1, np.float32), codes[None]))
    return float(values.std(dtype=np.float64))


def _block_fields(scheme: Scheme, layout: ModuleType, deviation: float) -> tuple[DummyField, ...]:
    """A unit of a layout of blocks: scales, then minimums or zero points where the scheme has them, then codes."""
    code_deviation, minimum_factor = _code_statistics(scheme.name)
    mean = deviation / code_deviation
    num_scales = layout.scales_per_unit(scheme.name)
    scale_bytes = 2 * num_scales
    kind = BF16 if scheme.scale_dtype == "bf16" else F16
    fields = [DummyField(scale_bytes, kind, mean=mean, amplitude=mean * _SCALE_SPREAD)]
    if minimum_factor:
        fields.append(
            DummyField(
                scale_bytes,
                F16_MULTIPLE,
                mean=mean,
                amplitude=mean * _SCALE_SPREAD,
                factor=minimum_factor,
                distance=scale_bytes,
            )
        )
    if scheme.has_zero_points:
        fields.append(DummyField(num_scales, BITS, mask=15))
    code_bytes = layout.unit_bytes(scheme.name) - sum(field.num_bytes for field in fields)
    return (*fields, DummyField(code_bytes, BITS))


def dummy_tensors(parameters: Iterable[Parameter], layout: WeightsLayout) -> list[DummyTensor]:
    """How to make up all parameters that aren't constants, at their places."""
    made = [made_up(p, layout.places[p.name][0]) for p in parameters if p.constant is None]
    return list(itertools.chain.from_iterable(made))


def made_up_chunks(parameter: Parameter) -> Iterator[np.ndarray]:
    """The parameter's made-up bytes in order, uint8, a few MiB at a time."""
    for tensor in made_up(parameter, 0):
        yield from dummy_chunks(tensor)


def dummy_values(parameter: Parameter) -> np.ndarray:
    """The float32 values, of the parameter's shape, that its made-up bytes stand for."""
    packed = np.concatenate(list(made_up_chunks(parameter)))
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
