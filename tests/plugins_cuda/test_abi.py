"""Every CUDA kernel's spec matches its parameter struct (abi.cuh, logits_abi.cuh) and source. No GPU is needed."""

import struct
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from castiron.models.kernel_spec import TYPE_CODES, KernelParameter
from castiron.plugins_cuda import row_specs, sampling_specs
from castiron.plugins_cuda.compile import ARCHITECTURES, FLAGS, FOLDER, compile_cubin, find_nvcc
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.plugins_cuda.specs import SPECS, by_name
from castiron.runtime.errors import WorkFailedError


def has_nvcc() -> bool:
    try:
        find_nvcc()
    except WorkFailedError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="there is no nvcc")


def packed_fields(parameters: tuple[KernelParameter, ...]) -> Iterator[tuple[KernelParameter, int, int]]:
    """Each parameter with its offset and size as the runtime packs it."""
    offset = 0
    for parameter in parameters:
        size = struct.calcsize("<" + TYPE_CODES[parameter.type])
        yield parameter, offset, size
        offset += size


@needs_nvcc
def test_specs_mirror_the_parameter_structs(tmp_path: Path) -> None:
    """Offsets and sizes of all fields, checked by the compiler that builds the kernels."""
    lines = ['#include "logits_abi.cuh"', "using namespace castiron;"]
    for spec in SPECS.values():
        end = 0
        for field, offset, size in packed_fields(spec.parameters):
            assert offset % min(size, 8) == 0, f"{spec.name}.{field.name} isn't aligned"
            name = f"{spec.params_struct}, {field.name}"
            lines.append(f'static_assert(offsetof({name}) == {offset}, "{spec.name}: {field.name}");')
            lines.append(
                f"static_assert(sizeof({spec.params_struct}::{field.name}) == {size}, "
                f'"{spec.name}: size of {field.name}");'
            )
            end = offset + size
        rounded = f"({end} + alignof({spec.params_struct}) - 1) / alignof({spec.params_struct})"
        lines.append(
            f"static_assert(sizeof({spec.params_struct}) == {rounded} * alignof({spec.params_struct}), "
            f'"{spec.name}: size");'
        )
    source = tmp_path / "offsets.cu"
    source.write_text("\n".join(["#include <stddef.h>", *lines]) + "\n")
    command = [
        find_nvcc(), f"-arch={ARCHITECTURES['sm_90']}", *FLAGS, "-I", str(FOLDER),
        "-o", str(tmp_path / "offsets.cubin"), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def builds(specs: Iterable[CudaKernelSpec]) -> dict[str, CudaKernelSpec]:
    """One of these specs for each cubin, by what it is built from."""
    unique: dict[str, CudaKernelSpec] = {}
    for spec in specs:
        unique.setdefault(f"{spec.source} {dict(spec.defines)}", spec)
    return unique


QUICK = builds((*row_specs.SPECS, *sampling_specs.SPECS))


@needs_nvcc
@pytest.mark.parametrize("build", QUICK.values(), ids=QUICK)
def test_cubins_compile_and_have_their_entries(build: CudaKernelSpec) -> None:
    cubin = compile_cubin(build.source, build.defines, "sm_90")
    assert cubin.startswith(b"\x7fELF")
    for spec in SPECS.values():
        if (spec.source, spec.defines) == (build.source, build.defines):
            assert f".text.{spec.entry}\0".encode() in cubin, spec.name


@needs_nvcc
@pytest.mark.long
def test_a_cubin_of_every_source_and_scheme_compiles_and_has_its_entry() -> None:
    """About a minute where the cache holds none of them. The variants beside these differ in sizes only."""
    firsts: dict[tuple[str, str], CudaKernelSpec] = {}
    for spec in SPECS.values():
        firsts.setdefault((spec.source, spec.scheme), spec)
    for build in firsts.values():
        test_cubins_compile_and_have_their_entries(build)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_specs_name_existing_sources_and_distinct_parameters(spec: CudaKernelSpec) -> None:
    source = FOLDER / "kernels" / spec.source
    text = " ".join(source.read_text().replace("castiron::", "").split())
    assert f"{spec.entry}(const __grid_constant__ {spec.params_struct} p)" in text, spec.source
    names = [p.name for p in spec.parameters]
    assert len(set(names)) == len(names)
    assert 0 < spec.threads <= 1024 and spec.threads % 32 == 0


def test_two_kernels_of_one_name_are_refused() -> None:
    spec = row_specs.SPECS[0]
    with pytest.raises(ValueError, match=rf"two CUDA kernels are called {spec.name}"):
        by_name([spec], [spec])


def sizes(rows: int, **others: int) -> dict[str, int]:
    return {"rows": rows, "num_sms": 132, **others}


@pytest.mark.parametrize(
    "dim,variant",
    [
        (64, "512"), (512, "512"), (576, "1024"), (1024, "1024"), (1032, "4096"), (4096, "4096"),
        (8192, "16384"), (16384, "16384"), (16392, "any"), (7, "any"), (4100, "any"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "rms_norm_fp8", "add_rms_norm_fp8"])
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_the_cheapest_norm_is_the_smallest_that_holds_the_row(
    op: str, dim: int, variant: str, rows: int
) -> None:
    given = sizes(rows, dim=dim)
    able = [s for s in SPECS.values() if s.op == op and not s.why_not(given)]
    assert min(able, key=lambda s: s.cost(given)).name == f"{op}.{variant}"


@pytest.mark.parametrize("spec", [*row_specs.SPECS, *sampling_specs.SPECS], ids=lambda spec: spec.name)
@pytest.mark.parametrize("rows", [1, 3, 64, 512, 8192])
def test_grids_are_valid_and_made_of_whole_clusters(spec: CudaKernelSpec, rows: int) -> None:
    given = sizes(rows, dim=4096, vocab=128256)
    x, y, z = spec.grid(given)
    assert x >= 1 and 1 <= y <= 65535 and z == 1
    assert x % spec.cluster[0] == 0 and y % spec.cluster[1] == 0
    assert spec.shared_bytes(given) <= 220 * 1024


def test_random_sampling_fits_its_largest_vocabulary_and_refuses_more() -> None:
    spec = SPECS["sample_random"]
    largest = sizes(1, vocab=sampling_specs.MAX_VOCAB)
    assert not spec.why_not(largest) and spec.shared_bytes(largest) <= 220 * 1024
    more = sizes(1, vocab=sampling_specs.MAX_VOCAB + 1)
    assert spec.why_not(more)
    alone = SPECS["sample_random.cta"]  # holds nothing of the row
    assert not alone.why_not(more) and alone.shared_bytes(more) == alone.shared_bytes(sizes(1, vocab=8))
