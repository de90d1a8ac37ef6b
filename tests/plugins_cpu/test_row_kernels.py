"""Norms, quantization and element-wise kernels against numpy, on strided and poisoned matrices."""

from collections.abc import Callable

import numpy as np
import pytest
from kernel_caller import LEVELS, NUM_LOGITS, NUM_TOKENS, call

EPS = 1e-5
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 576), (7, 300), (1, 1536)]
Q8_SHAPES = [(1, 32), (5, 64), (2, 576), (3, 1536)]


def strided(values: np.ndarray, extra: int) -> np.ndarray:
    """`values` at the left of a wider matrix with spare rows; all else is NaN."""
    rows, dim = values.shape
    matrix = np.full((rows + 2, dim + extra), np.nan, np.float32)
    matrix[:rows, :dim] = values
    return matrix


def normal(seed: int, rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def silu(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / (1 + np.exp(-x))


LARGEST_Q = 127 * 256  # of the integer 256 * high + low


def integers(q: np.ndarray) -> np.ndarray:
    """The integers [rows, dim] that the two int8 digits q [rows, 2, dim] stand for."""
    return 256 * q[:, 0].astype(np.int32) + q[:, 1]


def quantize_q8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers, scale, sum of float32 rows, in float32 arithmetic as the op is defined."""
    groups = x.astype(np.float32).reshape(len(x), -1, 32)
    amax = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, np.float32(LARGEST_Q) / amax, np.float32(0)).astype(np.float32)
    q = np.rint(groups * inverse).astype(np.int32)
    q += (q + 128) % 256 == 0  # the low digit is never -128
    scale = amax / np.float32(LARGEST_Q)
    total = q.reshape(len(x), -1, 2, 16).sum(-1).astype(np.float32) * scale
    return q.reshape(x.shape), scale[..., 0], total.reshape(len(x), -1)


class Quantized:
    """Outputs of a *_q8 kernel with a spare row each."""

    def __init__(self, rows: int, dim: int) -> None:
        self.rows = rows
        self.q = np.full((rows + 1, 2, dim), 99, np.int8)
        self.scale = np.full((rows + 1, dim // 32), 99, np.float32)
        self.sum = np.full((rows + 1, dim // 16), 99, np.float32)

    def fields(self) -> dict[str, object]:
        return {"q": self.q, "scale": self.scale, "sum": self.sum}

    def check(self, exact: np.ndarray) -> None:
        """Values lie within half a step of the exact ones (one and a half where the low digit was -128)
        and float noise of the largest; sums belong to q."""
        live = slice(0, self.rows)
        for array in (self.q, self.scale, self.sum):
            assert (array[self.rows] == 99).all(), "wrote beyond the live rows"
        q = integers(self.q[live])
        step = np.repeat(self.scale[live], 32, axis=1).astype(np.float64)
        allowed = np.where(self.q[live, 1] == -127, 1.5, 0.5) + LARGEST_Q * 2e-6
        assert (np.abs(q * step - exact) <= step * allowed + 1e-12).all()
        amax = np.abs(exact).reshape(self.rows, -1, 32).max(-1)
        np.testing.assert_allclose(self.scale[live], amax / LARGEST_Q, rtol=3e-6, atol=1e-12)
        sums = q.reshape(self.rows, -1, 2, 16).sum(-1).astype(np.float32) * self.scale[live][..., None]
        np.testing.assert_array_equal(self.sum[live], sums.reshape(self.rows, -1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, int], level: str) -> None:
    rows, dim = shape
    x, weight = normal(1, rows, dim) * 3, normal(2, 1, dim)[0]
    for threads in (1, 2, 3):
        y = np.full((rows + 1, dim + 4), 5, np.float32)
        call("rms_norm", level=level, threads=threads, num_tokens=rows, x=strided(x, 3), weight=weight, y=y,
             x_stride=dim + 3, y_stride=dim + 4, count=NUM_TOKENS, dim=dim, eps=EPS)  # fmt: skip
        np.testing.assert_allclose(y[:rows, :dim], rms_norm(x, weight), rtol=2e-6, atol=1e-6)
        assert (y[rows] == 5).all() and (y[:, dim:] == 5).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("alias", ["none", "x", "residual"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_may_write_its_sum_over_an_input(shape: tuple[int, int], alias: str, level: str) -> None:
    rows, dim = shape
    x, residual, weight = normal(1, rows, dim), normal(2, rows, dim), normal(3, 1, dim)[0]
    for threads in (1, 3):
        inputs = {"x": strided(x, 2), "residual": strided(residual, 5)}
        sum_out = inputs.get(alias, np.full((rows + 2, dim + 1), np.nan, np.float32))
        y = np.full((rows, dim), np.nan, np.float32)
        call("add_rms_norm", level=level, threads=threads, num_tokens=rows, weight=weight, y=y,
             residual_out=sum_out, x_stride=dim + 2, residual_stride=dim + 5, y_stride=dim,
             residual_out_stride=sum_out.shape[1], count=NUM_TOKENS, dim=dim, eps=EPS, **inputs)  # fmt: skip
        np.testing.assert_array_equal(sum_out[:rows, :dim], x + residual)
        np.testing.assert_allclose(y, rms_norm(x + residual, weight), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", Q8_SHAPES, ids=str)
def test_norms_that_quantize(shape: tuple[int, int], level: str) -> None:
    rows, dim = shape
    x, residual, weight = normal(1, rows, dim), normal(2, rows, dim), normal(3, 1, dim)[0]
    common = {
        "level": level,
        "num_tokens": rows,
        "weight": weight,
        "count": NUM_TOKENS,
        "dim": dim,
        "eps": EPS,
    }
    for threads in (1, 2):
        plain = Quantized(rows, dim)
        call("rms_norm_q8", threads=threads, x=strided(x, 3), x_stride=dim + 3, **plain.fields(), **common)
        plain.check(rms_norm(x, weight))
        added = Quantized(rows, dim)
        sum_out = strided(residual, 2)
        call("add_rms_norm_q8", threads=threads, x=strided(x, 3), x_stride=dim + 3, residual=sum_out,
             residual_stride=dim + 2, residual_out=sum_out, residual_out_stride=dim + 2,
             **added.fields(), **common)  # fmt: skip
        added.check(rms_norm(x + residual, weight))
        np.testing.assert_array_equal(sum_out[:rows, :dim], x + residual)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", Q8_SHAPES, ids=str)
def test_quantize_q8_is_exactly_the_definition(shape: tuple[int, int], level: str) -> None:
    rows, dim = shape
    x = normal(1, rows, dim)
    x[0, :32] = 0
    x[-1, -32:] = np.repeat([LARGEST_Q, 0.5, 128, -128, 2.5, 3.5, -0.5, 384], 4)  # ties, low digit -128
    q, scale, total = quantize_q8(x)
    for threads in (1, 2, 3):
        result = Quantized(rows, dim)
        call("quantize_q8", level=level, threads=threads, num_tokens=rows, x=strided(x, 1), x_stride=dim + 1,
             count=NUM_TOKENS, dim=dim, **result.fields())  # fmt: skip
        np.testing.assert_array_equal(integers(result.q[:rows]), q)
        assert result.q[:rows].min() >= -127
        np.testing.assert_array_equal(result.scale[:rows], scale)
        np.testing.assert_array_equal(result.sum[:rows], total)
        assert (result.q[rows] == 99).all()


@pytest.mark.parametrize("level", LEVELS)
def test_values_too_small_for_a_scale_become_zero(level: str) -> None:
    x = np.full((1, 32), 1e-42, np.float32)
    result = Quantized(1, 32)
    call(
        "quantize_q8",
        level=level,
        num_tokens=1,
        x=x,
        x_stride=32,
        count=NUM_TOKENS,
        dim=32,
        **result.fields(),
    )
    assert (result.q[0] == 0).all() and (result.sum[0] == 0).all() and result.scale[0, 0] < 1e-40


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("name", "reference"),
    [("add", np.add), ("mul", np.multiply), ("silu_mul", lambda a, b: silu(a) * b)],
    ids=["add", "mul", "silu_mul"],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_binary_kernels(
    shape: tuple[int, int], name: str, reference: Callable[..., np.ndarray], level: str
) -> None:
    rows, dim = shape
    a, b = normal(1, rows, dim) * 4, normal(2, rows, dim)
    results = []
    for threads in (1, 2, 3):
        y = np.full((rows + 1, dim + 1), 5, np.float32)
        call(name, level=level, threads=threads, num_tokens=rows, a=strided(a, 2), b=strided(b, 3), y=y,
             a_stride=dim + 2, b_stride=dim + 3, y_stride=dim + 1, count=NUM_TOKENS, dim=dim)  # fmt: skip
        assert (y[rows] == 5).all() and (y[:, dim] == 5).all()
        results.append(y[:rows, :dim])
        np.testing.assert_array_equal(results[-1], results[0])
    np.testing.assert_allclose(results[0], reference(a, b), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_silu_over_the_whole_range(level: str) -> None:
    x = np.concatenate([np.linspace(-110, 110, 4001), [0, 1e30, -1e30, 1e-30, -1e-30, 88.7, -88.7, -87.4]])
    x = x.astype(np.float32)[None]
    y = np.empty_like(x)
    dim = x.shape[1]
    call("silu", level=level, threads=2, num_tokens=1, x=x, y=y, x_stride=dim, y_stride=dim, count=NUM_TOKENS,
         dim=dim)  # fmt: skip
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(y, silu(x), rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", Q8_SHAPES, ids=str)
def test_silu_mul_q8(shape: tuple[int, int], level: str) -> None:
    rows, dim = shape
    a, b = normal(1, rows, dim) * 3, normal(2, rows, dim)
    for threads in (1, 2, 3):
        result = Quantized(rows, dim)
        call("silu_mul_q8", level=level, threads=threads, num_tokens=rows, a=strided(a, 2), b=strided(b, 3),
             a_stride=dim + 2, b_stride=dim + 3, count=NUM_TOKENS, dim=dim, **result.fields())  # fmt: skip
        result.check(silu(a) * b)


@pytest.mark.parametrize("level", LEVELS)
def test_gather_rows_counts_logit_rows(level: str) -> None:
    x = strided(normal(1, 9, 301), 2)
    rows = np.array([8, 0, 3, 3, -99], np.int32)
    for threads in (1, 2, 3):
        y = np.full((5, 305), 5, np.float32)
        call("gather_rows", level=level, threads=threads, num_tokens=9, num_logits=4, x=x, rows=rows, y=y,
             x_stride=303, y_stride=305, count=NUM_LOGITS, dim=301)  # fmt: skip
        np.testing.assert_array_equal(y[:4, :301], x[[8, 0, 3, 3], :301])
        assert (y[4] == 5).all() and (y[:, 301:] == 5).all()


@pytest.mark.parametrize("level", LEVELS)
def test_rows_have_the_same_bits_alone_and_in_a_batch(level: str) -> None:
    """Row-stable equality: bit-equal."""
    rows, dim = 11, 300
    x, weight = normal(1, rows, dim), normal(2, 1, dim)[0]

    def norm(part: np.ndarray, threads: int) -> np.ndarray:
        y = np.empty_like(part)
        call("rms_norm", level=level, threads=threads, num_tokens=len(part), x=part, weight=weight, y=y,
             x_stride=dim, y_stride=dim, count=NUM_TOKENS, dim=dim, eps=EPS)  # fmt: skip
        return y

    together = norm(x, 3)
    for i in range(rows):
        np.testing.assert_array_equal(norm(x[i : i + 1].copy(), 1)[0], together[i])
