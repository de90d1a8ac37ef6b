"""linear_few.*: y = x . weight^T + bias against float64 on the same bf16 inputs and the checkpoint's weights."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from checkpoint_blocks import decode_rows, random_rows
from dense_tiles import pack_dense

from castiron.models.ops import REFERENCES
from castiron.models.schemes import SCHEMES
from castiron.plugins_cuda.compile import compile_cubin
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.plugins_cuda.layouts import PACKED_SCHEMES, pack, packed_bytes
from castiron.plugins_cuda.linear_few_specs import QUARTER_SPLITS, SPECS, SPLITS, TILINGS, TOKENS, Tiling

pytest.importorskip("cuda.bindings")
from cuda_kernel_caller import NUM_LOGITS, NUM_TOKENS, TARGET, call, poisoned

pytestmark = pytest.mark.gpu

BY_NAME = {spec.name: spec for spec in SPECS if spec.op == "linear"}
STRUCTURES = [
    *(f"linear_few.{scheme}.{tokens}" for scheme in ("bf16", "q4_1", "int4_g128z") for tokens in TOKENS),
    *(f"linear_few.{scheme}.8.quarter" for scheme in ("q4_1", "int4_g128z")),
]
ACCUMULATION = 5e-5  # of sum |x| |w|: tensor cores' f32 sums, of codes up to 50 times the weights
BF16_ROUNDING = 2.0**-8


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """All cubins at once: one after another they'd take minutes."""
    if "sanitize" in request.config.getoption("markexpr"):
        return  # a few launches: each compiles its own
    used = {
        (s.source, s.defines) for s in BY_NAME.values() if s.operands["out0"] == "f32" or s.name in STRUCTURES
    }
    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(compile_cubin, source, defines, TARGET) for source, defines in used]:
            done.result()


@dataclass
class Case:
    """Inputs of a launch, on the GPU."""

    live: int
    x: torch.Tensor  # bf16 [capacity, k], poison beyond `live`
    packed: torch.Tensor
    weight: torch.Tensor  # f32 [n, k]
    bias: torch.Tensor | None

    @staticmethod
    def random(
        scheme: str, live: int, capacity: int, n: int, k: int, seed: int = 0, bias: bool = True, pad: int = 0
    ) -> "Case":
        """`pad`: elements between rows of x."""
        rng = np.random.default_rng(seed)
        rows = random_rows(scheme, n, k, rng)
        x = poisoned(capacity, k + pad, dtype=torch.bfloat16)[:, :k]
        x[:live] = torch.from_numpy(rng.standard_normal((live, k), np.float32)).cuda().bfloat16()
        return Case(
            live=live,
            x=x,
            packed=torch.from_numpy(pack(scheme, rows, k)).cuda(),
            weight=torch.from_numpy(decode_rows(scheme, rows)).cuda(),
            bias=torch.from_numpy(rng.standard_normal(n, np.float32)).cuda() if bias else None,
        )

    def run(
        self,
        spec: CudaKernelSpec,
        pad: int = 8,
        late: tuple[str, ...] = (),
        count: int = NUM_TOKENS,
    ) -> torch.Tensor:
        """y [live, n]; checks that nothing else of its memory was written. `pad`: elements between rows of y."""
        n, k = self.weight.shape
        dtype = torch.float32 if spec.operands["out0"] == "f32" else torch.bfloat16
        capacity = len(self.x)
        y = poisoned(capacity + 1, n + pad, dtype=dtype)
        capacities = {"max_tokens": capacity, "max_logits": capacity, "max_seqs": capacity}
        counts = {"num_tokens": self.live} if count == NUM_TOKENS else {"num_logits": self.live}
        call(
            spec, capacities=capacities, late=late, **counts, x=self.x, x_stride=self.x.stride(0),
            weight=self.packed, bias=self.bias, y=y, y_stride=n + pad, count=count, n=n, k=k,
        )  # fmt: skip
        bits = y.view(torch.int32 if dtype == torch.float32 else torch.int16)
        assert (bits[self.live :] == -1).all(), "wrote rows beyond the live ones"
        assert (bits[:, n:] == -1).all(), "wrote columns beyond n"
        return y[: self.live, :n]

    def check(self, spec: CudaKernelSpec, y: torch.Tensor) -> None:
        x, weight = self.x[: self.live].double(), self.weight.double()
        expected = REFERENCES["linear"](x, weight, None if self.bias is None else self.bias.double())
        bound = ACCUMULATION * (x.abs() @ weight.abs().T + 1)
        if y.dtype == torch.bfloat16:
            bound += expected.abs() * BF16_ROUNDING
        error = (y.double() - expected).abs()
        assert not torch.isnan(error).any(), f"{int(torch.isnan(error).sum())} NaN of {error.numel()}"
        assert (error <= bound).all(), (
            f"{float((error / bound).max())} x the bound, {int((error > bound).sum())} of {error.numel()}"
        )
        relative = float(error.norm() / expected.norm())
        if error.numel() < 100:
            return  # a few sums may cancel: their norm says nothing
        assert relative < (3e-5 if y.dtype == torch.float32 else 4e-3), relative


