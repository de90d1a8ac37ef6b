"""The plans of a tuning engine: for every launch with a choice of kernels, each candidate in a chain of its own.

    forward.decode-8   ... linear [4096, 14336] ...      key: linear, int4_g128, n, k, 8 rows
    tune.012.linear_few.int4_g128.8       22 launches of it by this kernel, weights 0, 1, 2, ... of their shape
    tune.012.linear_few.int4_g128.8.s2    22 launches of it by that one, ...

All launches of a chain read the same activations and write the same result; weights (made up, distinct) and
caches (one a layer) change from launch to launch, so that they come from memory and not from the L2 cache.
"""

from dataclasses import dataclass, field, replace

from castiron.builder.dims import evaluate_dim
from castiron.builder.graph import Program as GraphProgram
from castiron.builder.parameters import Parameter
from castiron.builder.plan.buckets import DECODE
from castiron.builder.plan.emit import PlanEmitter
from castiron.builder.plan.kernel_choice import KernelChooser
from castiron.builder.plan.launches import Launch, Program
from castiron.builder.plan.lower import lower
from castiron.builder.plan.params import Placement, scratch_name, storage_bytes
from castiron.builder.plan.planner import (
    PlannedEngine,
    cache_tensors,
    fixed_offsets,
    plan_header,
    symbols_at,
)
from castiron.builder.plan.tactics import Alternatives, Candidate, is_matrix, prune, tactic_hash
from castiron.builder.plan.views import View
from castiron.builder.plan.weights import WeightsLayout, layout_weights, parameter_bytes
from castiron.runtime.manifest import Profile
from castiron.runtime.plan_format import MemoryClass
from castiron.runtime.step_abi import (
    Bucket,
    CacheGroup,
    bucket_capacities,
    layout,
    output_fields,
)
from castiron.runtime.tuning_format import LiveCounts, TuningCandidate, TuningCase, TuningInfo

CONTEXT = 1024  # tokens a sequence has, as far as the profile allows so many
FEWEST_COPIES, MOST_COPIES = 20, 64  # launches of a chain
DISTINCT_BYTES = 160 << 20  # of weights that a chain reads: thrice an L2 cache of 50 MB
_ALIGNMENT = 256


@dataclass(frozen=True)
class PlannedTuning:
    """A tuning engine, planned."""

    planned: PlannedEngine
    info: TuningInfo
    parameters: list[Parameter]  # the constants the launches read, and made-up weights
    layout: WeightsLayout
    num_pruned: int  # candidates left out for their estimates

    @property
    def text(self) -> str:
        """For the progress line."""
        candidates = [c for case in self.info.cases for c in case.candidates]
        kernels = len({candidate.kernel for candidate in candidates})
        return (
            f"tuning: {len(self.info.cases)} keys, {len(candidates)} candidates of {kernels} kernels, "
            f"{self.num_pruned} left out by estimate"
        )


@dataclass
class _Case:
    """One key: its launches in the first program and bucket that has it."""

    alternatives: Alternatives
    program: Program
    ladder: str
    bucket: Bucket
    launches: list[Launch] = field(default_factory=list)
    num_distinct: int = 1  # weights of each input


