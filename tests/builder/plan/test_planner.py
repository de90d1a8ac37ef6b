"""Plans of real traced programs: memory never overlaps and every record decodes."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
from tiny_checkpoints import save_tiny_checkpoint

from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.choose_schemes import choose_schemes
from castiron.builder.graph import Program, new_node, new_value, shape_of
from castiron.builder.model_parameters import bind_model
from castiron.builder.pipeline import optimize
from castiron.builder.plan.buckets import ladder_buckets, top_buckets
from castiron.builder.plan.describe import Address, DescribedRecord, describe_plan
from castiron.builder.plan.lower import lower
from castiron.builder.plan.planner import PlannedEngine, arena_intervals, plan_engine
from castiron.builder.plan.weights import layout_weights
from castiron.builder.targets import resolve_target
from castiron.builder.trace import TraceOptions, trace_forward, trace_sampler
from castiron.plugins_cpu.specs import SPECS
from castiron.runtime.errors import InputError
from castiron.runtime.manifest import Profile
from castiron.runtime.plan_format import MemoryClass, RecordFlag
from castiron.runtime.step_abi import CacheGroup, bucket_capacities, layout, row_fields, step_fields

CPU = resolve_target("cpu:generic")
PROFILE = Profile(max_seqs=4, max_seq_len=64, max_batched_tokens=32)
GROUP = CacheGroup("kv", "paged", 16, 4)
VOCAB_SIZE = 307
COMPUTES = ("traced", "f32", "bf16", "int8")


@pytest.fixture(scope="module")
def samplers() -> list[Program]:
    return [trace_sampler(variant, VOCAB_SIZE) for variant in ("greedy", "random")]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Program]:
    """The tiny Llama's forward: as traced, or after the passes for a compute mode."""
    folder = tmp_path_factory.mktemp("planner")
    checkpoint = open_checkpoint(save_tiny_checkpoint(folder, "llama", num_layers=2))
    model = bind_model(checkpoint)
    traced: dict[str, Program] = {}

    def make(compute: str) -> Program:
        arithmetic = "f32" if compute == "traced" else compute
        dtype = CPU.cache_dtype(arithmetic)
        if dtype not in traced:
            parameters, _ = choose_schemes(
                model.parameters, "keep", arithmetic if arithmetic != "int8" else "bf16", CPU
            )
            traced[dtype] = trace_forward(model.family, model.config, parameters, TraceOptions(16, 4, dtype))
        source = traced[dtype]
        program = replace(source, model=source.model.clone(), parameters=dict(source.parameters))
        if compute == "int8":
            for name, parameter in program.parameters.items():
                if len(parameter.shape) == 2:
                    program.parameters[name] = replace(parameter, scheme="q4_1")
        if compute != "traced":
            optimize(program, arithmetic)
        return program

    return make


@pytest.fixture(scope="module", params=COMPUTES)
def planned(
    request: pytest.FixtureRequest, trace: Callable[[str], Program], samplers: list[Program]
) -> PlannedEngine:
    return make_plan(trace(request.param), samplers)


def make_plan(forward: Program, samplers: list[Program]) -> PlannedEngine:
    weights = layout_weights(forward.parameters.values())
    return plan_engine(
        forward, samplers, (GROUP,), top_buckets(PROFILE), weights, VOCAB_SIZE, 8, CPU.kernel_chooser()
    )


def records_of(planned: PlannedEngine) -> list[tuple[str, list[DescribedRecord]]]:
    return [(p.name, describe_plan(planned.header, planned.arrays, p)) for p in planned.header.plans]


def test_every_bucket_has_a_forward_and_both_samplers(planned: PlannedEngine) -> None:
    names = [plan.name for plan in planned.header.plans]
    assert names == [
        f"{program}.{ladder}"
        for ladder in ("decode", "mixed")
        for program in ("forward", "sample.greedy", "sample.random")
    ]


