"""plan_check: no plan that reaches outside its memory gets past it."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from synthetic_engine import make_manifest, make_plan, write_synthetic_engine

from castiron.plugins_cpu.layouts import packed_bytes
from castiron.plugins_cpu.specs import SPECS
from castiron.runtime.errors import EngineFormatError, EngineTargetError
from castiron.runtime.kernel_bounds import BOUNDS, PANEL_ROWS, WEIGHT_BLOCKS
from castiron.runtime.manifest import WeightsFile
from castiron.runtime.plan_check import check_plan
from castiron.runtime.plan_format import MemoryClass, PlanArrays, PlanHeader

Edit = Callable[[PlanHeader, PlanArrays], PlanHeader | None]
MAX_U64 = (1 << 64) - 1


def writable_plan() -> tuple[PlanHeader, PlanArrays]:
    header, arrays = make_plan()
    copies = (arrays.records, arrays.params, arrays.relocations, arrays.dependencies)
    return header, PlanArrays(*(array.copy() for array in copies))


def check(edit: Edit) -> None:
    header, arrays = writable_plan()
    header = edit(header, arrays) or header
    manifest = make_manifest("generic", (WeightsFile("weights/model-00001.safetensors", 0, 1024, 0),))
    check_plan(header, arrays, manifest, "a.engine")


def set_record(field: str, value: int, index: int = 3) -> Edit:
    def edit(_: PlanHeader, arrays: PlanArrays) -> None:
        arrays.records[field][index] = value

    return edit


def set_relocation(field: str, value: int, memory_class: MemoryClass) -> Edit:
    """Change the first relocation into that class."""

    def edit(_: PlanHeader, arrays: PlanArrays) -> None:
        arrays.relocations[field][np.argmax(arrays.relocations["memory_class"] == memory_class)] = value

    return edit


def set_header(**values: object) -> Edit:
    return lambda header, _: msgspec.structs.replace(header, **values)


def set_plan(index: int, **values: object) -> Edit:
    def edit(header: PlanHeader, _: PlanArrays) -> PlanHeader:
        plans = list(header.plans)
        plans[index] = msgspec.structs.replace(plans[index], **values)
        return msgspec.structs.replace(header, plans=tuple(plans))

    return edit


def set_first(field: str, **values: object) -> Edit:
    """Change the first entry of one of the header's tables."""

    def edit(header: PlanHeader, _: PlanArrays) -> PlanHeader:
        first, *rest = getattr(header, field)
        return msgspec.structs.replace(header, **{field: (msgspec.structs.replace(first, **values), *rest)})

    return edit


def set_param(kernel: str, field: str, value: int) -> Edit:
    """Change a parameter of the first record of a kernel."""

    def edit(header: PlanHeader, arrays: PlanArrays) -> None:
        index = [known.name for known in header.kernels].index(kernel)
        start = int(arrays.records["params_offset"][np.argmax(arrays.records["kernel"] == index)])
        dtype = BOUNDS[kernel.partition(".")[0]].dtype
        block = arrays.params[start : start + dtype.itemsize].view(dtype)
        block[field] = value

    return edit


def test_the_synthetic_plan_passes() -> None:
    check(lambda header, arrays: None)


@pytest.mark.parametrize(
    "edit",
    [
        set_record("kind", 1),
        set_record("kind", 2),
        set_record("kind", 200),
        set_record("kernel", 7),
        set_record("kernel", 65535),
        set_record("params_bytes", 8),
        set_record("params_bytes", 0xFFFFFFFF),
        set_record("params_offset", MAX_U64),
        set_record("params_offset", MAX_U64 - 7),
        set_record("params_offset", 1 << 63),
        set_record("params_offset", 4),
        set_record("params_offset", 0),
        set_record("relocations_start", 0xFFFFFFFF),
        set_record("relocations_count", 0xFFFFFFFF),
        set_record("relocations_count", 0),
        set_record("dependencies_start", 0xFFFFFFFF),
        set_record("dependencies_count", 0xFFFFFFFF),
    ],
)
def test_records_out_of_range_are_refused(edit: Edit) -> None:
    with pytest.raises(EngineFormatError):
        check(edit)


@pytest.mark.parametrize(
    "memory_class", [MemoryClass.WEIGHTS, MemoryClass.ARENA, MemoryClass.CACHE, MemoryClass.STEP]
)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_offset", MAX_U64),
        ("target_offset", 1 << 63),
        ("target_offset", 1 << 40),
        ("extent_bytes", MAX_U64),
        ("extent_bytes", 1 << 40),
        ("extent_bytes", 0),
        ("param_offset", 0xFFFFFFF8),
        ("param_offset", 4),
        ("param_offset", 4096),
        ("kind", 1),
        ("kind", 2),
        ("kind", 99),
        ("memory_class", MemoryClass.EXCHANGE),
        ("memory_class", MemoryClass.COUNTERS),
        ("memory_class", 8),
        ("target_index", 1),
        ("target_index", 65535),
    ],
)
def test_relocations_out_of_range_are_refused(memory_class: MemoryClass, field: str, value: int) -> None:
    with pytest.raises(EngineFormatError):
        check(set_relocation(field, value, memory_class))


