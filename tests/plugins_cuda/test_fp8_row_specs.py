"""Which row kernels with float8 output are chosen where, and that they compile for every architecture they name."""

import pytest

from castiron.builder.targets import resolve_target
from castiron.models.fp8_ops import LARGEST, SMALLEST_SCALE
from castiron.plugins_cuda.compile import ARCHITECTURES, FOLDER, compile_cubin, find_nvcc
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Gpu, why_not_on
from castiron.plugins_cuda.row_specs import SPECS
from castiron.runtime.errors import WorkFailedError

FP8 = [spec for spec in SPECS if spec.op.endswith("_fp8")]
OPS = ("quantize_fp8", "rms_norm_fp8", "add_rms_norm_fp8", "silu_mul_fp8")


def has_nvcc() -> bool:
    try:
        find_nvcc()
    except WorkFailedError:
        return False
    return True


def gpu_of(name: str) -> Gpu:
    target = resolve_target(name)
    return Gpu(ARCHITECTURES[name], target.num_sms, target.requirements["shared_bytes_per_block"])


def cheapest(op: str, rows: int, dim: int, target: str = "sm_90") -> str:
    gpu = gpu_of(target)
    sizes = {"rows": rows, "dim": dim, "num_sms": gpu.num_sms}
    able = [s for s in FP8 if s.op == op and not s.why_not(sizes) and not why_not_on(s, gpu, sizes)]
    return min(able, key=lambda s: s.cost(sizes)).name.partition(".")[2]


@pytest.mark.parametrize("op", OPS)
def test_all_give_codes_and_scales_and_need_sm_89(op: str) -> None:
    specs = [spec for spec in FP8 if spec.op == op]
    assert len(specs) >= 4
    sizes = {"rows": 8, "dim": 4096, "num_sms": 108}
    for spec in specs:
        assert (spec.operands["out0"], spec.operands["out1"]) == ("fp8", "f32")
        least = "sm_90" if spec.cluster != (1, 1, 1) else "sm_89"
        assert why_not_on(spec, gpu_of("sm_80"), sizes) == f"needs {least} or newer, not sm_80"
        assert not why_not_on(spec, gpu_of("sm_90"), sizes)
    for name in ("sm_89", "sm_100a", "sm_120a", "sm_121a"):
        assert any(not why_not_on(spec, gpu_of(name), sizes) for spec in specs), name


@pytest.mark.parametrize(
    "op,rows,dim,variant",
    [
        ("silu_mul_fp8", 1, 14336, "cluster"), ("silu_mul_fp8", 1, 1536, "4096"),
        ("silu_mul_fp8", 4096, 14336, "pair"), ("silu_mul_fp8", 4096, 4096, "4096"),
        ("silu_mul_fp8", 64, 28672, "cluster"), ("silu_mul_fp8", 8, 40000, "any"), ("silu_mul_fp8", 8, 7, "any"),
        ("quantize_fp8", 1, 4096, "4096"), ("quantize_fp8", 4096, 4096, "4096"), ("quantize_fp8", 1, 16384, "cluster"),
        ("quantize_fp8", 4096, 8192, "pair"), ("quantize_fp8", 4096, 4100, "any"),
    ],
)  # fmt: skip
def test_few_long_rows_are_clusters_and_many_short_ones_single_ctas(
    op: str, rows: int, dim: int, variant: str
) -> None:
    assert cheapest(op, rows, dim) == variant


@pytest.mark.parametrize("op", ["quantize_fp8", "silu_mul_fp8"])
def test_gpus_without_clusters_hold_long_rows_in_one_cta(op: str) -> None:
    assert cheapest(op, 1, 14336, "sm_89") == "16384"
    assert cheapest(op, 1, 32768, "sm_89") == "any"


@pytest.mark.parametrize("spec", FP8, ids=lambda spec: spec.name)
def test_costs_grow_with_rows(spec: CudaKernelSpec) -> None:
    costs = [spec.cost({"rows": rows, "dim": 4096, "num_sms": 132}) for rows in (1, 8, 64, 512, 4096)]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_constants_are_those_of_the_reference() -> None:
    text = (FOLDER / "kernels" / "fp8_row.cuh").read_text()
    assert f"kLargest = {LARGEST}f" in text and "kSmallestScale = 1e-12f" in text
    assert SMALLEST_SCALE == 1e-12


@pytest.mark.skipif(not has_nvcc(), reason="there is no nvcc")
@pytest.mark.parametrize("name", ["quantize_fp8.4096", "silu_mul_fp8.16384", "rms_norm_fp8.4096"])
def test_cubins_compile_for_sm_89(name: str) -> None:
    (spec,) = (spec for spec in FP8 if spec.name == name)
    cubin = compile_cubin(spec.source, spec.defines, "sm_89")
    assert f".text.{spec.entry}\0".encode() in cubin