def tokens_of(name: str) -> int:
    """The most tokens a kernel takes."""
    return int(dict(BY_NAME[name].defines)["TOKENS"])


@pytest.mark.parametrize(
    ("tiling", "split"),
    [
        pytest.param(
            tiling, split, id=f"{tiling.scheme}.{tiling.tokens}{'.quarter' * tiling.quarter}.s{split}"
        )
        for tiling in TILINGS
        if tiling.scheme in PACKED_SCHEMES
        for split in (QUARTER_SPLITS if tiling.quarter else SPLITS)
    ],
)
def test_ragged_shapes_match_the_reference(tiling: Tiling, split: int) -> None:
    scheme, tokens, columns = tiling.scheme, tiling.tokens, tiling.columns
    name = f"linear_few.{scheme}.{tokens}" + ".quarter" * tiling.quarter
    spec = BY_NAME[name + (f".s{split}" if split > 1 else "") + ".f32"]
    block = max(32, SCHEMES[scheme].block_size)
    for i, (live, n, k) in enumerate(
        ((1, 1, split * columns), (tokens, 200, split * columns + block), (tokens - 3, 65, 3 * split * columns - block))
    ):  # fmt: skip
        if not spec.why_not({"rows": tokens, "n": n, "k": k}):
            case = Case.random(scheme, live, tokens, n, k, seed=i, bias=i != 1, pad=8 * i)
            case.check(spec, case.run(spec, pad=(8, 0, 3)[i]))