def plan_tuning(
    forward: GraphProgram,
    sampling: list[GraphProgram],
    group: CacheGroup,
    buckets: list[tuple[str, Bucket]],
    vocab_size: int,
    profile: Profile,
    chooser: KernelChooser,
    target: str,
    compiler: str,
) -> PlannedTuning:
    """Plan the chains. Raises InputError as plan_engine does; there may be no case at all."""
    groups = (group,)
    max_rows = 2 * profile.max_seqs
    caches = cache_tensors(forward.states)
    indices = {tensor.name: index for index, tensor in enumerate(caches)}
    lowered = [lower(program, indices) for program in (forward, *sampling)]
    cases = _find_cases(lowered, buckets, chooser)
    pool = _WeightPool(forward.parameters)
    for case in cases:
        case.num_distinct = pool.reserve(case.launches[0])
    parameters = pool.parameters()
    weights = layout_weights(parameters)
    emitter = PlanEmitter(chooser.has_programmatic_edges)
    arena_bytes = counters_bytes = staging_bytes = num_pruned = 0
    described = []
    for number, case in enumerate(cases):
        capacities = bucket_capacities(case.bucket)
        staging_bytes = max(staging_bytes, layout(output_fields(), capacities)[1])
        fixed = fixed_offsets(groups, vocab_size, max_rows, capacities, weights, caches)
        symbols = {**symbols_at(case.bucket), "max_rows": max_rows}
        copies = max(FEWEST_COPIES, case.num_distinct, min(len(case.launches), MOST_COPIES))
        candidates = prune(case.alternatives.candidates)
        num_pruned += len(case.alternatives.candidates) - len(candidates)
        entries = []
        for candidate in candidates:
            assert candidate.shape is not None
            launches = tuple(_copy(case, pool, index, candidate) for index in range(copies))
            offsets, end = _place_arena(launches[0], symbols)
            arena_bytes = max(arena_bytes, end)
            counters_bytes = max(counters_bytes, candidate.shape.counters_bytes)
            placement = Placement({**fixed.offsets, **offsets}, fixed.extents, symbols)
            name = f"tune.{number:03}.{candidate.spec.name}"
            entries.append(
                TuningCandidate(
                    candidate.spec.name, tactic_hash(candidate, target), candidate.cost, len(emitter.plans)
                )
            )
            chain = replace(case.program, launches=launches)
            emitter.add_plan(chain, "tune", case.ladder, name, case.bucket, placement)
        described.append(_describe(case, group, profile, copies, tuple(entries), pool))
    header = plan_header(
        emitter, groups, caches, weights, vocab_size, max_rows, arena_bytes, counters_bytes, staging_bytes
    )
    planned = PlannedEngine(
        header=header,
        arrays=emitter.arrays(),
        kernels={},
        kernel_specs=emitter.kernel_specs,
        num_views=sum(program.num_views for program in lowered),
        barriers={plan.name: 0 for plan in header.plans},  # chains of programmatic edges
        arena_values_bytes={plan.name: arena_bytes for plan in header.plans},
    )
    return PlannedTuning(
        planned, TuningInfo(target, compiler, tuple(described)), parameters, weights, num_pruned
    )


