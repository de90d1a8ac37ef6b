"""Row kernels with float8 output against the ops' plain references, on strided, poisoned matrices.

References run on the CPU, where dividing by 448 is a division (a GPU multiplies by its reciprocal)."""

from typing import Any

import pytest
import torch

from castiron.models.fp8_ops import DTYPE, LARGEST
from castiron.models.ops import REFERENCES
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.plugins_cuda.specs import SPECS

pytest.importorskip("cuda.bindings", reason="kernels are launched through cuda-bindings")
from cuda_kernel_caller import NUM_TOKENS, call, poisoned

pytestmark = pytest.mark.gpu

EPS = 1e-5
SPARE = 3  # rows of capacity beyond the live ones
BF16, F32 = torch.bfloat16, torch.float32
POISON = 0xFF
SMALL = [
    pytest.param(5, 64, 8, marks=pytest.mark.sanitize),
    pytest.param(2, 300, 4, marks=pytest.mark.sanitize),
]
# rows, dim, columns between rows
SHAPES = [
    (1, 4096, 0), (1, 8, 8), (3, 7, 0), *SMALL, (3, 576, 1), (64, 1024, 0), (4, 1032, 8), (33, 4096, 64),
    (2, 8192, 0), (1, 14336, 0), (64, 14336, 8), (3, 16384, 8), (2, 16392, 0), (2, 32776, 8), (3000, 128, 0),
]  # fmt: skip
INPUT_SCALES = [0.0, 0.0078125, 0.0113]


def matrix(rows: int, dim: int, extra: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows + SPARE, dim + extra] with normal values in the live part and NaN elsewhere."""
    whole = torch.full((rows + SPARE, dim + extra), float("nan"), dtype=dtype, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    whole[:rows, :dim] = torch.randn(rows, dim, generator=generator, device="cuda").to(dtype)
    return whole


class Quantized:
    """Poisoned codes and scales; only their live parts may be written."""

    def __init__(self, rows: int, dim: int, extra: int) -> None:
        self.rows, self.dim = rows, dim
        self.codes = poisoned(rows + SPARE, dim + extra, dtype=torch.uint8)
        self.scales = poisoned(rows + SPARE, dtype=F32)

    def live(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Live codes and scales on the CPU, after a check of the rest."""
        assert (self.codes[self.rows :] == POISON).all(), "wrote beyond the live rows"
        assert (self.codes[:, self.dim :] == POISON).all(), "wrote beyond the row"
        assert (self.scales.view(torch.int32)[self.rows :] == -1).all(), "wrote scales beyond the live rows"
        return self.codes[: self.rows, : self.dim].cpu(), self.scales[: self.rows].cpu()


def variants(op: str, dim: int) -> list[CudaKernelSpec]:
    sizes = {"rows": 1, "num_sms": 132, "dim": dim}
    found = [spec for spec in SPECS.values() if spec.op == op and not spec.why_not(sizes)]
    assert found
    return found