def test_every_address_lies_inside_its_memory_class(planned: PlannedEngine) -> None:
    header = planned.header
    for plan, (name, records) in zip(header.plans, records_of(planned), strict=True):
        step_bytes = layout(step_fields((GROUP,), VOCAB_SIZE), bucket_capacities(plan.bucket))[1]
        sizes = {
            MemoryClass.WEIGHTS: header.weights_bytes,
            MemoryClass.ARENA: header.arena_bytes,
            MemoryClass.ROWS: layout(row_fields(VOCAB_SIZE), {"max_rows": 8})[1],
            MemoryClass.STEP: step_bytes,
            MemoryClass.STAGING: header.staging_bytes,
        }
        for record in records:
            for address in record.parameters.values():
                if isinstance(address, Address):
                    is_cache = address.memory_class == MemoryClass.CACHE
                    size = header.cache_tensors[address.target_index].block_bytes if is_cache else None
                    limit = size if size is not None else sizes[address.memory_class]
                    assert address.extent > 0, (name, record)
                    assert address.offset + address.extent <= limit, (name, record)


def test_a_null_address_is_only_ever_an_optional_one(planned: PlannedEngine) -> None:
    for _, records in records_of(planned):
        for record in records:
            optional = {p.name for p in SPECS[record.kernel].parameters if p.binding.endswith("?")}
            absent = {name for name, value in record.parameters.items() if value is None}
            assert absent <= optional, record


def test_a_record_never_writes_arena_bytes_that_a_later_reader_of_an_older_value_needs(
    planned: PlannedEngine,
) -> None:
    """Replays each plan byte by byte: what a record reads was written last by the record it depends on."""
    for name, records in records_of(planned):
        owner = np.full(planned.header.arena_bytes, -1, np.int64)  # record that wrote each byte last
        if name.startswith("sample"):
            owner[: 4 * 4 * VOCAB_SIZE] = -2  # the forward's logits
        for index, record in enumerate(records):
            writes = written_parameters(record)
            for parameter, address in record.parameters.items():
                if isinstance(address, Address) and address.memory_class == MemoryClass.ARENA:
                    place = slice(address.offset, address.offset + address.extent)
                    if parameter not in writes:
                        writers = set(np.unique(owner[place]).tolist())
                        assert -1 not in writers, (name, record.kernel, parameter)
                        assert {w for w in writers if w >= 0} <= ancestors(records, index), record
            for parameter in writes:
                address = record.parameters[parameter]
                assert isinstance(address, Address)
                if address.memory_class == MemoryClass.ARENA:
                    owner[address.offset : address.offset + address.extent] = index


def test_records_without_a_barrier_depend_on_nothing_since_the_last_barrier(planned: PlannedEngine) -> None:
    for _, records in records_of(planned):
        assert records[0].has_barrier
        last_barrier = 0
        for index, record in enumerate(records):
            if record.has_barrier:
                last_barrier = index
            assert all(earlier < index for earlier in record.dependencies)
            assert record.has_barrier or all(earlier < last_barrier for earlier in record.dependencies)


def test_views_are_never_launches(planned: PlannedEngine) -> None:
    assert planned.num_views > 0
    assert all(use.op.islower() for use in planned.kernels.values())
    assert not {"reshape", "split", "slice", "transpose"} & {use.op for use in planned.kernels.values()}


def test_sharing_arena_bytes_pays(planned: PlannedEngine) -> None:
    assert planned.header.arena_bytes < planned.arena_values_bytes["forward.mixed"]


def test_logits_stay_at_their_place_from_the_forward_through_sampling(
    trace: Callable[[str], Program], samplers: list[Program]
) -> None:
    program = lower(trace("f32"), {"cache.0": 0, "cache.1": 1})
    logits = next(i for i in arena_intervals(program, _symbols()) if i.name == "logits")
    assert (logits.first, logits.last) == (0, len(program.launches))
    planned = make_plan(trace("f32"), samplers)
    assert planned.header.logits_offset == 0
    for name, records in records_of(planned):
        if name.startswith("sample"):
            assert records[0].parameters["logits"] == Address(MemoryClass.ARENA, 0, 0, 4 * 4 * VOCAB_SIZE)


