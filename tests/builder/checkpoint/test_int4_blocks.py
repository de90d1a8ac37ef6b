"""int4 rows mean scale * (q - zero), and rounding to them is as good as 4 bits allow."""

import numpy as np
import pytest
import torch

from castiron.builder.checkpoint.bfloat16 import from_bf16, to_bf16
from castiron.builder.checkpoint.dequantize import check_finite, dequantize
from castiron.builder.checkpoint.int4_blocks import join_int4, quantize_int4
from castiron.models.schemes import SCHEMES, schemes_for
from castiron.runtime.errors import CheckpointError

INT4 = [scheme for scheme in schemes_for("cuda") if scheme.startswith("int4")]
SYMMETRIC = [scheme for scheme in INT4 if not scheme.endswith("z")]


def normal(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k), np.float32)


@pytest.mark.parametrize("scheme", INT4)
def test_values_are_scale_times_code_less_zero_point(scheme: str) -> None:
    rng = np.random.default_rng(1)
    n, groups, size = 7, 3, SCHEMES[scheme].group_size
    codes = rng.integers(0, 16, (n, groups * size))
    scale = to_bf16(normal(n, groups))
    zero = rng.integers(0, 16, (n, groups)).astype(np.uint8) if scheme.endswith("z") else None
    nibbles = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    rows = join_int4(scheme, scale, nibbles, zero)
    assert rows.shape == (n, groups * SCHEMES[scheme].block_bytes)
    values = dequantize(scheme, rows, groups * size)
    for row, column in rng.integers(0, codes.shape, (200, 2)):
        offset = 8 if zero is None else int(zero[row, column // size])
        expected = float(from_bf16(scale)[row, column // size]) * (int(codes[row, column]) - offset)
        assert float(values[row, column]) == expected


@pytest.mark.parametrize(("scheme", "bound"), list(zip(SYMMETRIC, (0.095, 0.105, 0.12), strict=True)))
def test_rounding_normal_values_loses_little_and_less_than_a_scale_of_amax_over_7(
    scheme: str, bound: float
) -> None:
    values = normal(64, 1024)
    back = dequantize(scheme, quantize_int4(scheme, values), 1024)
    error = np.sqrt(np.mean((back - values) ** 2))
    groups = values.reshape(-1, SCHEMES[scheme].group_size)
    scale = np.abs(groups).max(axis=1, keepdims=True) / 7
    plain = np.sqrt(np.mean((np.rint(groups / scale) * scale - groups) ** 2))
    assert error < bound and error < 0.97 * plain


@pytest.mark.parametrize("scheme", SYMMETRIC)
def test_what_int4_holds_exactly_survives(scheme: str) -> None:
    size = SCHEMES[scheme].group_size
    codes = np.random.default_rng(2).integers(-8, 8, (5, 4 * size)).astype(np.float32)
    codes[:, ::size] = -8
    values = codes * np.float32(0.037109375)  # a bf16 number
    assert np.array_equal(dequantize(scheme, quantize_int4(scheme, values), 4 * size), values)
    assert np.array_equal(dequantize(scheme, quantize_int4(scheme, -values), 4 * size), -values)


@pytest.mark.parametrize("scheme", SYMMETRIC)
def test_zeros_and_tiny_values_round_to_finite_rows(scheme: str) -> None:
    values = normal(4, 256)
    values[0], values[1, :128], values[2] = 0, 0, values[2] * 1e-42
    rows = quantize_int4(scheme, values)
    check_finite(scheme, rows, "w")
    back = dequantize(scheme, rows, 256)
    assert not back[0].any() and np.isfinite(back).all()


def test_rows_are_rounded_alone() -> None:
    values = normal(300, 512)
    whole = quantize_int4("int4_g128", values)
    for start, stop in ((0, 1), (17, 290), (299, 300)):
        assert np.array_equal(quantize_int4("int4_g128", values[start:stop]), whole[start:stop])


@pytest.mark.parametrize("scheme", INT4)
def test_a_scale_that_is_not_finite_is_named(scheme: str) -> None:
    rows = np.zeros((3, 2 * SCHEMES[scheme].block_bytes), np.uint8)
    check_finite(scheme, rows, "w")
    for bits in (0x7F80, 0xFF80, 0x7FC0):
        damaged = rows.copy()
        at = SCHEMES[scheme].block_bytes
        damaged[1, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
        with pytest.raises(CheckpointError, match="tensor w: a block scale is NaN or infinite"):
            check_finite(scheme, damaged, "w")


def test_bfloat16_rounds_as_torch() -> None:
    values = np.concatenate([normal(1, 1000)[0], np.float32([1.00390625, 1.01171875, 3.4e38, -0.0, np.inf])])
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16(values), expected)
