"""fp8 rows mean scale * e4m3(code), and rounding to them is as near as torch's."""

import numpy as np
import torch

from castiron.builder.checkpoint.dequantize import check_finite, dequantize
from castiron.builder.checkpoint.fp8_blocks import join_fp8, quantize_fp8, split_fp8


def test_all_finite_codes_decode_as_torch() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    scale = np.array([1.0, 0.3, 2.0**-20], np.float32)
    rows = join_fp8(scale, np.broadcast_to(codes, (3, codes.size)))
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(scale)[:, None]
    assert np.array_equal(dequantize("fp8", rows, codes.size), expected.numpy())
    check_finite("fp8", rows, "w")


def test_rounding_is_to_nearest_even_with_the_rows_largest_magnitude_at_448() -> None:
    values = (
        np.random.default_rng(0).standard_normal((40, 200), np.float32)
        * np.logspace(-8, 8, 40, dtype=np.float32)[:, None]
    )
    scale, codes = split_fp8(quantize_fp8(values))
    assert np.array_equal(scale, np.abs(values).max(axis=1) / np.float32(448))
    expected = (
        (torch.from_numpy(values) / torch.from_numpy(scale)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    )
    assert np.array_equal(codes, expected.view(torch.uint8).numpy())
    back = dequantize("fp8", quantize_fp8(values), 200)
    assert np.linalg.norm(back - values, axis=1).max() / np.linalg.norm(values, axis=1).max() < 0.03


def test_zeros_and_tiny_values_round_to_rows_that_pass_the_check() -> None:
    values = np.zeros((3, 16), np.float32)
    values[1, 3], values[2] = 1e-42, 3e38
    rows = quantize_fp8(values)
    check_finite("fp8", rows, "w")
    back = dequantize("fp8", rows, 16)
    assert not back[0].any() and np.isfinite(back).all() and np.allclose(back[2], values[2])


def test_what_fp8_holds_exactly_survives() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)[None]
    rows = join_fp8(np.array([0.0371], np.float32), codes)
    again = quantize_fp8(dequantize("fp8", rows, codes.size))
    assert np.array_equal(split_fp8(again)[1][:, 1:], codes[:, 1:])
