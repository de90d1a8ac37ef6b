"""linear_fp8 (kernels/linear_few.cu and linear_many.cu with fp8 weights) against float64 sums of the same codes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cuda_kernel_caller import NUM_LOGITS, NUM_TOKENS, TARGET, call, poisoned

from castiron.models.fp8_ops import DTYPE, quantize_fp8
from castiron.plugins_cuda import linear_few_specs, linear_many_specs
from castiron.plugins_cuda.compile import compile_cubin
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.plugins_cuda.layouts import pack

pytestmark = pytest.mark.gpu

SPECS = {
    spec.name: spec for spec in (*linear_few_specs.SPECS, *linear_many_specs.SPECS) if spec.op == "linear_fp8"
}
# live tokens, capacity, n, k: tails of every tile size; k a multiple of 16 but not of a tile's 128
SHAPES = (
    (1, 1, 4, 1040),
    (5, 16, 72, 1536),
    (8, 8, 200, 2064),
    (13, 16, 264, 1104),
    (33, 48, 130, 1296),
    (64, 64, 64, 2048),
    (129, 200, 200, 1168),
    (300, 513, 520, 1040),
)
STRUCTURES = (
    "linear_few.fp8.8",
    "linear_few.fp8.16.s3",
    "linear_many.fp8.128x32.s2",
    "linear_many.fp8.256x128",
)
BF16_ROUNDING = 2.0**-8
ACCUMULATION = 2.0**-11  # of sum |x| |w|: sm_90 adds products of float8 with 13 bits or so behind the largest


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All cubins at once: one after another they'd take minutes."""
    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(compile_cubin, s.source, s.defines, TARGET) for s in SPECS.values()]:
            done.result()


@dataclass
class Case:
    """Inputs of a launch, on the GPU."""

    live: int
    q: torch.Tensor  # e4m3 bytes [capacity, k], poison beyond `live`
    scale: torch.Tensor  # f32 [capacity]
    packed: torch.Tensor
    codes: torch.Tensor  # f64 [n, k]
    row_scale: torch.Tensor  # f64 [n]
    bias: torch.Tensor | None

    @staticmethod
    def of(
        live: int, capacity: int, x: torch.Tensor, rows: np.ndarray, bias: torch.Tensor | None, pad: int
    ) -> "Case":
        """x f32 [live, k]; rows: of the weight, as stored. `pad`: bytes between rows of q."""
        k = x.shape[1]
        q = poisoned(capacity, k + pad, dtype=torch.uint8)[:, :k]
        scale = poisoned(capacity, dtype=torch.float32)
        quantized, scales = quantize_fp8(x, 0.0)
        q[:live], scale[:live] = quantized.view(torch.uint8).cuda(), scales.cuda()
        codes = torch.from_numpy(rows[:, 4:].copy()).view(DTYPE).double().cuda()
        row_scale = torch.from_numpy(rows[:, :4].copy().view(np.float32)[:, 0]).double().cuda()
        return Case(live, q, scale, torch.from_numpy(pack("fp8", rows, k)).cuda(), codes, row_scale, bias)

    @staticmethod
    def random(
        live: int, capacity: int, n: int, k: int, seed: int = 0, bias: bool = True, pad: int = 0
    ) -> "Case":
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(n, k, generator=generator)
        scale = weight.abs().amax(1) / 448 * (1 + torch.rand(n, generator=generator))
        codes = (weight / scale[:, None]).to(DTYPE).view(torch.uint8).numpy()
        rows = np.concatenate([scale.numpy()[:, None].view(np.uint8), codes], axis=1)
        x = torch.randn(live, k, generator=generator) * (1 + torch.arange(live)[:, None])
        return Case.of(
            live, capacity, x, rows, torch.randn(n, generator=generator).cuda() if bias else None, pad
        )

    def run(
        self, spec: CudaKernelSpec, pad: int = 8, late: tuple[str, ...] = (), count: int = NUM_TOKENS
    ) -> torch.Tensor:
        """y [live, n]; checks that nothing else of its memory was written. `pad`: elements between rows of y."""
        n, k = self.codes.shape
        dtype = torch.float32 if spec.operands["out0"] == "f32" else torch.bfloat16
        capacity = len(self.q)
        y = poisoned(capacity + 1, n + pad, dtype=dtype)
        capacities = {"max_tokens": capacity, "max_logits": capacity, "max_seqs": capacity}
        counts = {"num_tokens": self.live} if count == NUM_TOKENS else {"num_logits": self.live}
        strides = {"x_stride": self.q.stride(0)} if spec.source == "linear_few.cu" else {}
        call(
            spec, capacities=capacities, late=late, **counts, x=self.q, x_scale=self.scale, weight=self.packed,
            bias=self.bias, y=y, y_stride=n + pad, count=count, n=n, k=k, **strides,
        )  # fmt: skip
        bits = y.view(torch.int32 if dtype == torch.float32 else torch.int16)
        assert (bits[self.live :] == -1).all(), "wrote rows beyond the live ones"
        assert (bits[:, n:] == -1).all(), "wrote columns beyond n"
        return y[: self.live, :n]

    def check(self, y: torch.Tensor) -> None:
        x = self.q[: self.live].view(DTYPE).double() * self.scale[: self.live, None].double()
        weight = self.codes * self.row_scale[:, None]
        expected = x @ weight.T + (0 if self.bias is None else self.bias.double())
        bound = ACCUMULATION * (x.abs() @ weight.abs().T)
        if y.dtype == torch.bfloat16:
            bound += expected.abs() * BF16_ROUNDING
        error = (y.double() - expected).abs()
        assert not torch.isnan(error).any(), f"{int(torch.isnan(error).sum())} NaN of {error.numel()}"
        assert (error <= bound).all(), f"{float((error / bound).max())} x the bound"
        if error.numel() >= 100:
            assert float(error.norm() / expected.norm()) < 5e-3


