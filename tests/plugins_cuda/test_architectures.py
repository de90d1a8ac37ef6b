"""Which kernels a target's GPU runs, and that the ones for older GPUs leave sm_90's choices as they are."""

import itertools
from collections.abc import Iterable

import pytest
from cubin_elf import sm_number, static_shared_bytes

from castiron.builder.targets import resolve_target, target_names
from castiron.plugins_cuda.compile import ARCHITECTURES, compile_cubin
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Gpu, Sizes, why_not_on
from castiron.plugins_cuda.layouts import PACKED_SCHEMES
from castiron.plugins_cuda.linear_mma_specs import SPECS as LINEAR_MMA
from castiron.plugins_cuda.specs import SPECS

LEAST_SHARED_BYTES = 101376
OTHERS = ("sm_80", "sm_89", "sm_100a", "sm_120a", "sm_121a")
ATTENTION_SIZES = {"block_size": 64, "table_width": 128, "max_logits": 64}


def gpu_of(name: str) -> Gpu:
    target = resolve_target(name)
    return Gpu(ARCHITECTURES[name], target.num_sms, target.requirements["shared_bytes_per_block"])


def able(specs: Iterable[CudaKernelSpec], op: str, name: str, sizes: Sizes) -> list[CudaKernelSpec]:
    """Those of an op that can run at these sizes on a target."""
    gpu = gpu_of(name)
    given = {**sizes, "num_sms": gpu.num_sms}
    return [s for s in specs if s.op == op and not s.why_not(given) and not why_not_on(s, gpu, given)]


def is_portable(spec: CudaKernelSpec) -> bool:
    """Whether it is there for the GPUs that lack what the op's other kernels use."""
    return spec.source == "linear_mma.cu" or ".tiles." in spec.name or spec.name.endswith(".cta")


def test_refusals_name_both_architectures_or_both_sizes() -> None:
    sizes = {"n": 64, "k": 4096, "rows": 8, "num_sms": 108}
    assert why_not_on(SPECS["linear_few.bf16.8"], gpu_of("sm_80"), sizes) == "needs sm_90 or newer, not sm_80"
    many = SPECS["linear_many.bf16.256x128"]
    for name in OTHERS:
        assert f"of sm_90a only, not of {name}" in why_not_on(many, gpu_of(name), sizes)
    assert not why_not_on(many, gpu_of("sm_90"), sizes)
    decode = SPECS["paged_attention.bf16.decode.d128"]
    assert not why_not_on(decode, gpu_of("sm_80"), sizes)
    assert f"a block has {LEAST_SHARED_BYTES}" in why_not_on(decode, gpu_of("sm_120a"), sizes)


def test_all_cuda_targets_are_known_and_only_sm_90_has_run() -> None:
    assert set(target_names(("cuda",))) == {"sm_90", *OTHERS}
    assert resolve_target("sm_90").warnings == ()
    for name in OTHERS:
        target = resolve_target(name)
        capability = target.requirements["compute_capability"]
        assert f"sm_{capability[0]}{capability[1]}" == name.rstrip("a")
        assert target.requirements["num_sms"] == target.num_sms
        (warning,) = target.warnings
        assert name in warning and "compiled, not run" in warning and target.gpu in warning


@pytest.mark.parametrize("name", OTHERS)
def test_every_op_has_a_kernel_on_every_target(name: str) -> None:
    for scheme, dtype, rows in itertools.product(PACKED_SCHEMES, ("bf16", "f32"), (1, 64, 4096)):
        specs = [s for s in SPECS.values() if s.scheme == scheme and s.operands.get("out0") == dtype]
        assert able(specs, "linear", name, {"n": 4096, "k": 4096, "rows": rows}), (scheme, dtype, rows)
    for head_dim, tokens in itertools.product((16, 32, 64, 128, 256), (1, 2048)):
        sizes = {
            **ATTENTION_SIZES, "num_heads": 32, "kv_heads": 8, "head_dim": head_dim, "max_tokens": tokens,
            "max_seqs": 1, "max_query_len": tokens, "rows": tokens,
        }  # fmt: skip
        assert able(SPECS.values(), "paged_attention", name, sizes), (head_dim, tokens)
    for op in {s.op for s in SPECS.values()} - {"linear", "linear_fp8", "paged_attention"}:
        if op.endswith("_fp8") and name == "sm_80":  # has no float8; linears of it run on sm_90 alone
            assert not able(SPECS.values(), op, name, {"rows": 64, "dim": 4096})
            continue
        sizes = {
            "rows": 64,
            "dim": 4096,
            "vocab": 151_936,
            "half": 64,
            "num_heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
        }
        assert able(SPECS.values(), op, name, sizes), op


