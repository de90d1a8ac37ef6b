"""From traced programs to a plan: memory laid out, kernels chosen, one launch list a bucket and program."""

from dataclasses import dataclass, field

import numpy as np

from castiron.builder.dims import Dim
from castiron.builder.graph import Program as GraphProgram
from castiron.builder.graph import State
from castiron.builder.plan.emit import PlanEmitter
from castiron.builder.plan.kernel_choice import KernelChooser, KernelUse
from castiron.builder.plan.launches import Launch, Program
from castiron.builder.plan.liveness import Interval, check_disjoint, place
from castiron.builder.plan.lower import LOGITS, lower
from castiron.builder.plan.params import Placement, scratch_name, storage_bytes
from castiron.builder.plan.tactics import TacticUse
from castiron.builder.plan.views import ITEMSIZES
from castiron.builder.plan.weights import WeightsLayout
from castiron.models.kernel_spec import KernelSpec
from castiron.runtime.plan_format import CacheTensor, MemoryClass, Plan, PlanArrays, PlanHeader, RecordFlag
from castiron.runtime.step_abi import (
    Bucket,
    CacheGroup,
    bucket_capacities,
    layout,
    output_fields,
    row_fields,
    step_fields,
)


@dataclass(frozen=True)
class PlannedEngine:
    """Everything a device needs to run, and what the report says about it."""

    header: PlanHeader
    arrays: PlanArrays
    kernels: dict[str, KernelUse]  # by name
    kernel_specs: dict[str, KernelSpec]  # the same kernels' specs
    num_views: int  # view nodes that became no launch
    barriers: dict[str, int]  # plan -> records that wait for all before them
    arena_values_bytes: dict[str, int]  # plan -> bytes its arena values would take without sharing
    tactics: dict[str, TacticUse] = field(default_factory=dict)  # by key


def plan_engine(
    forward: GraphProgram,
    sampling: list[GraphProgram],
    groups: tuple[CacheGroup, ...],
    buckets: list[tuple[str, Bucket]],
    weights: WeightsLayout,
    vocab_size: int,
    max_rows: int,
    chooser: KernelChooser,
    batch_invariant: bool = False,
) -> PlannedEngine:
    """Plan a forward program and its sampling programs for every (ladder, bucket).

    batch_invariant: a row's results are the same bits in every bucket. Raises InputError if no kernel of the
    chooser can compute a node (so).
    """
    caches = cache_tensors(forward.states)
    indices = {tensor.name: index for index, tensor in enumerate(caches)}
    lowered = [lower(program, indices) for program in (forward, *sampling)]
    if batch_invariant:
        chooser.settle_orders(lowered, (bucket for _, bucket in buckets))
    emitter = PlanEmitter(chooser.has_programmatic_edges)
    arena_bytes = staging_bytes = counters_bytes = 0
    unshared: dict[str, int] = {}
    for number, (ladder, bucket) in enumerate(buckets):
        suffix = _bucket_name(ladder, bucket, buckets, number)
        capacities = bucket_capacities(bucket)
        fixed = fixed_offsets(groups, vocab_size, max_rows, capacities, weights, caches)
        staging_bytes = max(staging_bytes, layout(output_fields(), capacities)[1])
        for program in (chooser.choose(program, bucket) for program in lowered):
            counters_bytes = max(counters_bytes, *(_counters_bytes(launch) for launch in program.launches))
            name = f"{program.name}.{suffix}"
            symbols = {**symbols_at(bucket), "max_rows": max_rows}
            offsets, end, unshared[name] = _place_arena(program, symbols)
            arena_bytes = max(arena_bytes, end)
            placement = Placement({**fixed.offsets, **offsets}, fixed.extents, symbols)
            emitter.add_plan(program, program.name.partition(".")[0], ladder, name, bucket, placement)
    header = plan_header(
        emitter, groups, caches, weights, vocab_size, max_rows, arena_bytes, counters_bytes, staging_bytes
    )
    arrays = emitter.arrays()
    return PlannedEngine(
        header=header,
        arrays=arrays,
        kernels=chooser.uses,
        kernel_specs=emitter.kernel_specs,
        num_views=sum(program.num_views for program in lowered),
        barriers={plan.name: _count_barriers(arrays, plan) for plan in header.plans},
        arena_values_bytes=unshared,
        tactics=chooser.tactics,
    )


def plan_header(
    emitter: PlanEmitter,
    groups: tuple[CacheGroup, ...],
    caches: tuple[CacheTensor, ...],
    weights: WeightsLayout,
    vocab_size: int,
    max_rows: int,
    arena_bytes: int,
    counters_bytes: int,
    staging_bytes: int,
) -> PlanHeader:
    """The header of all plans the emitter holds; the *_bytes are sizes of memory classes."""
    return PlanHeader(
        kernels=emitter.kernels(),
        plans=tuple(emitter.plans),
        cache_groups=groups,
        cache_tensors=caches,
        tensor_maps=emitter.tensor_maps.all(),
        vocab_size=vocab_size,
        max_rows=max_rows,
        arena_bytes=arena_bytes,
        weights_bytes=weights.num_bytes,
        rows_bytes=layout(row_fields(), {"max_rows": max_rows})[1],
        counters_bytes=counters_bytes,
        exchange_bytes=0,
        staging_bytes=staging_bytes,
        logits_offset=0,
    )


