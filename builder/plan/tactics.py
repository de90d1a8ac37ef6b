"""Tactics: which of several kernels computes a launch, by measured times where they hold, else by the cost model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from castiron.builder.plan.launches import Launch, LaunchShape
from castiron.builder.plan.views import View
from castiron.configs.tuning_results import TuningResult, TuningResults
from castiron.models.kernel_spec import KernelSpec
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.plugins_cuda.source_hash import source_hash
from castiron.runtime.plan_format import MemoryClass
from castiron.runtime.tuning_format import TacticKey

PRUNE_FACTOR = 2.5  # candidates estimated slower than this times the best are not timed,
FEWEST_CANDIDATES = 2  # but so many always are
MOST_RUNNERS_UP = 4  # that the report names
# measured: times decided; stale: there are times, but of other kernels or another compiler; untuned: none;
# only: no other kernel can
Origin = Literal["measured", "stale", "untuned", "only"]


class ReadSizes(Mapping[str, int]):
    """Launch sizes that note in `read` which of them a spec's rules ask for."""

    def __init__(self, sizes: Mapping[str, int], read: set[str]) -> None:
        self._sizes = sizes
        self._read = read

    def __getitem__(self, name: str) -> int:
        self._read.add(name)
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        self._read.update(self._sizes)
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


@dataclass(frozen=True)
class Candidate:
    """A kernel that can compute a launch."""

    spec: KernelSpec
    cost: float  # µs the cost model estimates; 0.0 on the CPU
    shape: LaunchShape | None


@dataclass(frozen=True)
class Alternatives:
    """All kernels of a launch's op: those that can compute it, in the order of the specs, and why others can't."""

    key: TacticKey
    candidates: tuple[Candidate, ...]
    refused: dict[str, str]


@dataclass
class TacticUse:
    """What the report says about the kernel of one key."""

    key: TacticKey
    kernel: str
    origin: Origin
    us: float  # measured or, as `origin` says, estimated
    runners_up: tuple[tuple[str, float], ...]  # kernel, µs of the same kind
    launches: int = 0  # over all plans


class StoredTactics:
    """The measured times a build may use, and the hashes and compiler they must be of."""

    def __init__(self, files: Iterable[TuningResults], target: str, compiler: str) -> None:
        """files: of this target, those first in line first; compiler: what kernels are built with now."""
        self._results: dict[str, TuningResult] = {}
        self._target = target
        self._compiler = compiler
        for file in files:
            for result in file.results:
                self._results.setdefault(result.key.text, result)

    def times(self, alternatives: Alternatives) -> tuple[dict[str, float], Origin]:
        """µs of the measured candidates by kernel, or {} and why there are none to go by."""
        result = self._results.get(alternatives.key.text)
        if result is None:
            return {}, "untuned"
        if result.compiler != self._compiler:
            return {}, "stale"
        stored = {measured.kernel: measured for measured in result.candidates}
        times = {}
        for candidate in alternatives.candidates:
            measured = stored.get(candidate.spec.name)
            if measured is not None and measured.source_hash == tactic_hash(candidate, self._target):
                times[candidate.spec.name] = measured.us
        if any(candidate.spec.name not in times for candidate in prune(alternatives.candidates)):
            return {}, "stale"
        return times, "measured"


def decide(
    alternatives: Alternatives, stored: StoredTactics | None, order: str | None = None
) -> tuple[Candidate, TacticUse]:
    """The kernel a launch gets, of those that sum in `order` if it is given, and what the report says about it.

    There must be a candidate.
    """
    candidates = [c for c in alternatives.candidates if order in (None, row_order(c.spec))]
    times: dict[str, float] = {}
    origin: Origin = "only" if len(candidates) == 1 else "untuned"
    if stored is not None and len(candidates) > 1:
        times, origin = stored.times(alternatives)
        if times and not any(c.spec.name in times for c in candidates):  # none was worth timing
            times, origin = {}, "untuned"
    ranked = sorted(  # the first of equals stays first
        (
            (times[c.spec.name] if times else c.cost, c)
            for c in candidates
            if not times or c.spec.name in times
        ),
        key=lambda pair: pair[0],
    )
    us, chosen = ranked[0]
    runners_up = tuple((c.spec.name, us) for us, c in ranked[1 : 1 + MOST_RUNNERS_UP])
    return chosen, TacticUse(alternatives.key, chosen.spec.name, origin, us, runners_up)


def row_order(spec: KernelSpec) -> str | None:
    """CudaKernelSpec.row_order; of a CPU kernel its name: each one's rows stand alone."""
    return spec.row_order if isinstance(spec, CudaKernelSpec) else spec.name


def prune(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates worth timing, cheapest estimate first."""
    ranked = sorted(candidates, key=lambda candidate: candidate.cost)
    return [
        candidate
        for place, candidate in enumerate(ranked)
        if place < FEWEST_CANDIDATES or candidate.cost <= PRUNE_FACTOR * ranked[0].cost
    ]


def tactic_hash(candidate: Candidate, target: str) -> str:
    """What a candidate's time stands for: its source, and how it is launched."""
    spec, shape = candidate.spec, candidate.shape
    assert isinstance(spec, CudaKernelSpec) and shape is not None
    launched = (*shape.grid, shape.threads, *shape.cluster, shape.shared_bytes)
    return f"{source_hash(spec, target)}-{'.'.join(map(str, launched))}"


def tactic_key(
    launch: Launch, specs: Iterable[KernelSpec], sizes: Mapping[str, int], read: set[str]
) -> TacticKey:
    """specs: those that may compute the launch; sizes: all that is known, of which their rules have `read` some."""
    names = {"num_sms", *read}
    for spec in specs:
        names |= {p.name for p in spec.parameters if p.type == "i" and p.binding != "zero"}
    names.discard("count")  # says which capacity is "rows"
    weights = [v for v in launch.inputs if v is not None and is_matrix(v)]
    inputs, outputs = (" ".join(map(_dtype, views)) for views in (launch.inputs, launch.outputs))
    return TacticKey(
        op=launch.op,
        scheme=weights[0].storage.dtype if weights else "",
        operands=f"{inputs} -> {outputs}",
        sizes={name: sizes[name] for name in sorted(names) if name in sizes},
    )


def is_matrix(view: View) -> bool:
    """Whether it is a weight matrix."""
    return view.storage.memory_class == MemoryClass.WEIGHTS and len(view.storage.shape) == 2


def tactics_text(uses: Iterable[TacticUse]) -> str:
    """ "tactics: 41 measured, 3 by cost model (2 stale)", "" if no launch had a choice."""
    counts = {"measured": 0, "stale": 0, "untuned": 0, "only": 0}
    for use in uses:
        counts[use.origin] += 1
    estimated = counts["stale"] + counts["untuned"]
    if not counts["measured"] and not estimated:
        return ""
    stale = f" ({counts['stale']} stale)" if counts["stale"] else ""
    return f"tactics: {counts['measured']} measured, {estimated} by cost model{stale}"


def _dtype(view: View | None) -> str:
    return "-" if view is None else view.storage.dtype