def launch(
    spec: CudaKernelSpec, rows: int, dim: int, extra: int, late: tuple[str, ...], **fields: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a launch, which a second one repeats to the bit."""
    results = []
    strided = ("x", "residual", "residual_out", "a", "b")
    for _ in range(2):
        out = Quantized(rows, dim, extra)
        strides = {f"{name}_stride": fields[name].stride(0) for name in strided if name in fields}
        call(
            spec, num_tokens=rows, capacities={"max_tokens": rows + SPARE}, count=NUM_TOKENS, late=late, dim=dim,
            y=out.codes, y_stride=out.codes.stride(0), scale=out.scales, **strides, **fields,
        )  # fmt: skip
        results.append(out.live())
    (codes, scales), (again, scales_again) = results
    assert codes.equal(again) and scales.view(torch.int32).equal(scales_again.view(torch.int32)), (
        f"{spec.name}: a second run differs"
    )
    return codes, scales


def assert_equal_bits(
    got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Equal codes and scales; a NaN is any NaN."""
    codes, scales = got
    q, scale = expected
    same = (codes == q.view(torch.uint8)) | (codes.view(DTYPE).float().isnan() & q.float().isnan())
    assert same.all(), f"{(~same).sum()} of {same.numel()} codes differ"
    torch.testing.assert_close(scales, scale, rtol=0, atol=0, equal_nan=True)


def assert_within_a_step(
    got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Scales equal but for float noise; codes equal but for one step where a value lies between two."""
    codes, scales = got
    q, scale = expected
    torch.testing.assert_close(scales, scale, rtol=4e-6, atol=0)
    wanted = q.view(torch.uint8)
    different = codes != wanted
    # allow few codes of a small matrix
    assert different.sum() <= max(2, different.numel() // 1000), (
        f"{different.sum()} of {different.numel()} differ"
    )

    def ordered(bits: torch.Tensor) -> torch.Tensor:
        """Neighbouring values as neighbouring integers, both zeros as 0."""
        magnitude = (bits & 0x7F).int()
        return torch.where(bits > 0x7F, -magnitude, magnitude)

    assert not (codes & 0x7F == 0x7F).any(), "NaN"
    assert ((ordered(codes) - ordered(wanted)).abs() <= 1).all()


@pytest.mark.parametrize("input_scale", INPUT_SCALES)
@pytest.mark.parametrize("rows,dim,extra", SHAPES)
def test_quantize_fp8(rows: int, dim: int, extra: int, input_scale: float) -> None:
    x = matrix(rows, dim, extra, BF16, seed=dim)
    if rows > 2:
        x[1, :dim] = 0
        x[2, :dim] *= 1e-15
    expected = REFERENCES["quantize_fp8"](x[:rows, :dim].cpu(), input_scale)
    for spec in variants("quantize_fp8", dim):
        got = launch(spec, rows, dim, extra, ("x",), x=x, input_scale=input_scale)
        assert_equal_bits(got, expected)


@pytest.mark.parametrize("input_scale", INPUT_SCALES)
@pytest.mark.parametrize("rows,dim,extra", SHAPES)
def test_rms_norm_fp8(rows: int, dim: int, extra: int, input_scale: float) -> None:
    x = matrix(rows, dim, extra, F32, seed=dim)
    weight = torch.randn(dim, device="cuda")
    expected = REFERENCES["rms_norm_fp8"](x[:rows, :dim].cpu(), weight.cpu(), EPS, input_scale)
    for spec in variants("rms_norm_fp8", dim):
        got = launch(spec, rows, dim, extra, ("x",), x=x, weight=weight, eps=EPS, input_scale=input_scale)
        assert_within_a_step(got, expected)


@pytest.mark.parametrize("input_scale", INPUT_SCALES[:2])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rows,dim,extra", SHAPES)
def test_add_rms_norm_fp8(rows: int, dim: int, extra: int, in_place: bool, input_scale: float) -> None:
    x = matrix(rows, dim, 2 * extra, BF16, seed=dim)
    residual = matrix(rows, dim, extra, F32, seed=dim + 1)
    weight = torch.randn(dim, device="cuda")
    *expected, total = REFERENCES["add_rms_norm_fp8"](
        x[:rows, :dim].float().cpu(), residual[:rows, :dim].cpu(), weight.cpu(), EPS, input_scale
    )
    for spec in variants("add_rms_norm_fp8", dim):
        results = []
        for _ in range(2):
            out = Quantized(rows, dim, extra)
            residual_out = poisoned(rows + SPARE, dim + extra, dtype=F32)
            before = residual
            if in_place:
                residual_out[:rows, :dim] = residual[:rows, :dim]
                before = residual_out
            call(
                spec, num_tokens=rows, capacities={"max_tokens": rows + SPARE}, count=NUM_TOKENS,
                late=("x", "residual"), dim=dim, eps=EPS, input_scale=input_scale, x=x, residual=before,
                weight=weight, y=out.codes, scale=out.scales, residual_out=residual_out, x_stride=x.stride(0),
                residual_stride=before.stride(0), y_stride=out.codes.stride(0),
                residual_out_stride=residual_out.stride(0),
            )  # fmt: skip
            assert residual_out[:rows, :dim].cpu().equal(total)
            words = residual_out.view(torch.int32)
            assert (words[rows:] == -1).all() and (words[:, dim:] == -1).all()
            results.append(out.live())
        assert results[0][0].equal(results[1][0]) and results[0][1].equal(results[1][1])
        assert_within_a_step(results[0], (expected[0], expected[1]))


@pytest.mark.parametrize("input_scale", INPUT_SCALES)
@pytest.mark.parametrize("rows,dim,extra", SHAPES)
def test_silu_mul_fp8_of_the_halves_of_one_row(rows: int, dim: int, extra: int, input_scale: float) -> None:
    gate_up = matrix(rows, 2 * dim, extra, BF16, seed=dim)
    gate_up[0, 0] = -200.0  # e^200 is infinite in f32
    a, b = gate_up[:, :dim], gate_up[:, dim:]
    expected = REFERENCES["silu_mul_fp8"](a[:rows].float().cpu(), b[:rows, :dim].float().cpu(), input_scale)
    for spec in variants("silu_mul_fp8", dim):
        # a's address is gate_up's, so holding that back holds b back
        got = launch(
            spec, rows, dim, extra, ("a",), a=gate_up, b=b, input_scale=input_scale,
        )  # fmt: skip
        assert_within_a_step(got, expected)


@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.sanitize), 301, 14336])
@pytest.mark.parametrize("input_scale", [0.0, 0.25, 1e-30, 1e30])
def test_rows_with_nan_and_infinity_stay_apart(dim: int, input_scale: float) -> None:
    x = matrix(6, dim, 0, BF16, seed=1)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("inf"), 0.0
    x[4, dim - 1], x[5, 0], x[5, 1] = float("-inf"), 3e38, -0.0
    x[:6, 2] = -0.0
    expected = REFERENCES["quantize_fp8"](x[:6].cpu(), input_scale)
    if not input_scale:
        nan = expected[0].float().isnan()
        assert nan[1].all() and nan[2, 5] and not nan[0].any() and expected[1][1].isnan()
        assert expected[0].float()[5].abs().max() == LARGEST
    for spec in variants("quantize_fp8", dim):
        assert_equal_bits(launch(spec, 6, dim, 0, ("x",), x=x, input_scale=input_scale), expected)
    norm_input, weight = x.float(), torch.ones(dim, device="cuda")
    for spec in variants("rms_norm_fp8", dim):
        codes, scales = launch(
            spec, 6, dim, 0, ("x",), x=norm_input, weight=weight, eps=EPS, input_scale=input_scale
        )
        values = codes.view(DTYPE).float()
        assert values[1].isnan().all() and values[0].isfinite().all() and (values[3] == 0).all()
        assert values[2, 5].isnan() and scales.isnan()[1] == (input_scale == 0)
    ones = torch.ones_like(x)
    for spec in variants("silu_mul_fp8", dim):
        codes, scales = launch(spec, 6, dim, 0, ("a", "b"), a=x, b=ones, input_scale=input_scale)
        values = codes.view(DTYPE).float()
        assert values[1, 3].isnan() and values[0].isfinite().all() and (values[3] == 0).all()
        assert values[1].isnan().all() == (input_scale == 0) and scales.isnan()[1] == (input_scale == 0)


def test_no_live_rows_write_nothing() -> None:
    x = matrix(1, 64, 0, BF16, seed=1)
    for spec in variants("quantize_fp8", 64):
        out = Quantized(0, 64, 0)
        call(
            spec, num_tokens=0, capacities={"max_tokens": SPARE}, count=NUM_TOKENS, dim=64, input_scale=0.0, x=x,
            x_stride=64, y=out.codes, y_stride=64, scale=out.scales,
        )  # fmt: skip
        out.live()