def test_two_relocations_at_one_place_are_refused() -> None:
    def edit(_: PlanHeader, arrays: PlanArrays) -> None:
        arrays.relocations["param_offset"][1] = arrays.relocations["param_offset"][0]

    with pytest.raises(EngineFormatError, match="two relocations at one place"):
        check(edit)


@pytest.mark.parametrize("value", [1, 2, 0xFFFFFFFF])
def test_a_record_cannot_wait_for_itself_or_a_later_one(value: int) -> None:
    def edit(_: PlanHeader, arrays: PlanArrays) -> None:
        arrays.dependencies[0] = value

    with pytest.raises(EngineFormatError, match="later record"):
        check(edit)


@pytest.mark.parametrize(
    "edit",
    [
        set_header(vocab_size=47),
        set_header(vocab_size=1 << 62),
        set_header(max_rows=0),
        set_header(max_rows=1 << 40),
        set_header(arena_bytes=-1),
        set_header(arena_bytes=1 << 70),
        set_header(weights_bytes=0),
        set_header(rows_bytes=8),
        set_header(staging_bytes=8),
        set_header(exchange_bytes=64),
        set_header(logits_offset=-4),
        set_header(logits_offset=1 << 63),
        set_header(logits_offset=6146),
        set_header(plans=()),
        set_header(cache_tensors=()),
        set_header(cache_groups=()),
        set_header(kernels=()),
        set_first("kernels", params_bytes=1 << 40),
        set_first("kernels", params_bytes=-8),
        set_first("kernels", member="kernels/absent.cubin"),
        set_first("cache_groups", kind="ring"),
        set_first("cache_groups", block_size=0),
        set_first("cache_groups", block_size=1 << 60),
        set_first("cache_groups", table_width=1),
        set_first("cache_groups", table_width=1 << 60),
        set_first("cache_groups", block_size=8),
        set_first("cache_groups", kind="state"),
        set_first("cache_groups", window=-1),
        set_first("cache_groups", window=8),  # its attention kernel looks back further
        set_first("cache_groups", window=1 << 60),
        set_first("cache_tensors", group="other"),
        set_first("cache_tensors", dtype="f64"),
        set_first("cache_tensors", block_bytes=1 << 50),
        set_first("cache_tensors", block_shape=(2, 2, 4, -8)),
        set_first("cache_tensors", block_shape=(1 << 24, 1 << 24, 1 << 24)),
        set_first("cache_tensors", block_shape=(1,) * 100_000),
        set_plan(0, records_start=1),
        set_plan(0, records_count=-1),
        set_plan(0, records_count=1 << 62),
        set_plan(5, records_count=0),
        set_plan(0, kind="other"),
        set_plan(0, ladder="other"),
        *(
            set_plan(0, bucket=msgspec.structs.replace(make_plan()[0].plans[0].bucket, **{name: value}))
            for name in ("max_tokens", "max_seqs", "max_logits", "max_query_len")
            for value in (0, -1, 33, 1 << 40)
        ),
    ],
)
def test_headers_that_do_not_fit_are_refused(edit: Edit) -> None:
    with pytest.raises(EngineFormatError):
        check(edit)


@pytest.mark.parametrize(
    "edit",
    [
        set_param("embedding.f32", "dim", 17),
        set_param("embedding.f32", "dim", 0),
        set_param("embedding.f32", "dim", -16),
        set_param("embedding.f32", "vocab", 49),
        set_param("embedding.f32", "vocab", 1 << 30),
        set_param("embedding.f32", "y_stride", 1 << 40),
        set_param("embedding.f32", "y_stride", -16),
        set_param("embedding.f32", "count", 3),
        set_param("embedding.f32", "count", -1),
        set_param("embedding.f32", "max_rows", 9),
        set_param("embedding.f32", "max_rows", -1),
        set_param("kv_write.f32", "block_size", 8),
        set_param("kv_write.f32", "kv_heads", 4),
        set_param("kv_write.f32", "head_dim", 1 << 14),
        set_param("paged_attention.f32", "num_heads", 400),
        set_param("paged_attention.f32", "num_heads", 3),
        set_param("paged_attention.f32", "table_width", 17),
        set_param("paged_attention.f32", "table_width", 1),
        set_param("gather_rows", "x_stride", 1000),
        set_param("linear.f32", "n", 49),
        set_param("linear.f32", "k", 17),
        set_param("linear.f32", "bias", 0x7F0000000000),
        set_param("sample_greedy", "vocab", 49),
        set_param("sample_greedy", "logits_stride", 1 << 20),
    ],
)
def test_kernels_that_would_leave_their_memory_are_refused(edit: Edit) -> None:
    with pytest.raises(EngineFormatError):
        check(edit)