@pytest.mark.parametrize("name", STRUCTURES)
def test_many_stages_and_row_blocks_match_the_reference(name: str) -> None:
    tokens = tokens_of(name)
    for split in ("", ".s4"):
        spec = BY_NAME[name + split]
        for live, n, k in ((tokens, 576, 1536), (tokens // 2 + 1, 1000, 4096)):
            case = Case.random(spec.scheme, live, tokens, n, k, seed=live)
            case.check(spec, case.run(spec))


@pytest.mark.sanitize
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_smallest_launches_match_the_reference(name: str) -> None:
    tokens = tokens_of(name)
    for split in ("", ".s4"):
        spec = BY_NAME[name + split]
        k = next(k for k in range(256, 8192, 256) if not spec.why_not({"rows": tokens, "n": 65, "k": k}))
        case = Case.random(spec.scheme, tokens - 1, tokens, 65, k)
        case.check(spec, case.run(spec))


@pytest.mark.parametrize("name", [name for name in STRUCTURES if ".bf16." in name])
def test_small_integers_are_exact(name: str) -> None:
    """Sums of products of -3..3 are exact in f32: any element taken from a wrong place shows."""
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = tokens_of(name)
    for n, k in ((6144, 4096), (4096, 14336), (3000, 576)):
        x = torch.randint(-3, 4, (tokens, k), generator=generator, device="cuda").bfloat16()
        weight = torch.randint(-3, 4, (n, k), generator=generator, device="cuda").bfloat16()
        case = Case(tokens, x, pack_dense(weight), weight, None)
        expected = (x.double() @ weight.double().T).bfloat16()
        for split in ("", ".s2", ".s4"):
            assert torch.equal(case.run(BY_NAME[name + split]), expected)


@pytest.mark.parametrize("name", STRUCTURES)
def test_inputs_written_late_are_waited_for_and_runs_repeat_bit_for_bit(name: str) -> None:
    for split in ("", ".s4"):
        spec = BY_NAME[name + split]
        tokens = tokens_of(name)
        case = Case.random(spec.scheme, tokens - 1, tokens, 1160, 2048, seed=5)
        first = case.run(spec, late=("x",))
        case.check(spec, first)
        for _ in range(3):
            assert torch.equal(case.run(spec), first)


@pytest.mark.parametrize("name", STRUCTURES)
def test_results_of_a_token_do_not_depend_on_the_others(name: str) -> None:
    tokens = tokens_of(name)
    spec = BY_NAME[name + ".s2"]
    case = Case.random(spec.scheme, tokens, tokens, 200, 1536, seed=6)
    together = case.run(spec)
    for live in (1, tokens // 2 + 1):
        assert torch.equal(replace(case, live=live).run(spec), together[:live])
    case.x[1, 100], case.x[2, 5] = float("nan"), float("inf")
    y = case.run(spec)
    assert torch.isnan(y[1]).all() and not torch.isfinite(y[2]).any()
    others = [row for row in range(tokens) if row not in (1, 2)]
    assert torch.equal(y[others], together[others])


@pytest.mark.parametrize("pad", [1, 4])
def test_rows_of_x_need_no_alignment(pad: int) -> None:
    for name in ("linear_few.bf16.8", "linear_few.q4_1.16.s2", "linear_few.int4_g128.16"):
        spec = BY_NAME[name]
        case = Case.random(spec.scheme, 7, 8, 130, 640 if "g128" in name else 544, seed=9, pad=pad)
        case.check(spec, case.run(spec, pad=1))


@pytest.mark.parametrize("name", [*STRUCTURES, "linear_few.q4_1.8.s8"])
def test_no_live_rows_write_nothing(name: str) -> None:
    spec = BY_NAME[name]
    assert Case.random(spec.scheme, 0, 8, 200, 2048).run(spec).numel() == 0


def test_the_count_may_be_of_logits() -> None:
    for name in ("linear_few.bf16.8.f32", "linear_few.q4_1.16.f32"):
        case = Case.random(BY_NAME[name].scheme, 5, 8, 1000, 576, seed=7, bias=False)
        case.check(BY_NAME[name], case.run(BY_NAME[name], count=NUM_LOGITS))


@pytest.mark.parametrize("name", ["linear_few.bf16.8", "linear_few.q4_1.16", "linear_few.q4_0.16.s4"])
def test_more_than_2_31_weights_are_addressed(name: str) -> None:
    """All rows but the first and the last 64 are zeros."""
    spec = BY_NAME[name]
    n, k = 150_016, 14_400
    assert n * k > 2**31
    ends = Case.random(spec.scheme, 3, 8, 128, k, seed=8, bias=False)
    packed = torch.zeros(packed_bytes(spec.scheme, n, k), dtype=torch.uint8, device="cuda")
    half = len(ends.packed) // 2
    packed[:half], packed[-half:] = ends.packed[:half], ends.packed[half:]
    big = replace(ends, packed=packed, weight=ends.weight[:1].expand(n, k))  # only its shape is used
    y = big.run(spec)
    ends.check(spec, torch.cat([y[:, :64], y[:, -64:]], dim=1))
    assert not y[:, 64:-64].any()