def cache_tensors(states: tuple[State, ...]) -> tuple[CacheTensor, ...]:
    """One cache tensor for each state that lives in a cache group; dim 0 is the number of blocks."""
    tensors = []
    for state in states:
        if state.group:
            block_shape = tuple(_known(dim) for dim in state.shape[1:])
            block_bytes = int(np.prod(block_shape)) * ITEMSIZES[state.dtype]
            tensors.append(CacheTensor(state.name, state.group, block_bytes, state.dtype, block_shape))
    return tuple(tensors)


def arena_intervals(program: Program, symbols: dict[str, int]) -> list[Interval]:
    """When each arena value is live, in launch indices. Logits are live throughout, and after a forward."""
    spans: dict[str, tuple[int, int, int]] = {}
    for index, launch in enumerate(program.launches):
        for view in (*launch.inputs, *launch.outputs):
            if view is not None and view.storage.memory_class == MemoryClass.ARENA:
                name = view.storage.name
                first = spans[name][1] if name in spans else index
                spans[name] = (storage_bytes(view.storage, symbols), first, index)
        if launch.shape is not None and launch.shape.scratch_bytes:
            spans[scratch_name(launch)] = (launch.shape.scratch_bytes, index, index)
    last = len(program.launches)
    spans[LOGITS] = (storage_bytes(program.logits.storage, symbols), 0, last)
    return [Interval(name, *span) for name, span in spans.items()]


def _place_arena(
    program: Program, symbols: dict[str, int]
) -> tuple[dict[tuple[MemoryClass, str], int], int, int]:
    """Arena offsets (logits at 0, reserved all the time), the arena's end, and bytes without sharing."""
    intervals = arena_intervals(program, symbols)
    others = [interval for interval in intervals if interval.name != LOGITS]
    logits = next(interval for interval in intervals if interval.name == LOGITS)
    offsets, end = place(others, reserved_bytes=logits.num_bytes)
    offsets[LOGITS] = 0
    check_disjoint(intervals, offsets)
    keyed = {(MemoryClass.ARENA, name): offset for name, offset in offsets.items()}
    return keyed, end, sum(interval.num_bytes for interval in intervals)


def fixed_offsets(
    groups: tuple[CacheGroup, ...],
    vocab_size: int,
    max_rows: int,
    capacities: dict[str, int],
    weights: WeightsLayout,
    caches: tuple[CacheTensor, ...],
) -> Placement:
    """Where everything outside the arena is, for one bucket."""
    offsets: dict[tuple[MemoryClass, str], int] = {}
    extents: dict[tuple[MemoryClass, str], int] = {}
    for memory_class, fields, sizes in (
        (MemoryClass.STEP, step_fields(groups, vocab_size), capacities),
        (MemoryClass.ROWS, row_fields(), {"max_rows": max_rows}),
        (MemoryClass.STAGING, output_fields(), capacities),
    ):
        for name, offset in layout(fields, sizes)[0].items():
            offsets[memory_class, name] = offset
    for name, (offset, num_bytes) in weights.places.items():
        offsets[MemoryClass.WEIGHTS, name] = offset
        extents[MemoryClass.WEIGHTS, name] = num_bytes
    for tensor in caches:
        offsets[MemoryClass.CACHE, tensor.name] = 0
        extents[MemoryClass.CACHE, tensor.name] = tensor.block_bytes
    return Placement(offsets, extents, {})


def _counters_bytes(launch: Launch) -> int:
    return launch.shape.counters_bytes if launch.shape is not None else 0


def symbols_at(bucket: Bucket) -> dict[str, int]:
    """The graph's symbols at the bucket's capacities."""
    return {"num_tokens": bucket.max_tokens, "num_seqs": bucket.max_seqs, "num_logits": bucket.max_logits}


def _bucket_name(ladder: str, bucket: Bucket, buckets: list[tuple[str, Bucket]], number: int) -> str:
    """ "decode", or "decode-8" where a ladder has several buckets."""
    if sum(name == ladder for name, _ in buckets) == 1:
        return ladder
    return f"{ladder}-{bucket.max_seqs if ladder == 'decode' else bucket.max_tokens}"


def _known(dim: Dim) -> int:
    assert isinstance(dim, int), f"cache dimension {dim} is not a known integer"
    return dim


def _count_barriers(arrays: PlanArrays, plan: Plan) -> int:
    flags = arrays.records["flags"][plan.records_start : plan.records_start + plan.records_count]
    return int(np.count_nonzero(flags & RecordFlag.BARRIER))