def shapes_of(spec: CudaKernelSpec) -> list[tuple[int, int, int, int]]:
    return [s for s in SHAPES if not spec.why_not({"rows": s[1], "n": s[2], "k": s[3]})]


@pytest.mark.parametrize("name", SPECS)
def test_ragged_shapes_match_the_reference(name: str) -> None:
    spec = SPECS[name]
    assert shapes_of(spec)
    for i, (live, capacity, n, k) in enumerate(shapes_of(spec)):
        case = Case.random(live, capacity, n, k, seed=i, bias=i % 2 == 0, pad=16 * (i % 3))
        case.check(case.run(spec, pad=(8, 0, 3)[i % 3]))


@pytest.mark.sanitize
@pytest.mark.parametrize("name", STRUCTURES)
def test_small_integers_are_exact(name: str) -> None:
    """Any element taken from a wrong place shows."""
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(1)
    live = 6
    x = torch.randint(-1, 2, (live, 528), generator=generator).float()
    x[:, 0] = 448  # scales of 1
    codes = torch.randint(-1, 2, (136, 528), generator=generator).float()
    codes[:, 0] = 0
    ones = np.ones((136, 1), np.float32).view(np.uint8)
    rows = np.concatenate([ones, codes.to(DTYPE).view(torch.uint8).numpy()], axis=1)
    case = Case.of(live, 8, x, rows, None, 0)
    expected = (x.double() @ codes.double().T).cuda()
    y = case.run(spec)
    assert torch.equal(y, expected.to(y.dtype))


@pytest.mark.parametrize("name", STRUCTURES)
def test_inputs_written_late_are_waited_for_and_runs_repeat_bit_for_bit(name: str) -> None:
    spec = SPECS[name]
    case = Case.random(7, 8, 200, 1552, seed=4)
    first = case.run(spec, late=("x", "x_scale"))
    case.check(first)
    assert torch.equal(case.run(spec), first)


@pytest.mark.parametrize("split", [1, 2, 4, 6])
def test_tilings_of_one_order_give_a_token_the_same_bits(split: int) -> None:
    specs = [spec for spec in SPECS.values() if spec.row_order == f"linear_many.s{split}"]
    specs = [spec for spec in specs if spec.operands["out0"] == "bf16"]
    case = Case.random(290, 400, 456, 1792, seed=11)
    expected = case.run(specs[0])
    case.check(expected)
    assert len(specs) >= 2
    for live in (290, 17, 1):
        case.live = live
        for spec in specs:
            assert torch.equal(case.run(spec), expected[:live]), (spec.name, live)


@pytest.mark.parametrize("name", STRUCTURES)
def test_no_live_rows_write_nothing(name: str) -> None:
    Case.random(0, 8, 200, 1552).run(SPECS[name])


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_count_may_be_of_logits_and_nan_stays_in_its_row(name: str) -> None:
    case = Case.random(6, 8, 136, 1552, seed=5)
    case.q[2, 17] = 0x7F
    y = case.run(SPECS[name], count=NUM_LOGITS)
    assert torch.isnan(y[2]).all()
    assert torch.isfinite(y[[0, 1, 3, 4, 5]]).all()


@pytest.mark.parametrize("pad", [1, 4])
def test_rows_of_x_need_no_alignment_for_few_tokens(pad: int) -> None:
    case = Case.random(5, 8, 72, 1040, pad=pad)
    case.check(case.run(SPECS["linear_few.fp8.8"]))