def test_an_address_that_is_not_relocated_is_refused() -> None:
    def edit(_: PlanHeader, arrays: PlanArrays) -> PlanHeader | None:
        arrays.relocations["param_offset"][0] = 32  # embedding: the stride instead of an address
        return None

    with pytest.raises(EngineFormatError, match="token_ids isn't relocated"):
        check(edit)


def test_a_kernel_nobody_knows_is_a_target_error() -> None:
    with pytest.raises(EngineTargetError, match="unknown to this runtime"):
        check(set_first("kernels", name="embedding.q3_x"))


def test_cpu_checks_are_left_out_for_another_kernel_abi() -> None:
    """Its structs may differ; the CPU device refuses such an engine, inspect-engine still shows it."""
    header, arrays = writable_plan()
    set_param("embedding.f32", "dim", 17)(header, arrays)
    manifest = make_manifest("generic", (WeightsFile("weights/model-00001.safetensors", 0, 1024, 0),))
    target = msgspec.structs.replace(manifest.target, kernel_abi_hash="0" * 64)
    check_plan(header, arrays, msgspec.structs.replace(manifest, target=target), "a.engine")


@pytest.mark.parametrize("name", sorted(SPECS))
def test_bounds_know_the_parameters_of_every_kernel(name: str) -> None:
    spec = SPECS[name]
    bounds = BOUNDS[spec.op]
    assert bounds.parameters == tuple((parameter.name, parameter.type) for parameter in spec.parameters)
    pointers = {parameter.name for parameter in spec.parameters if parameter.type == "p"}
    assert set(bounds.extents) == pointers


@pytest.mark.parametrize("scheme", sorted(WEIGHT_BLOCKS))
def test_bounds_know_the_bytes_of_packed_weights(scheme: str) -> None:
    block_size, block_bytes = WEIGHT_BLOCKS[scheme]
    for n, k in ((1, 256), (16, 512), (17, 768)):
        assert (
            packed_bytes(scheme, n, k) == -(-n // PANEL_ROWS) * PANEL_ROWS * (k // block_size) * block_bytes
        )


RUN_MUTATED = """
import sys
from pathlib import Path
from castiron.runtime.devices.cpu import CpuDevice
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import CastironError
from castiron.runtime.golden import read_golden
from castiron.runtime.golden_forward import blocks_needed, sequence_logits
refused = ran = 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        with EngineFile.open(path) as engine_file:
            header, _ = engine_file.plan()
            device = CpuDevice(engine_file, blocks_needed(header, 64), 1)
            for case in read_golden(engine_file):
                sequence_logits(device, case.token_ids, case.rows, 1)
            device.close()
            ran += 1
    except CastironError:
        refused += 1
    except AssertionError:
        ran += 1  # a plan of other capacities: the step doesn't fit, and the device says so
print(refused, ran)
"""


def fuzz_plans(folder: Path, num_cases: int, seed: int) -> tuple[int, int]:
    """Engines with mutated plans and sound hashes; (refused, ran) of a process that runs them all."""
    generator = random.Random(seed)

    def mutate(header: PlanHeader, arrays: PlanArrays) -> tuple[PlanHeader, PlanArrays]:
        parts = [a.copy() for a in (arrays.records, arrays.params, arrays.relocations, arrays.dependencies)]
        for _ in range(generator.choice((1, 1, 2))):
            data = generator.choice(parts[:3]).view(np.uint8).reshape(-1)
            place = generator.randrange(len(data))
            data[place] = generator.choice((data[place] ^ (1 << generator.randrange(8)), 0, 0xFF, 0x7F, 1))
        return header, PlanArrays(*parts)

    for index in range(num_cases):
        write_synthetic_engine(folder / f"{index:05}.engine", edit_plan=mutate)
    command = [sys.executable, "-c", RUN_MUTATED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, ran = map(int, done.stdout.split())
    return refused, ran


def test_mutated_plans_never_crash_the_process(tmp_path: Path, generic_library: None) -> None:
    refused, ran = fuzz_plans(tmp_path, 150, seed=7)
    assert refused + ran == 150 and refused > 50


@pytest.mark.long
def test_many_mutated_plans_never_crash_the_process(tmp_path: Path, generic_library: None) -> None:
    refused, ran = fuzz_plans(tmp_path, 1000, seed=8)
    assert refused + ran == 1000