def test_the_same_program_gives_the_same_bytes(
    trace: Callable[[str], Program], samplers: list[Program]
) -> None:
    one, two = make_plan(trace("f32"), samplers), make_plan(trace("f32"), samplers)
    assert msgspec.msgpack.encode(one.header) == msgspec.msgpack.encode(two.header)
    for name in ("records", "params", "relocations", "dependencies"):
        assert getattr(one.arrays, name).tobytes() == getattr(two.arrays, name).tobytes()


def test_both_ladders_give_a_plan_for_each_bucket_under_a_name_of_its_own(
    trace: Callable[[str], Program], samplers: list[Program]
) -> None:
    forward = trace("f32")
    buckets = ladder_buckets(PROFILE)
    weights = layout_weights(forward.parameters.values())
    planned = plan_engine(forward, samplers, (GROUP,), buckets, weights, VOCAB_SIZE, 8, CPU.kernel_chooser())
    names = [plan.name for plan in planned.header.plans]
    assert len(set(names)) == len(names) == 3 * len(buckets)
    assert "forward.decode-2" in names and "forward.mixed" in names


def test_a_node_without_a_kernel_is_an_error_that_lists_each_candidate(
    trace: Callable[[str], Program],
) -> None:
    program = trace("int8")
    linear = next(n for n in program.graph if n.op_type == "linear_q8")
    name = str(linear.inputs[3].name)
    program.parameters[name] = replace(program.parameters[name], scheme="f32")
    with pytest.raises(InputError) as error:
        CPU.kernel_chooser().choose(lower(program, {"cache.0": 0, "cache.1": 1}), top_buckets(PROFILE)[0][1])
    assert "linear_q8.q4_1: reads q4_1 weights, not f32" in str(error.value)
    assert "linear_q8.q8_0: reads q8_0 weights, not f32" in str(error.value)


def test_an_op_without_kernels_is_an_error_that_names_it(trace: Callable[[str], Program]) -> None:
    program = trace("f32")
    node = next(n for n in program.graph if n.op_type == "rms_norm")
    output = new_value("twisted", ir.DataType.FLOAT, shape_of(node.outputs[0]))
    program.graph.insert_after(node, new_node("twist", [node.outputs[0]], [output]))
    with pytest.raises(InputError, match=r"node\.twisted \(twist\): no kernel computes this op"):
        CPU.kernel_chooser().choose(lower(program, {"cache.0": 0, "cache.1": 1}), top_buckets(PROFILE)[0][1])


def test_reading_a_cache_version_that_was_overwritten_is_caught(trace: Callable[[str], Program]) -> None:
    program = trace("traced")
    attention = next(n for n in program.graph if n.op_type == "paged_attention")
    old = next(value for value in program.graph.inputs if value.name == "cache.0")
    attention.replace_input_with(1, old)
    with pytest.raises(AssertionError, match=r"reads version 0 of cache\.0 after version 1 was written"):
        CPU.kernel_chooser().choose(lower(program, {"cache.0": 0, "cache.1": 1}), top_buckets(PROFILE)[0][1])


def test_a_barrier_is_spared_where_records_are_independent(
    trace: Callable[[str], Program], samplers: list[Program]
) -> None:
    planned = make_plan(trace("traced"), samplers)
    flags = planned.arrays.records["flags"]
    assert np.count_nonzero(flags & RecordFlag.BARRIER) < len(flags)
    _, records = records_of(planned)[0]
    k_linear = next(i for i, r in enumerate(records) if r.kernel.startswith("linear")) + 1
    assert not records[k_linear].has_barrier  # k reads what q reads


def written_parameters(record: DescribedRecord) -> set[str]:
    return {p.name for p in SPECS[record.kernel].parameters if p.type == "p" and p.binding.startswith("out")}


def ancestors(records: list[DescribedRecord], index: int) -> set[int]:
    found: set[int] = set()
    pending = list(records[index].dependencies)
    while pending:
        earlier = pending.pop()
        if earlier not in found:
            found.add(earlier)
            pending += records[earlier].dependencies
    return found


def _symbols() -> dict[str, int]:
    return {"num_tokens": 32, "num_seqs": 4, "num_logits": 4, "max_rows": 8}