@pytest.mark.parametrize("scheme", PACKED_SCHEMES)
def test_linear_on_sm_90_is_never_the_portable_kernel_where_another_can(scheme: str) -> None:
    shapes = itertools.product(
        (64, 576, 4096, 28672), (512, 1536, 4096, 14336), (1, 8, 9, 16, 33, 64, 300, 8192)
    )
    for (n, k, rows), dtype in itertools.product(shapes, ("bf16", "f32")):
        sizes = {"n": n, "k": k, "rows": rows, "num_sms": 132}
        specs = [s for s in SPECS.values() if s.scheme == scheme and s.operands.get("out0") == dtype]
        cheapest = min(able(specs, "linear", "sm_90", sizes), key=lambda s: s.cost(sizes))
        assert not is_portable(cheapest), (cheapest.name, sizes)


def test_attention_on_sm_90_is_never_the_portable_kernel() -> None:
    batches = ((1, 1), (64, 64), (256, 256), (2048, 8), (8192, 256))
    for (tokens, seqs), head_dim, width in itertools.product(batches, (16, 32, 64, 128, 256), (1, 4, 128)):
        sizes = {
            **ATTENTION_SIZES, "num_heads": 32, "kv_heads": 8, "head_dim": head_dim, "max_tokens": tokens,
            "max_seqs": seqs, "max_query_len": tokens, "rows": tokens, "table_width": width, "num_sms": 132,
        }  # fmt: skip
        specs = able(SPECS.values(), "paged_attention", "sm_90", sizes)
        assert not is_portable(min(specs, key=lambda s: s.cost(sizes))), sizes


@pytest.mark.parametrize("op", ["sample_greedy", "sample_random", "sample_full"])
@pytest.mark.parametrize(("rows", "suffix"), [(1, ""), (16, ""), (128, ".cta"), (256, ".cta")])
def test_few_rows_are_sampled_by_clusters_and_many_by_ctas(op: str, rows: int, suffix: str) -> None:
    """As measured on an H200: configs/tuning/sm_90."""
    sizes = {"rows": rows, "vocab": 128_256, "num_sms": 132}
    specs = able(SPECS.values(), op, "sm_90", sizes)
    assert min(specs, key=lambda s: s.cost(sizes)).name == op + suffix


@pytest.mark.parametrize("spec", LINEAR_MMA, ids=lambda spec: spec.name)
def test_stages_of_linear_mma_fit_every_target_and_no_slot_is_overwritten_in_use(
    spec: CudaKernelSpec,
) -> None:
    assert spec.shared_bytes({}) <= LEAST_SHARED_BYTES
    defines = dict(spec.defines)
    stages = int(defines["STAGES"])
    assert stages >= 2
    unit_steps = {"q4_k": 4, "q5_k": 4, "q6_k": 4, "int4_g128": 2, "int4_g128z": 2}.get(spec.scheme, 1)
    slots = (stages - 2) // unit_steps + 2  # kWeightSlots
    holds: dict[int, int] = {}  # slot -> unit
    for step in range(stages - 1):
        holds[step // unit_steps % slots] = step // unit_steps
    for step in range(40):
        ahead = step + stages - 1
        if ahead % unit_steps == 0:
            holds[ahead // unit_steps % slots] = ahead // unit_steps
        assert holds[step // unit_steps % slots] == step // unit_steps


STATIC = (
    "paged_attention.bf16.tiles.d256", "sample_greedy", "sample_random.cta",
    pytest.param("paged_attention.bf16.mixed.d256", marks=pytest.mark.long),
    pytest.param("paged_attention.bf16.decode.d256", marks=pytest.mark.long),
)  # fmt: skip


@pytest.mark.parametrize("name", STATIC)
def test_specs_count_at_least_the_static_shared_memory_of_their_cubins(name: str) -> None:
    spec = SPECS[name]
    cubin = compile_cubin(spec.source, spec.defines, "sm_90")
    assert sm_number(cubin) == 90
    assert 0 < static_shared_bytes(cubin, spec.entry) <= spec.static_shared_bytes