def live_counts(ladder: str, bucket: Bucket, profile: Profile) -> LiveCounts:
    """The bucket full: of decode all sequences; else prompts that end at CONTEXT tokens, of so many sequences."""
    context = min(CONTEXT, profile.max_seq_len)
    num_seqs = bucket.max_seqs
    if ladder != DECODE:
        num_seqs = min(num_seqs, -(-bucket.max_tokens // context))
    num_tokens = min(bucket.max_tokens, num_seqs * profile.max_seq_len)
    return LiveCounts(num_tokens, num_seqs, bucket.max_logits, max(context, -(-num_tokens // num_seqs)))


def _find_cases(
    lowered: list[Program], buckets: list[tuple[str, Bucket]], chooser: KernelChooser
) -> list[_Case]:
    """Every launch that more than one kernel can compute, by key."""
    cases: dict[str, _Case] = {}
    for ladder, bucket in buckets:
        for program in lowered:
            for launch in program.launches:
                found = chooser.alternatives(launch, bucket)
                if len(found.candidates) < 2 or found.candidates[0].shape is None:
                    continue
                case = cases.setdefault(found.key.text, _Case(found, program, ladder, bucket))
                if case.program is program and case.bucket == bucket and case.ladder == ladder:
                    case.launches.append(launch)
    return list(cases.values())


class _WeightPool:
    """Made-up parameters, several of each shape and scheme, that take the place of a model's."""

    def __init__(self, originals: dict[str, Parameter]) -> None:
        self._originals = originals
        self._pools: dict[str, list[Parameter]] = {}

    def reserve(self, launch: Launch) -> int:
        """Have enough for the launch's chain; returns how many of each of its weights are distinct."""
        weights = [view for view in launch.inputs if self._is_made_up(view)]
        num_bytes = sum(parameter_bytes(self._original(view)) for view in weights)
        if not num_bytes:
            return 1
        count = min(max(2, -(-DISTINCT_BYTES // num_bytes)), MOST_COPIES)
        for view in weights:
            name, original = self._pool_name(view), self._original(view)
            pool = self._pools.setdefault(name, [])
            for index in range(len(pool), count):
                pool.append(replace(original, name=f"tune.{index}.{name}", parts=()))
        return count

    def view(self, view: View | None, index: int) -> View | None:
        """What a launch reads in place of `view`: number `index` of its pool, or the constant itself."""
        if view is None or not self._is_made_up(view):
            return view
        name = self._pools[self._pool_name(view)][index].name
        return replace(view, storage=replace(view.storage, name=name))

    def bytes_of(self, view: View | None) -> int:
        """Of the weight, 0 if it is none or a constant."""
        return parameter_bytes(self._original(view)) if self._is_made_up(view) else 0

    def parameters(self) -> list[Parameter]:
        """All there are, constants first."""
        constants = [p for p in self._originals.values() if p.constant is not None]
        return [*constants, *(p for pool in self._pools.values() for p in pool)]

    def _is_made_up(self, view: View | None) -> bool:
        if view is None or view.storage.memory_class != MemoryClass.WEIGHTS:
            return False
        return self._original(view).constant is None

    def _original(self, view: View | None) -> Parameter:
        assert view is not None
        return self._originals[view.storage.name]

    def _pool_name(self, view: View | None) -> str:
        """Scheme, shape, and the name's last word, which says how a vector is made up."""
        original = self._original(view)
        shape = "x".join(map(str, original.shape))
        return f"{original.scheme}.{shape}.{original.name.rpartition('.')[2]}"


def _copy(case: _Case, pool: _WeightPool, index: int, candidate: Candidate) -> Launch:
    """Launch `index` of the chain: the first launch of the case, with weights of the pool and a layer's caches."""
    first, other = case.launches[0], case.launches[index % len(case.launches)]
    inputs = tuple(
        theirs if _is_cache(mine) else pool.view(mine, index % case.num_distinct)
        for mine, theirs in zip(first.inputs, other.inputs, strict=True)
    )
    outputs = tuple(
        theirs if _is_cache(mine) else mine for mine, theirs in zip(first.outputs, other.outputs, strict=True)
    )
    return replace(first, inputs=inputs, outputs=outputs, spec=candidate.spec, shape=candidate.shape)


def _is_cache(view: View | None) -> bool:
    return view is not None and view.storage.memory_class == MemoryClass.CACHE


def _place_arena(launch: Launch, symbols: dict[str, int]) -> tuple[dict[tuple[MemoryClass, str], int], int]:
    """Offsets of the launch's values and scratch, one after another, and where they end."""
    sizes: dict[str, int] = {}
    for view in (*launch.inputs, *launch.outputs):
        if view is not None and view.storage.memory_class == MemoryClass.ARENA:
            sizes[view.storage.name] = storage_bytes(view.storage, symbols)
    if launch.shape is not None and launch.shape.scratch_bytes:
        sizes[scratch_name(launch)] = launch.shape.scratch_bytes
    offsets, end = {}, 0
    for name, num_bytes in sizes.items():
        offsets[MemoryClass.ARENA, name] = end
        end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _describe(
    case: _Case,
    group: CacheGroup,
    profile: Profile,
    copies: int,
    candidates: tuple[TuningCandidate, ...],
    pool: _WeightPool,
) -> TuningCase:
    """What the timing has to know of the case, with the least a launch must move and do."""
    first = case.launches[0]
    live = live_counts(case.ladder, case.bucket, profile)
    weights_bytes = sum(map(pool.bytes_of, first.inputs))
    symbols = {"num_tokens": live.num_tokens, "num_seqs": live.num_seqs, "num_logits": live.num_logits}
    cache_bytes = 0
    moved = weights_bytes
    for view in (*first.inputs, *first.outputs):
        if view is not None and view.storage.memory_class == MemoryClass.ARENA:
            elements = 1
            for dim in view.shape:
                elements *= evaluate_dim(dim, symbols)
            moved += elements * view.storage.itemsize
    for view in first.inputs:
        if _is_cache(view):
            cache_bytes += _block_bytes(view) // group.block_size * live.context * live.num_seqs
    layers = len({launch.inputs for launch in case.launches}) if cache_bytes else 0
    return TuningCase(
        key=case.alternatives.key,
        live=live,
        copies=copies,
        distinct_bytes=weights_bytes * case.num_distinct + cache_bytes * min(layers, copies),
        launch_bytes=moved + cache_bytes,
        launch_flops=_flops(case, live, symbols),
        candidates=candidates,
    )


def _block_bytes(view: View | None) -> int:
    assert view is not None
    size = view.storage.itemsize
    for dim in view.storage.shape[1:]:
        assert isinstance(dim, int)
        size *= dim
    return size


def _flops(case: _Case, live: LiveCounts, symbols: dict[str, int]) -> int:
    """Of the launch's products with weights and with cached keys and values; 0 if it has neither."""
    first, sizes = case.launches[0], case.alternatives.key.sizes
    rows = evaluate_dim(first.outputs[0].shape[0], symbols)
    flops = 0
    for view in first.inputs:
        if view is not None and is_matrix(view):
            n, k = view.storage.shape
            assert isinstance(n, int) and isinstance(k, int)
            if first.outputs[0].shape[-1] == n:  # else rows of a table are read, not multiplied
                flops += 2 * n * k * rows
    if any(map(_is_cache, first.inputs)) and {"num_heads", "head_dim"} <= sizes.keys():
        each = -(-live.num_tokens // live.num_seqs)
        pairs = live.num_tokens * (live.context - (each - 1) / 2)  # a token sees those up to itself
        flops += int(4 * pairs * sizes["num_heads"] * sizes["head_dim"])
    return flops
