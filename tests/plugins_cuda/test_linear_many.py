"""linear_many.*, linear_mma.*: y = x . weight^T + bias against float64 on the same bf16 inputs and weights rounded
to bf16. The kernels for older GPUs run here as compiled for this one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from checkpoint_blocks import decode_rows, random_rows
from dense_tiles import pack_dense

from castiron.models.ops import REFERENCES
from castiron.plugins_cuda import linear_many_specs, linear_mma_specs
from castiron.plugins_cuda.compile import compile_cubin
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.plugins_cuda.layouts import PACKED_SCHEMES, pack, unit_columns

pytest.importorskip("cuda.bindings")
from cuda_kernel_caller import NUM_LOGITS, NUM_TOKENS, TARGET, call, poisoned

pytestmark = pytest.mark.gpu

BY_NAME = {spec.name.removeprefix("linear_many."): spec for spec in linear_many_specs.SPECS}
BY_NAME |= {spec.name.removeprefix("linear_"): spec for spec in linear_mma_specs.SPECS}  # "mma.bf16.64x16"
DENSE = [name for name, spec in BY_NAME.items() if spec.scheme == "bf16"]
QUANTIZED = [
    f"{scheme}.{tiling}"
    for scheme in PACKED_SCHEMES
    if scheme != "bf16"
    for tiling in ("128x256.m2.f32", "256x128", "128x32.s2", "256x64.s4")
]
QUANTIZED += [
    name for name, spec in BY_NAME.items() if name.startswith("mma.") and spec.scheme != "bf16"
]  # fmt: skip
# live tokens, capacity, n, k: tails of every tile size, single rows, several tiles per CTA's share
SHAPES = (
    (1, 1, 8, 8),
    (1, 128, 1, 512),
    (5, 64, 72, 64),
    (13, 16, 264, 328),
    (33, 48, 130, 712),
    (64, 64, 64, 1024),
    (129, 200, 200, 136),
    (128, 256, 576, 576),
    (300, 513, 520, 1032),
    (257, 600, 1001, 712),
)
BF16_ROUNDING = 2.0**-8
ACCUMULATION = 5e-6  # of sum |x| |w|: f32 sums of a few thousand products
WEIGHT_ROUNDING = 1e-4  # the same, where a weight's f32 value lies so near a tie that it rounds the other way


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """All cubins at once: one after another they'd take minutes."""
    if "sanitize" in request.config.getoption("markexpr"):
        return  # a few launches: each compiles its own
    with ThreadPoolExecutor(12) as pool:
        for name in (*DENSE, *QUANTIZED):
            spec = BY_NAME[name]
            pool.submit(compile_cubin, spec.source, spec.defines, TARGET)


@dataclass
class Case:
    """Inputs of a launch, on the GPU."""

    live: int
    x: torch.Tensor  # bf16 [capacity, k], poison beyond `live`
    packed: torch.Tensor
    weight: torch.Tensor  # f32 [n, k], rounded to bf16
    bias: torch.Tensor | None

    @staticmethod
    def random(
        scheme: str, live: int, capacity: int, n: int, k: int, seed: int = 0, bias: bool = True, pad: int = 0
    ) -> "Case":
        """`pad`: elements between rows of x, a multiple of 8."""
        rng = np.random.default_rng(seed)
        generator = torch.Generator("cuda").manual_seed(seed)
        rows = random_rows(scheme, n, k, rng)
        x = poisoned(capacity, k + pad, dtype=torch.bfloat16)[:, :k]
        x[:live] = torch.randn(live, k, generator=generator, device="cuda").bfloat16()
        return Case(
            live=live,
            x=x,
            packed=torch.from_numpy(pack(scheme, rows, k)).cuda(),
            weight=torch.from_numpy(decode_rows(scheme, rows)).cuda().bfloat16().float(),
            bias=torch.randn(n, generator=generator, device="cuda") if bias else None,
        )

    def run(
        self,
        spec: CudaKernelSpec,
        pad: int = 8,
        late: tuple[str, ...] = (),
        capacity: int = 0,
        count: int = NUM_TOKENS,
    ) -> torch.Tensor:
        """y [live, n]; checks that nothing else of its memory was written."""
        n, k = self.weight.shape
        dtype = torch.float32 if spec.operands["out0"] == "f32" else torch.bfloat16
        capacity = capacity or len(self.x)
        y = poisoned(capacity + 1, n + pad, dtype=dtype)
        capacities = {"max_tokens": capacity, "max_logits": capacity, "max_seqs": capacity}
        counts = {"num_tokens": self.live} if count == NUM_TOKENS else {"num_logits": self.live}
        strides = {"y_stride": n + pad}
        if spec.params_struct == "LinearParams":  # no tensor map
            strides["x_stride"] = self.x.stride(0)
        call(
            spec, capacities=capacities, late=late, **counts, x=self.x, weight=self.packed, bias=self.bias,
            y=y, count=count, n=n, k=k, **strides,
        )  # fmt: skip
        bits = y.view(torch.int32 if dtype == torch.float32 else torch.int16)
        assert (bits[self.live :] == -1).all(), "wrote rows beyond the live ones"
        assert (bits[:, n:] == -1).all(), "wrote columns beyond n"
        return y[: self.live, :n]

    def check(self, y: torch.Tensor, rounding: float = ACCUMULATION) -> None:
        x, weight = self.x[: self.live].double(), self.weight.double()
        bias = None if self.bias is None else self.bias.double()
        expected = REFERENCES["linear"](x, weight, bias)
        bound = rounding * (x.abs() @ weight.abs().T + 1) + expected.abs() * 2.0**-22
        if y.dtype == torch.bfloat16:
            bound += expected.abs() * BF16_ROUNDING
        error = (y.double() - expected).abs()
        assert not torch.isnan(error).any(), f"{int(torch.isnan(error).sum())} NaN of {error.numel()}"
        assert (error <= bound).all(), (
            f"{float((error / bound).max())} x the bound, {int((error > bound).sum())} of {error.numel()}"
        )
        relative = float(error.norm() / expected.norm())
        assert relative < (3e-3 if y.dtype == torch.bfloat16 else 20 * rounding), relative


