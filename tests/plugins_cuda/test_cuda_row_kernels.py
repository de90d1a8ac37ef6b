"""Norms, element-wise kernels and gathers against the ops' plain references, on strided, poisoned matrices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from castiron.models import lowered_ops  # noqa: F401  (registers the fused ops)
from castiron.models.ops import REFERENCES
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.plugins_cuda.specs import SPECS

pytest.importorskip("cuda.bindings", reason="kernels are launched through cuda-bindings")
from cuda_kernel_caller import NUM_LOGITS, NUM_TOKENS, call, poisoned

pytestmark = pytest.mark.gpu

EPS = 1e-5
SPARE = 3  # rows of capacity beyond the live ones
BF16, F32 = torch.bfloat16, torch.float32
SMALL = [
    pytest.param(5, 64, 8, marks=pytest.mark.sanitize),
    pytest.param(2, 300, 4, marks=pytest.mark.sanitize),
]
# rows, dim, columns between rows: aligned to 16 bytes only where extra is a multiple of 8
SHAPES = [
    (1, 4096, 0), (1, 8, 8), (3, 7, 0), *SMALL, (7, 512, 0), (3, 576, 1), (64, 1024, 0),
    (4, 1032, 8), (33, 4096, 64), (2, 8192, 0), (3, 16384, 8), (2, 16392, 0), (5000, 128, 0), (3000, 1536, 8),
]  # fmt: skip


def matrix(rows: int, dim: int, extra: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows + SPARE, dim + extra] with normal values in the live part and NaN elsewhere."""
    whole = torch.full((rows + SPARE, dim + extra), float("nan"), dtype=dtype, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    whole[:rows, :dim] = torch.randn(rows, dim, generator=generator, device="cuda").to(dtype)
    return whole


class Output:
    """A poisoned matrix; only its live part may be written."""

    def __init__(self, rows: int, dim: int, extra: int, dtype: torch.dtype) -> None:
        self.rows, self.dim = rows, dim
        self.whole = poisoned(rows + SPARE, dim + extra, dtype=dtype)

    def live(self) -> torch.Tensor:
        """The live part, after a check of the rest."""
        words = self.whole.view(torch.int16 if self.whole.dtype == BF16 else torch.int32)
        assert (words[self.rows :] == -1).all(), "wrote beyond the live rows"
        assert (words[:, self.dim :] == -1).all(), "wrote beyond the row"
        return self.whole[: self.rows, : self.dim]


def assert_bf16_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding to bf16 (half of 2^-8) and float noise."""
    assert out.dtype == BF16
    error = (out.double() - expected).abs()
    assert (error <= expected.abs() * 2**-8 + 1e-30).all(), f"largest error {error.max()}"
    assert error.norm() <= 2.5e-3 * expected.norm()


def variants(op: str, dim: int) -> list[CudaKernelSpec]:
    sizes = {"rows": 1, "num_sms": 132, "dim": dim}
    return [spec for spec in SPECS.values() if spec.op == op and not spec.why_not(sizes)]


def twice(launch: Callable[[], tuple[Output, ...]]) -> tuple[torch.Tensor, ...]:
    """Live outputs of a launch, which a second one repeats to the bit."""
    first = tuple(output.live().clone() for output in launch())
    for a, b in zip(first, (output.live() for output in launch()), strict=True):
        assert a.view(torch.uint8).equal(b.contiguous().view(torch.uint8)), "a second run differs"
    return first


def rows_of(rows: int, **strides: torch.Tensor) -> dict[str, Any]:
    return {
        "num_tokens": rows, "capacities": {"max_tokens": rows + SPARE}, "count": NUM_TOKENS,
        **{f"{name}_stride": whole.stride(0) for name, whole in strides.items()},
    }  # fmt: skip


@pytest.mark.parametrize("rows,dim,extra", SHAPES)
def test_rms_norm(rows: int, dim: int, extra: int) -> None:
    x = matrix(rows, dim, extra, F32, seed=dim)
    weight = torch.randn(dim, device="cuda")
    expected = REFERENCES["rms_norm"](x[:rows, :dim].double(), weight.double(), EPS)
    for spec in variants("rms_norm", dim):

        def launch(spec: CudaKernelSpec = spec) -> tuple[Output, ...]:
            y = Output(rows, dim, extra, BF16)
            call(
                spec,
                **rows_of(rows, x=x, y=y.whole),
                late=("x",),
                x=x,
                weight=weight,
                y=y.whole,
                dim=dim,
                eps=EPS,
            )
            return (y,)

        (y,) = twice(launch)
        assert_bf16_close(y, expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rows,dim,extra", SHAPES)
def test_add_rms_norm(rows: int, dim: int, extra: int, in_place: bool) -> None:
    x = matrix(rows, dim, 2 * extra, BF16, seed=dim)
    residual = matrix(rows, dim, extra, F32, seed=dim + 1)
    weight = torch.randn(dim, device="cuda")
    expected_sum = residual[:rows, :dim] + x[:rows, :dim].float()
    expected, _ = REFERENCES["add_rms_norm"](
        x[:rows, :dim].double(), residual[:rows, :dim].double(), weight.double(), EPS
    )
    for spec in variants("add_rms_norm", dim):

        def launch(spec: CudaKernelSpec = spec) -> tuple[Output, ...]:
            y, residual_out = Output(rows, dim, extra, BF16), Output(rows, dim, extra, F32)
            before = residual
            if in_place:  # poison apart from the live part, as outputs have it
                residual_out.whole[:rows, :dim] = residual[:rows, :dim]
                before = residual_out.whole
            strides = rows_of(rows, x=x, residual=before, y=y.whole, residual_out=residual_out.whole)
            call(
                spec, **strides, late=("x", "residual"), x=x, residual=before, weight=weight, y=y.whole,
                residual_out=residual_out.whole, dim=dim, eps=EPS,
            )  # fmt: skip
            return y, residual_out

        y, total = twice(launch)
        assert_bf16_close(y, expected)
        assert total.equal(expected_sum)


def test_norms_keep_their_rows_apart_and_pass_nan_and_infinity_on() -> None:
    x = matrix(4, 64, 0, F32, seed=1)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("inf"), 0.0
    for spec in variants("rms_norm", 64):
        y = Output(4, 64, 0, BF16)
        weight = torch.ones(64, device="cuda")
        call(spec, **rows_of(4, x=x, y=y.whole), x=x, weight=weight, y=y.whole, dim=64, eps=EPS)
        live = y.live()
        assert live[0].isfinite().all() and live[1].isnan().all() and (live[3] == 0).all()
        assert live[2, 5].isnan() and (live[2, :5] == 0).all()


@pytest.mark.parametrize("rows,dim,extra", [*SHAPES, (1, 14336, 0), (64, 14336, 8)])
def test_silu_mul_of_the_halves_of_one_row(rows: int, dim: int, extra: int) -> None:
    gate_up = matrix(rows, 2 * dim, extra, BF16, seed=dim)
    gate_up[:rows] *= 4
    gate_up[0, 0] = -200.0  # e^200 is infinite in f32
    a, b = gate_up[:, :dim], gate_up[:, dim:]
    expected = REFERENCES["silu_mul"](a[:rows].double(), b[:rows, :dim].double())
    late = matrix(rows, 2 * dim, extra, BF16, seed=dim)

    def launch() -> tuple[Output, ...]:
        y = Output(rows, dim, extra, BF16)
        late.copy_(gate_up)
        # a's address is gate_up's, so holding a back holds b back
        call(
            SPECS["silu_mul"], **rows_of(rows, a=late, b=late, y=y.whole), late=("a",), a=late,
            b=late[:, dim:], y=y.whole, dim=dim,
        )  # fmt: skip
        return (y,)

    (y,) = twice(launch)
    error = (y.double() - expected).abs()
    assert (error <= expected.abs() * 2**-8 + 1e-30).all()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rows,dim,extra", SHAPES)
def test_add(rows: int, dim: int, extra: int, in_place: bool) -> None:
    a, b = matrix(rows, dim, extra, F32, seed=1), matrix(rows, dim, 0, BF16, seed=2)

    def launch() -> tuple[Output, ...]:
        y = Output(rows, dim, extra, F32)
        before = a
        if in_place:
            y.whole[:rows, :dim] = a[:rows, :dim]
            before = y.whole
        strides = rows_of(rows, a=before, b=b, y=y.whole)
        call(SPECS["add"], **strides, late=("a", "b"), a=before, b=b, y=y.whole, dim=dim)
        return (y,)

    (y,) = twice(launch)
    assert y.equal(a[:rows, :dim] + b[:rows, :dim].float())


@pytest.mark.parametrize("dtype,name", [(F32, "f32"), (BF16, "bf16")])
@pytest.mark.parametrize("rows,dim,extra", SHAPES)
def test_gather_rows(rows: int, dim: int, extra: int, dtype: torch.dtype, name: str) -> None:
    x = matrix(50, dim, extra, dtype, seed=dim)
    indices = torch.randint(50, (rows + SPARE,), device="cuda", dtype=torch.int32)
    indices[rows:] = 2**30  # never followed

    def launch() -> tuple[Output, ...]:
        y = Output(rows, dim, extra, dtype)
        call(
            SPECS[f"gather_rows.{name}"], num_tokens=50, num_logits=rows, count=NUM_LOGITS,
            capacities={"max_logits": rows + SPARE}, late=("x",), x=x, rows=indices, y=y.whole, dim=dim,
            x_stride=x.stride(0), y_stride=y.whole.stride(0), item_bytes=x.element_size(),
        )  # fmt: skip
        return (y,)

    (y,) = twice(launch)
    assert y.equal(x[indices[:rows].long(), :dim])


def test_rows_beyond_two_to_the_31_elements() -> None:
    """Row 2 starts at element 2^31: 8 GiB, of which little is touched."""
    rows, dim, stride = 3, 512, 2**30
    x = torch.empty(2 * stride + dim, dtype=F32, device="cuda")
    values = torch.randn(rows, dim, device="cuda")
    for row in range(rows):
        x[row * stride : row * stride + dim] = values[row]
    weight = torch.ones(dim, device="cuda")
    y = Output(rows, dim, 0, BF16)
    call(
        SPECS["rms_norm.512"], num_tokens=rows, count=NUM_TOKENS, x=x, weight=weight, y=y.whole, dim=dim,
        eps=EPS, x_stride=stride, y_stride=dim,
    )  # fmt: skip
    assert_bf16_close(y.live(), REFERENCES["rms_norm"](values.double(), weight.double(), EPS))
    gathered = Output(2, dim, 0, F32)
    call(
        SPECS["gather_rows.f32"], num_tokens=rows, num_logits=2, count=NUM_LOGITS, x=x, y=gathered.whole,
        rows=torch.tensor([2, 1], dtype=torch.int32, device="cuda"), dim=dim, x_stride=stride, y_stride=dim,
        item_bytes=4,
    )  # fmt: skip
    assert gathered.live().equal(values[[2, 1]])
