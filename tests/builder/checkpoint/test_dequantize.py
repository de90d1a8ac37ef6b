"""Stored rows mean what the gguf package and numpy say they mean, and damage in them is seen."""

import numpy as np
import pytest
import torch
from ggml_blocks import dequantize_rows, quantize_rows

from castiron.builder.checkpoint.dequantize import check_finite, dequantize, to_dense
from castiron.models.schemes import DENSE_SCHEMES, SCHEMES, schemes_for
from castiron.runtime.errors import CheckpointError

BOUND = {  # root mean square error of standard normal values, by what the bits allow
    "f32": 0, "f16": 3e-4, "bf16": 2e-3, "q8_0": 0.007, "q6_k": 0.025, "q5_k": 0.05, "q5_1": 0.05,
    "q5_0": 0.05, "q4_k": 0.1, "q4_1": 0.1, "q4_0": 0.11,
}  # fmt: skip
SCALES = {  # byte offsets of the float16 scales in a block
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q4_k": [0, 2], "q5_k": [0, 2],
    "q6_k": [208],
}  # fmt: skip


def normal(rows: int, k: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, k)).astype(np.float32)


@pytest.mark.parametrize("scheme", schemes_for("cpu"))
def test_quantized_values_come_back_close(scheme: str) -> None:
    values = normal(40, 512)
    back = dequantize(scheme, quantize_rows(scheme, values), 512)
    assert back.dtype == np.float32
    assert np.sqrt(np.mean((back - values) ** 2)) <= BOUND[scheme]


@pytest.mark.parametrize("scheme", schemes_for("cpu", quantized=True))
def test_random_blocks_agree_with_the_gguf_package(scheme: str) -> None:
    record = SCHEMES[scheme]
    rows = np.random.default_rng(2).integers(0, 256, (50, 2 * record.block_bytes), dtype=np.uint8)
    blocks = rows.reshape(-1, record.block_bytes)
    for offset in SCALES[scheme]:
        blocks[:, offset + 1] &= 0xBF  # finite scales
    expected = dequantize_rows(scheme, rows)
    assert np.array_equal(dequantize(scheme, rows, 2 * record.block_size), expected)


@pytest.mark.parametrize(("scheme", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_dense_conversion_rounds_as_torch_does(scheme: str, dtype: torch.dtype) -> None:
    values = np.random.default_rng(3).integers(0, 2**32, (64, 4096), dtype=np.uint32).view(np.float32)
    values = np.where(np.isnan(values), np.float32(1.0), values)
    ties = np.float32([1.00390625, 1.01171875, 65504.0, 65519.0, 1e-45, -0.0, 3.4e38, np.inf, -np.inf])
    values.reshape(-1)[: ties.size] = ties
    expected = torch.from_numpy(values).to(dtype)
    rows = to_dense(scheme, values)
    assert rows.shape == (64, 2 * 4096)
    assert np.array_equal(rows.view(np.int16), expected.view(torch.int16).numpy())
    assert np.array_equal(dequantize(scheme, rows, 4096), expected.float().numpy())


def test_nan_stays_nan_in_bf16() -> None:
    values = np.array([[0x7F800001, 0xFFFFFFFF, 0x7FC00000]], dtype=np.uint32).view(np.float32)
    assert np.isnan(dequantize("bf16", to_dense("bf16", values), 3)).all()


@pytest.mark.parametrize("scheme", DENSE_SCHEMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_dense_value_that_is_not_finite_is_named(scheme: str, bad: float) -> None:
    values = normal(3, 64)
    rows = to_dense(scheme, values)
    check_finite(scheme, rows, "w")
    values[2, 63] = bad
    with pytest.raises(CheckpointError, match="tensor w: a value is NaN or infinite"):
        check_finite(scheme, to_dense(scheme, values), "w")


@pytest.mark.parametrize("scheme", schemes_for("cpu", quantized=True))
def test_a_block_scale_that_is_not_finite_is_named(scheme: str) -> None:
    rows = quantize_rows(scheme, normal(3, 512))
    check_finite(scheme, rows, "w")
    for offset in SCALES[scheme]:
        for bits in (0x7C00, 0xFC00, 0x7E00):
            damaged = rows.copy()
            at = damaged.shape[1] - SCHEMES[scheme].block_bytes + offset
            damaged[1, at : at + 2] = np.array([bits], dtype="<u2").view(np.uint8)
            with np.errstate(invalid="ignore"):
                assert not np.isfinite(dequantize_rows(scheme, damaged)).all()
            with pytest.raises(CheckpointError, match="tensor w: a block scale is NaN or infinite"):
                check_finite(scheme, damaged, "w")
