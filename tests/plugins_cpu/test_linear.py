"""linear.* and linear_q8.*: y = x . weight^T + bias against float64 on the weights gguf dequantizes."""

import numpy as np
import pytest
from kernel_caller import NUM_LOGITS, NUM_TOKENS, call
from quantized_weights import (
    dequantize,
    dequantize_q8,
    quantize_q8,
    random_rows,
    set_codes,
    set_halves,
    sum_q8,
)

from castiron.models.schemes import DENSE_SCHEMES, SCHEMES, schemes_for
from castiron.plugins_cpu.layouts import pack
from castiron.runtime.devices import kernel_library

LEVELS = [level for level in kernel_library.LEVELS if kernel_library.supports(level)]
KERNELS = [f"linear.{s}" for s in schemes_for("cpu")] + [
    f"linear_q8.{s}" for s in schemes_for("cpu", quantized=True)
]
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 65)
TOLERANCE = 2e-6  # of sum |x| |w|: f32 rounding of a few thousand additions

pytestmark = pytest.mark.parametrize("level", LEVELS)


class Case:
    """A kernel, a random weight [n, k] and activations [rows, k]."""

    def __init__(self, kernel: str, n: int, k: int, num_rows: int, seed: int = 0, bias: bool = True) -> None:
        self.kernel, self.n, self.k = kernel, n, k
        self.op, self.scheme = kernel.split(".")
        rng = np.random.default_rng(seed)
        self.rows = random_rows(self.scheme, n, k, rng)
        self.x = rng.standard_normal((num_rows, k), dtype=np.float32)
        self.bias = rng.standard_normal(n, dtype=np.float32) if bias else None
        self.q: np.ndarray | None = None  # digits int8 [rows, 2, k] to use instead of the quantized x

    def quantized(self, live: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, scale and sum of the first rows."""
        if self.q is None:
            return quantize_q8(self.x[:live])
        scale = np.full((live, self.k // 32), 1e-4, np.float32)
        return self.q[:live], scale, sum_q8(self.q[:live], scale)

    def run(
        self, level: str, live: int | None = None, threads: int = 2, count: int = NUM_TOKENS
    ) -> np.ndarray:
        """y [live, n]; checks that the activations' padding isn't used and nothing beyond y is written."""
        live = len(self.x) if live is None else live
        y = np.full((live + 2, self.n + 5), np.nan, np.float32)
        poison = y.copy()
        fields = {
            "weight": pack(self.scheme, self.rows, self.k),
            "bias": self.bias,
            "y": y,
            "y_stride": self.n + 5,
        }
        if self.op == "linear":
            x = np.full((live + 1, self.k + 3), np.nan, np.float32)
            x[:live, : self.k] = self.x[:live]
            fields |= {"x": x, "x_stride": self.k + 3}
        else:
            q, scale, sums = self.quantized(live)
            poisoned = np.full((1, self.k), np.nan, np.float32)
            fields |= {
                "q": np.concatenate([q, np.full((1, 2, self.k), 127, np.int8)]),
                "scale": np.concatenate([scale, poisoned[:, : self.k // 32]]),
                "sum": np.concatenate([sums, poisoned[:, : self.k // 16]]),
            }
        counts = {"num_tokens": live} if count == NUM_TOKENS else {"num_logits": live}
        call(self.kernel, level=level, threads=threads, count=count, n=self.n, k=self.k, **counts, **fields)
        assert np.isnan(y[live:]).all() and np.isnan(y[:, self.n :]).all()
        np.testing.assert_array_equal(y[live:].view(np.uint32), poison[live:].view(np.uint32))
        return y[:live, : self.n].copy()

    def check(self, y: np.ndarray) -> None:
        """Compare with float64 on the same activations."""
        x = self.x[: len(y)].astype(np.float64)
        if self.op == "linear_q8":
            q, scale, _ = self.quantized(len(y))
            x = dequantize_q8(q, scale)
        weight = dequantize(self.scheme, self.rows).astype(np.float64)
        bias = 0.0 if self.bias is None else self.bias.astype(np.float64)
        largest_code = 1 << SCHEMES[self.scheme].bits if self.op == "linear_q8" else 1
        bound = TOLERANCE * (
            np.abs(x) @ (np.abs(weight).T + np.abs(weight).max() / largest_code) + np.abs(bias) + 1e-6
        )
        error = np.abs(y - (x @ weight.T + bias))
        assert (error <= bound).all(), (
            f"{self.kernel} [{self.n}, {self.k}]: {np.nanmax(error / bound)} x the bound"
        )


def ks_of(scheme: str) -> tuple[int, ...]:
    block = SCHEMES[scheme].block_size
    return {1: (1, 3, 31, 64, 577), 32: (32, 64, 96, 576, 1536), 256: (256, 512, 768, 1536)}[block]


@pytest.mark.parametrize("kernel", KERNELS)
def test_odd_shapes_match_the_reference(kernel: str, level: str) -> None:
    poison_scratch(level)
    for i, n in enumerate((1, 15, 16, 17, 100, 576)):
        ks = ks_of(kernel.split(".")[1])
        for j in range(3):
            num_rows = ROW_COUNTS[(3 * i + j) % len(ROW_COUNTS)]
            case = Case(kernel, n, ks[(i + j) % len(ks)], num_rows, seed=i, bias=(i + j) % 2 == 0)
            case.check(case.run(level, threads=1 + j))


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_do_not_depend_on_rows_or_threads(kernel: str, level: str) -> None:
    case = Case(kernel, 100, ks_of(kernel.split(".")[1])[2], 65)
    alone = np.concatenate([single_row(case, row).run(level, threads=1) for row in range(65)])
    for live, threads in (
        (65, 1),
        (65, 2),
        (65, 3),
        (33, 2),
        (17, 3),
        (16, 1),
        (8, 2),
        (7, 2),
        (3, 3),
        (2, 1),
    ):
        np.testing.assert_array_equal(
            case.run(level, live, threads).view(np.uint32), alone[:live].view(np.uint32)
        )


def single_row(case: Case, row: int) -> Case:
    result = object.__new__(Case)
    result.__dict__.update(case.__dict__, x=case.x[row : row + 1])
    return result


@pytest.mark.parametrize(
    "kernel",
    ["linear.f32", "linear.bf16", "linear.q4_k", "linear_q8.q4_1", "linear_q8.q6_k", "linear_q8.q8_0"],
)
def test_k_beyond_one_piece_and_rows_beyond_one_block_match(kernel: str, level: str) -> None:
    case = Case(kernel, 18, 4096 + 512, 130)
    y = case.run(level)
    case.check(y)
    np.testing.assert_array_equal(single_row(case, 129).run(level)[0], y[129])


@pytest.mark.parametrize("scheme", schemes_for("cpu", quantized=True))
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x7F])
def test_extreme_codes_and_activations_do_not_saturate(scheme: str, byte: int, level: str) -> None:
    case = Case(f"linear_q8.{scheme}", 17, 512, 19)
    set_codes(scheme, case.rows, byte)
    signs = np.where(np.arange(19)[:, None] % 2, 1, -1) * np.ones(512, np.int8)
    signs[2] = np.where(np.arange(512) % 2, 1, -1)
    case.q = np.stack([127 * signs, 127 * signs], axis=1).astype(np.int8)
    case.check(case.run(level))
    case.check(case.run(level, live=3))
    case.q[:, 1] *= -1
    case.check(case.run(level))


@pytest.mark.parametrize("scheme", schemes_for("cpu", quantized=True))
def test_zero_scales_and_zero_activations_give_the_bias(scheme: str, level: str) -> None:
    for op in ("linear", "linear_q8"):
        case = Case(f"{op}.{scheme}", 17, 256, 9)
        case.x[4] = 0.0
        np.testing.assert_array_equal(case.run(level)[4], case.bias)
        set_halves(scheme, case.rows, 0, 0.0)
        if SCHEMES[scheme].has_minimum:
            set_halves(scheme, case.rows, 1, 0.0)
        np.testing.assert_array_equal(case.run(level), np.broadcast_to(case.bias, (9, 17)))


@pytest.mark.parametrize("kernel", ["linear.f32", "linear.f16", "linear.q5_1", "linear_q8.q4_0"])
def test_rows_follow_the_live_count_the_kernel_names(kernel: str, level: str) -> None:
    case = Case(kernel, 20, 64, 12)
    case.check(case.run(level, live=5, count=NUM_LOGITS))
    assert case.run(level, live=0).shape == (0, 20)


@pytest.mark.parametrize("scheme", DENSE_SCHEMES)
def test_subnormal_and_large_dense_weights_are_exact(scheme: str, level: str) -> None:
    case = Case(f"linear.{scheme}", 16, 16, 16, bias=False)
    bits = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}[scheme]
    values = np.array([0x0001, 0x03FF, 0x0400, 0x7BFF, 0x8001, 0xFBFF, 0x3C00, 0x8000], np.uint64)
    case.rows = np.resize(values if scheme != "f32" else values << 16, (16, 16)).astype(bits).view(np.uint8)
    case.x = np.eye(16, dtype=np.float32)
    np.testing.assert_array_equal(case.run(level), dequantize(scheme, case.rows).T)


def poison_scratch(level: str) -> None:
    """Leave NaN where the kernels expand weights."""
    for threads in (1, 2, 3):
        for op in ("linear", "linear_q8"):
            case = Case(f"{op}.q8_0", 48, 4096, 16, bias=False)
            set_halves("q8_0", case.rows, 0, np.nan)
            assert np.isnan(case.run(level, threads=threads)).all()