def dense_shapes(spec: CudaKernelSpec) -> list[tuple[int, int, int, int]]:
    """SHAPES with a k that the kernel can split."""
    return [shape for shape in SHAPES if not spec.why_not({"n": shape[2], "k": shape[3]})]


@pytest.mark.parametrize("name", DENSE)
def test_dense_weights_match_the_reference(name: str) -> None:
    spec = BY_NAME[name]
    for i, (live, capacity, n, k) in enumerate(dense_shapes(spec)):
        case = Case.random("bf16", live, capacity, n, k, seed=i, bias=i % 2 == 0, pad=8 * (i % 3))
        case.check(case.run(spec, pad=(8, 0, 3)[i % 3]))


@pytest.mark.parametrize("name", DENSE)
def test_small_integers_are_exact(name: str) -> None:
    """Sums of products of -3..3 are exact in f32: any element taken from a wrong place shows."""
    spec = BY_NAME[name]
    generator = torch.Generator("cuda").manual_seed(1)
    for live, n, k in ((256, 512, 512), (300, 776, 1088), (64, 1280, 2048)):
        x = torch.randint(-3, 4, (live, k), generator=generator, device="cuda").bfloat16()
        weight = torch.randint(-3, 4, (n, k), generator=generator, device="cuda").bfloat16()
        case = Case(live, x, pack_dense(weight), weight.float(), None)
        expected = x.double() @ weight.double().T
        y = case.run(spec)
        assert torch.equal(y, expected.to(y.dtype))


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_match_the_reference(name: str) -> None:
    spec = BY_NAME[name]
    for i, (live, capacity, n, k) in enumerate(
        ((1, 1, 8, 1024), (129, 200, 200, 1280), (300, 513, 520, 1536))
    ):
        case = Case.random(spec.scheme, live, capacity, n, k, seed=i, bias=i % 2 == 0)
        case.check(case.run(spec, pad=(8, 3)[i % 2]), WEIGHT_ROUNDING)


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name.endswith((".256x128", ".128x128"))])
def test_odd_numbers_of_groups_match_the_reference(name: str) -> None:
    spec = BY_NAME[name]
    # half a tile of 64 columns, where groups allow it
    k = {256: 1792, 128: 1152}.get(unit_columns(spec.scheme), 1088 if "int4_g64" in name else 1120)
    case = Case.random(spec.scheme, 70, 70, 130, k, seed=3)
    case.check(case.run(spec), WEIGHT_ROUNDING)


STRUCTURES = (
    "bf16.128x256.m2", "bf16.256x128", "bf16.256x128.s4", "bf16.128x16.s3", "bf16.128x64", "q4_1.256x128",
    "q4_k.256x64.s4", "q4_1.128x32.s3", "int4_g128.256x64.s6", "bf16.128x64.m4", "int4_g128.256x32.s5",
    "mma.bf16.64x16", "mma.bf16.128x128", "mma.q4_1.64x64", "mma.q6_k.128x128", "mma.int4_g128.128x64",
)  # fmt: skip


@pytest.mark.sanitize
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_smallest_launches_match_the_reference(name: str) -> None:
    spec = BY_NAME[name]
    k = next(k for k in range(256, 8192, 256) if not spec.why_not({"n": 72, "k": k}))
    case = Case.random(spec.scheme, 70, 80, 72, k)
    case.check(case.run(spec), WEIGHT_ROUNDING)


@pytest.mark.parametrize("name", STRUCTURES)
def test_inputs_written_late_are_waited_for_and_runs_repeat_bit_for_bit(name: str) -> None:
    spec = BY_NAME[name]
    case = Case.random(spec.scheme, 290, 400, 1160, 1536, seed=5)
    first = case.run(spec, late=("x",))
    case.check(first, ACCUMULATION if spec.scheme == "bf16" else WEIGHT_ROUNDING)
    for _ in range(3):
        assert torch.equal(case.run(spec), first)


