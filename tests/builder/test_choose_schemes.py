"""--quantize and --compute resolved: what is stored, and which arithmetic."""

import pytest

from castiron.builder.choose_schemes import choose_schemes, resolve_compute, stored_scheme
from castiron.builder.parameters import Parameter, Part
from castiron.builder.targets import resolve_target
from castiron.runtime.errors import InputError

CPU, H200 = resolve_target("cpu:generic"), resolve_target("sm_90")


@pytest.mark.parametrize(
    ("quantize", "stored", "expected"),
    [
        ("keep", ["f32"], "f32"),
        ("keep", ["bf16"], "bf16"),
        ("keep", ["f16", "f32"], "bf16"),
        ("keep", ["q4_1", "q8_0"], "int8"),
        ("keep", ["q4_k", "f32"], "int8"),
        ("none", ["q4_1"], "bf16"),
    ],
)
def test_auto_compute_follows_the_checkpoint(quantize: str, stored: list[str], expected: str) -> None:
    assert resolve_compute("auto", quantize, stored, CPU) == expected


@pytest.mark.parametrize(
    ("scheme", "quantize", "compute", "expected"),
    [
        ("q4_1", "keep", "int8", "q4_1"),
        ("q4_1", "keep", "f32", "q4_1"),
        ("q4_1", "none", "f32", "f32"),
        ("q4_1", "none", "bf16", "bf16"),
        ("f32", "keep", "bf16", "bf16"),
        ("f32", "keep", "int8", "f32"),
        ("f16", "none", "bf16", "f16"),
        ("bf16", "none", "f32", "bf16"),
    ],
)
def test_a_matrix_is_stored_as(scheme: str, quantize: str, compute: str, expected: str) -> None:
    assert stored_scheme(scheme, quantize, compute, CPU) == expected


@pytest.mark.parametrize(("quantize", "stored"), [("keep", ["bf16"]), ("none", ["q4_1"])])
def test_int8_without_kept_blocks_is_refused(quantize: str, stored: list[str]) -> None:
    with pytest.raises(InputError, match="--compute int8 needs weights kept quantized"):
        resolve_compute("int8", quantize, stored, CPU)


def test_vectors_are_stored_in_float32_whatever_the_checkpoint_says() -> None:
    parameters = {
        "norm": Parameter("norm", (8,), "f32", (Part("n", 0, 8),), "bf16"),
        "linear": Parameter("linear", (8, 8), "bf16", (Part("l", 0, 8),), "bf16"),
    }
    chosen, compute = choose_schemes(parameters, "keep", "auto", CPU)
    assert (chosen["norm"].scheme, chosen["linear"].scheme, compute) == ("f32", "bf16", "bf16")


def test_only_float32_compute_has_a_float32_cache() -> None:
    assert [CPU.cache_dtype(compute) for compute in ("f32", "bf16", "int8")] == ["f32", "f16", "f16"]


@pytest.mark.parametrize(
    ("scheme", "quantize", "expected"),
    [("f32", "keep", "bf16"), ("f16", "keep", "bf16"), ("q4_1", "keep", "q4_1"), ("q4_1", "none", "bf16")],
)
def test_a_gpu_stores_dense_weights_as_bfloat16(scheme: str, quantize: str, expected: str) -> None:
    assert resolve_compute("auto", quantize, [scheme], H200) == "bf16"
    assert stored_scheme(scheme, quantize, "bf16", H200) == expected


@pytest.mark.parametrize("compute", ["f32", "int8"])
def test_a_gpu_refuses_arithmetic_it_has_no_kernels_for(compute: str) -> None:
    with pytest.raises(InputError, match=f"--compute {compute} is not there on sm_90: use bf16 or auto"):
        resolve_compute(compute, "keep", ["q4_1"], H200)


def int4_matrices() -> dict[str, Parameter]:
    shapes = {"embedding.weight": 96, "lm_head.weight": 96, "a": 384, "b": 192, "c": 96, "d": 100}
    return {
        name: Parameter(name, (8, k), "bf16", (Part(name, 0, 8),), "f16") for name, k in shapes.items()
    } | {"kept": Parameter("kept", (8, 128), "q4_1", (Part("kept", 0, 8),), "q4_1")}


def test_int4_takes_the_largest_groups_that_fit_and_leaves_embeddings_and_blocks() -> None:
    chosen, compute = choose_schemes(int4_matrices(), "int4", "auto", H200)
    assert compute == "bf16"
    assert {name: parameter.scheme for name, parameter in chosen.items()} == {
        "embedding.weight": "bf16", "lm_head.weight": "bf16", "a": "int4_g128", "b": "int4_g64", "c": "int4_g32",
        "d": "bf16", "kept": "q4_1",
    }  # fmt: skip


def test_a_cpu_refuses_int4_and_says_what_to_do() -> None:
    with pytest.raises(
        InputError,
        match=r"^--quantize int4 has no kernels on cpu:generic: use .*--target sm_80 or .*sm_121a$",
    ):
        choose_schemes(int4_matrices(), "int4", "auto", CPU)
    packed = {"w": Parameter("w", (8, 128), "int4_g32z", (Part("w", 0, 8),), "int4_g32z")}
    with pytest.raises(
        InputError, match="weight w, stored as int4_g32z, has no kernels on cpu:generic: use --quant"
    ):
        choose_schemes(packed, "keep", "auto", CPU)
    chosen, _ = choose_schemes(packed, "none", "auto", CPU)
    assert chosen["w"].scheme == "bf16"
    assert choose_schemes(packed, "keep", "auto", H200)[0]["w"].scheme == "int4_g32z"


def test_fp8_takes_linears_of_whole_16_byte_rows_and_leaves_embeddings_and_blocks() -> None:
    chosen, compute = choose_schemes(int4_matrices(), "fp8", "auto", H200)
    assert compute == "bf16"
    assert {name: parameter.scheme for name, parameter in chosen.items()} == {
        "embedding.weight": "bf16", "lm_head.weight": "bf16", "a": "fp8", "b": "fp8", "c": "fp8", "d": "bf16",
        "kept": "q4_1",
    }  # fmt: skip
    with pytest.raises(
        InputError, match=r"^--quantize fp8 has no kernels on cpu:generic: use .*--target sm_90$"
    ):
        choose_schemes(int4_matrices(), "fp8", "auto", CPU)


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
@pytest.mark.parametrize("stored", ["q4_1", "int4_g128", "fp8"])
def test_rounding_what_is_quantized_already_is_refused(quantize: str, stored: str) -> None:
    kept = {"w": Parameter("w", (8, 128), stored, (Part("w", 0, 8),), stored)}
    with pytest.raises(
        InputError, match=f"this checkpoint has none that fit .its weights are {stored}.: use keep"
    ):
        choose_schemes(kept, quantize, "auto", H200)
    dense = kept | {"d": Parameter("d", (8, 128), "bf16", (Part("d", 0, 8),), "bf16")}
    chosen = choose_schemes(dense, quantize, "auto", H200)[0]
    assert chosen["w"].scheme == stored and chosen["d"].scheme.startswith(quantize)


def test_fp8_weights_whose_rows_no_kernel_reads_are_refused_early() -> None:
    odd = {"w": Parameter("w", (8, 100), "fp8", (Part("w", 0, 8),), "fp8")}
    with pytest.raises(
        InputError, match="weight w has 100 columns, kernels of fp8 need a multiple of 16: use --q"
    ):
        choose_schemes(odd, "keep", "auto", H200)
    assert choose_schemes(odd, "none", "auto", H200)[0]["w"].scheme == "bf16"