@pytest.mark.parametrize("name", STRUCTURES)
def test_results_of_a_token_do_not_depend_on_the_others(name: str) -> None:
    spec = BY_NAME[name]
    case = Case.random(spec.scheme, 290, 400, 200, 1536, seed=6)
    together = case.run(spec)
    case.live = 7
    assert torch.equal(case.run(spec), together[:7])


@pytest.mark.parametrize("scheme", ["bf16", "int4_g128", "q4_1", "q6_k"])
@pytest.mark.parametrize("split", [1, 2, 4, 6])
def test_tilings_of_one_order_give_a_token_the_same_bits(scheme: str, split: int) -> None:
    """What --batch-invariant relies on: CudaKernelSpec.order."""
    order = f"linear_many.s{split}"
    specs = [spec for spec in linear_many_specs.SPECS if spec.scheme == scheme and spec.row_order == order]
    specs = [spec for spec in specs if spec.operands["out0"] == "bf16"]
    case = Case.random(scheme, 290, 400, 456, 1792, seed=11)
    expected = case.run(specs[0])
    case.check(expected, ACCUMULATION if scheme == "bf16" else WEIGHT_ROUNDING)
    assert len(specs) >= 2
    for live in (290, 17, 1):
        case.live = live
        for spec in specs:
            assert torch.equal(case.run(spec), expected[:live]), (spec.name, live)


@pytest.mark.parametrize("name", STRUCTURES)
def test_no_live_rows_write_nothing(name: str) -> None:
    spec = BY_NAME[name]
    case = Case.random(spec.scheme, 0, 300, 200, 1536)
    assert case.run(spec).numel() == 0


@pytest.mark.parametrize("name", ["bf16.256x64.f32", "mma.bf16.64x64.f32"])
def test_the_count_may_be_of_logits(name: str) -> None:
    case = Case.random("bf16", 40, 64, 1000, 576, seed=7, bias=False)
    case.check(case.run(BY_NAME[name], count=NUM_LOGITS))


@pytest.mark.parametrize("name", ["mma.bf16.64x16", "mma.q4_1.128x64"])
def test_rows_that_are_not_aligned_to_16_bytes_match_the_reference(name: str) -> None:
    """A tensor map can't have these; linear_mma copies them element by element."""
    spec = BY_NAME[name]
    case = Case.random(spec.scheme, 70, 80, 200, 512, seed=9, pad=3)
    case.check(case.run(spec, pad=5), ACCUMULATION if spec.scheme == "bf16" else WEIGHT_ROUNDING)


@pytest.mark.parametrize("name", [*STRUCTURES[:3], "mma.bf16.64x16", "mma.bf16.128x128"])
def test_nan_and_infinity_stay_in_their_row(name: str) -> None:
    spec = BY_NAME[name]
    case = Case.random("bf16", 130, 130, 200, 512, seed=8)
    clean = case.run(spec)
    case.x[3, 100], case.x[77, 5] = float("nan"), float("inf")
    y = case.run(spec)
    assert torch.isnan(y[3]).all() and not torch.isfinite(y[77]).any()
    others = [row for row in range(130) if row not in (3, 77)]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize(("live", "n", "k"), [(2048, 6144, 4096), (1000, 4096, 14336), (4500, 1160, 520)])
def test_many_tiles_per_cta_are_exact(live: int, n: int, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randint(-3, 4, (live, k), generator=generator, device="cuda").bfloat16()
    weight = torch.randint(-3, 4, (n, k), generator=generator, device="cuda").bfloat16()
    expected = (x.double() @ weight.double().T).bfloat16()
    case = Case(live, x, pack_dense(weight), weight.float(), None)
    for name in ("bf16.128x256.m2", "bf16.128x128.m2", "bf16.256x128", "mma.bf16.64x64", "mma.bf16.128x128"):
        assert torch.equal(case.run(BY_NAME[name]), expected), name


@pytest.mark.long
@pytest.mark.parametrize("name", ["bf16.128x256.m2", "bf16.256x128.s4", "mma.bf16.128x128"])
@pytest.mark.parametrize(("live", "n", "k"), [(66000, 32776, 256), (200, 40000, 57344)])
def test_more_than_2_31_elements(name: str, live: int, n: int, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randint(-2, 3, (live, k), generator=generator, device="cuda").bfloat16()
    weight = torch.randint(-2, 3, (n, k), generator=generator, device="cuda", dtype=torch.int8).bfloat16()
    case = Case(live, x, pack_dense(weight), weight, None)
    y = case.run(BY_NAME[name])
    for rows in (slice(0, 100), slice(live - 100, live)):
        for columns in (slice(0, 200), slice(n - 200, n)):
            expected = (x[rows].double() @ weight[columns].double().T).bfloat16()
            assert torch.equal(y[rows, columns], expected)
