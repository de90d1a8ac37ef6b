"""Which kernel computes a launch, bucket by bucket: by op, scheme, dtypes and sizes; a refusal says why not."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from castiron.builder.dims import format_dim
from castiron.builder.graph import symbol_of
from castiron.builder.plan.launches import Launch, LaunchShape, Program
from castiron.builder.plan.reduction_orders import choose_order
from castiron.builder.plan.tactics import (
    Alternatives,
    Candidate,
    ReadSizes,
    StoredTactics,
    TacticUse,
    decide,
    row_order,
    tactic_key,
)
from castiron.builder.plan.views import View, is_dense
from castiron.models.kernel_spec import KernelSpec
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Gpu, Sizes, why_not_on
from castiron.runtime.errors import InputError
from castiron.runtime.plan_format import MemoryClass
from castiron.runtime.step_abi import SYMBOLS, Bucket, bucket_capacities


@dataclass
class KernelUse:
    """What the report says about a kernel: how often it launches, and why the other candidates didn't."""

    op: str
    launches: int = 0  # over all plans
    refused: dict[str, str] = field(default_factory=dict)  # kernel -> reason, at the first launch


class KernelChooser:
    """Chooses among one target's kernels, and notes in `uses` and `tactics` what it chose and refused."""

    def __init__(
        self,
        specs: Iterable[KernelSpec],
        gpu: Gpu | None,
        target: str,
        stored: StoredTactics | None = None,
    ) -> None:
        """gpu: None on the CPU; target: its name, for messages; stored: measured times."""
        self.uses: dict[str, KernelUse] = {}
        self.tactics: dict[str, TacticUse] = {}  # by key; CUDA launches alone
        self._gpu = gpu
        self._target = target
        self._stored = stored
        self._alternatives: dict[Hashable, Alternatives] = {}  # of launches that look alike,
        self._decisions: dict[Hashable, tuple[Candidate, TacticUse]] = {}  # and which of them is taken
        self._orders: dict[Hashable, str] = {}  # the only order of sums they may have, whatever the bucket
        self._by_op: dict[str, list[KernelSpec]] = {}
        for spec in specs:
            self._by_op.setdefault(spec.op, []).append(spec)

    @property
    def has_programmatic_edges(self) -> bool:
        """Whether a kernel may start before the one ahead of it has ended."""
        return self._gpu is not None and self._gpu.has_programmatic_edges

    def settle_orders(self, programs: Iterable[Program], buckets: Iterable[Bucket]) -> None:
        """From now on choose kernels of one order of sums for a launch in all buckets: batch-invariant plans.

        Raises InputError listing the kernels of a node that has no such order.
        """
        buckets = list(buckets)
        for launch in (launch for program in programs for launch in program.launches):
            look = _look(launch)
            if look in self._orders:
                continue
            times = []
            for bucket in buckets:
                found = self.alternatives(launch, bucket)
                measured = self._stored.times(found)[0] if self._stored is not None else {}
                times.append([(c.spec, measured.get(c.spec.name, c.cost)) for c in found.candidates])
            order = choose_order(times)
            if order is None:
                names = sorted({spec.name for bucket_times in times for spec, _ in bucket_times})
                raise InputError(
                    f"--batch-invariant: no {self._target} kernels for node {launch.node} ({launch.op}) sum in one "
                    f"order in all buckets (there are {', '.join(names)}): leave it out"
                )
            self._orders[look] = order

    def choose(self, program: Program, bucket: Bucket) -> Program:
        """The program with a kernel for every launch, at the bucket's capacities.

        Raises InputError listing each candidate of a node and why it said no.
        """
        return replace(program, launches=tuple(self._choose(launch, bucket) for launch in program.launches))

    def alternatives(self, launch: Launch, bucket: Bucket) -> Alternatives:
        """The kernels that can compute the launch at the bucket's capacities.

        Raises InputError listing each candidate and why it said no, if there is none.
        """
        look = _look(launch), bucket
        if look not in self._alternatives:
            self._alternatives[look] = self._find(launch, bucket)
        found = self._alternatives[look]
        if not found.candidates:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in found.refused.items())
            raise InputError(
                f"no {self._target} kernel for node {launch.node} ({launch.op}): "
                f"{reasons or 'no kernel computes this op'}"
            )
        return found

    def _find(self, launch: Launch, bucket: Bucket) -> Alternatives:
        candidates: list[Candidate] = []
        refused: dict[str, str] = {}
        possible: list[KernelSpec] = []  # refused by these sizes at most
        all_sizes: dict[str, int] = {"num_sms": self._gpu.num_sms if self._gpu is not None else 0}
        read: set[str] = set()
        for spec in self._by_op.get(launch.op, ()):
            reason = why_not(spec, launch)
            cost, shape = 0.0, None
            if not reason:
                possible.append(spec)
                if isinstance(spec, CudaKernelSpec):
                    assert self._gpu is not None, "CUDA kernels of a CPU target"
                    all_sizes = {**_sizes(spec, launch, bucket), **all_sizes}
                    sizes = ReadSizes({**_sizes(spec, launch, bucket), "num_sms": self._gpu.num_sms}, read)
                    reason = spec.why_not(sizes) or why_not_on(spec, self._gpu, sizes)
                    if not reason:
                        cost, shape = spec.cost(sizes), _launch_shape(spec, sizes)
            if reason:
                refused[spec.name] = reason
            else:
                candidates.append(Candidate(spec, cost, shape))
        key = tactic_key(launch, possible, all_sizes, read)
        return Alternatives(key, tuple(candidates), refused)

    def _choose(self, launch: Launch, bucket: Bucket) -> Launch:
        found = self.alternatives(launch, bucket)
        look, order = (_look(launch), bucket), self._orders.get(_look(launch))
        if look not in self._decisions:
            self._decisions[look] = decide(found, self._stored, order)
        chosen, tactic = self._decisions[look]
        if chosen.shape is not None:
            self.tactics.setdefault(tactic.key.text, tactic).launches += 1
        spec = chosen.spec
        if spec.name not in self.uses:
            refused = dict(found.refused)
            for candidate in found.candidates:
                if candidate.spec is not spec:
                    refused[candidate.spec.name] = _why_second(candidate, spec, tactic, order)
            self.uses[spec.name] = KernelUse(launch.op, refused=refused)
        self.uses[spec.name].launches += 1
        return replace(launch, spec=spec, shape=chosen.shape)


def _why_second(candidate: Candidate, taken: KernelSpec, tactic: TacticUse, order: str | None) -> str:
    """Why a candidate was not taken."""
    if order is not None and row_order(candidate.spec) != order:
        return f"--batch-invariant: sums in another order than {order}"
    by_time = " by measured times" if tactic.origin == "measured" else ""
    estimate = f" (estimate {candidate.cost:.1f} us)" if candidate.cost else ""
    return f"{taken.name} comes first{by_time}{estimate}"


def _look(launch: Launch) -> Hashable:
    """What beside the bucket the choice of a kernel depends on: launches of equal looks have the same candidates."""
    views = tuple(map(_view_look, (*launch.inputs, *launch.outputs)))
    return launch.op, len(launch.inputs), views, tuple(sorted(launch.attributes.items()))


def _view_look(view: View | None) -> Hashable:
    if view is None:
        return None
    storage = view.storage
    is_weight = storage.memory_class == MemoryClass.WEIGHTS
    offset = view.offset if is_weight else 0
    return storage.memory_class, storage.dtype, storage.shape, offset, view.shape, view.strides


def _launch_shape(spec: CudaKernelSpec, sizes: Sizes) -> LaunchShape:
    return LaunchShape(
        grid=spec.grid(sizes),
        threads=spec.threads,
        cluster=spec.cluster,
        shared_bytes=spec.shared_bytes(sizes),
        scratch_bytes=spec.scratch_bytes(sizes),
        counters_bytes=spec.counters_bytes(sizes),
    )


def _sizes(spec: KernelSpec, launch: Launch, bucket: Bucket) -> dict[str, int]:
    """Integer parameters by name, and the bucket's capacities."""
    capacities = bucket_capacities(bucket)
    sizes = {**capacities, "rows": capacities["max_tokens"]}
    for parameter in spec.parameters:
        if parameter.type == "i":
            sizes[parameter.name] = int(scalar_value(launch, parameter.binding, max_rows=0))
        if parameter.name == "count":
            sizes["rows"] = (bucket.max_tokens, bucket.max_seqs, bucket.max_logits)[sizes["count"]]
    return sizes


def scalar_value(launch: Launch, binding: str, max_rows: int) -> int | float:
    """What a parameter that isn't an address is bound to (models/kernel_spec.py lists the bindings)."""
    if binding == "zero":
        return 0
    name, _, what = binding.partition(".")
    if name == "attr":
        return launch.attributes[what]
    view = operand(launch, name)
    assert view is not None, f"{launch.node}: {binding} of an absent operand"
    if what == "stride0":
        return view.strides[0]
    if what == "itemsize":
        return view.storage.itemsize
    if what == "count":
        symbol = symbol_of(view.shape[0])
        assert symbol in SYMBOLS, f"{launch.node}: dim 0 of {name} is not a live count"
        return SYMBOLS.index(symbol)
    assert what.startswith("dim"), binding
    size = view.shape[int(what[3:])]
    if symbol_of(size) == "max_rows":  # the engine's, not a bucket's capacity
        return max_rows
    assert isinstance(size, int), f"{launch.node}: {binding} is {size}, expected a known integer"
    return size


def operand(launch: Launch, name: str) -> View | None:
    """The view of "in0", "in1", ... (None if absent) or "out0", ..."""
    if name.startswith("in"):
        index = int(name[2:])
        return launch.inputs[index] if index < len(launch.inputs) else None
    return launch.outputs[int(name[3:])]


def why_not(spec: KernelSpec, launch: Launch) -> str:
    """Why this kernel can't compute the launch, "" if it can."""
    if spec.weight_input >= 0:
        weight = launch.inputs[spec.weight_input]
        if weight is None or weight.storage.memory_class != MemoryClass.WEIGHTS:
            return f"input {spec.weight_input} is not a parameter"
        if weight.storage.dtype != spec.scheme:
            return f"reads {spec.scheme} weights, not {weight.storage.dtype}"
        if weight.offset or weight.shape != weight.storage.shape:
            return f"needs all of {weight.storage.name}, not a view into it"
    for index, view in enumerate(launch.inputs):
        if view is None or view.storage.memory_class != MemoryClass.WEIGHTS or index == spec.weight_input:
            continue
        if view.storage.dtype != "f32":
            return f"reads input {index} as f32, not {view.storage.dtype}"
    if isinstance(spec, CudaKernelSpec):
        for name, dtype in spec.operands.items():
            view = operand(launch, name)
            if view is not None and view.storage.dtype != dtype:
                return f"takes {name} as {dtype}, not {view.storage.dtype}"
    if spec.cache_dtype:
        dtype = _cache_dtype(spec, launch)
        if dtype != spec.cache_dtype:
            return f"works on a {spec.cache_dtype} cache, not {dtype}"
    if spec.k_multiple > 1:
        last = launch.inputs[max(spec.weight_input, 0)]
        k = last.shape[-1] if last is not None and last.shape else 0
        if not isinstance(k, int) or k % spec.k_multiple:
            return f"needs k to be a multiple of {spec.k_multiple}, not {k}"
    return _why_not_strides(spec, launch)


def needs_flat_rows(spec_op: str) -> bool:
    """Whether the op's kernels see every operand as [rows, dim]."""
    return spec_op in ("add", "mul", "silu", "silu_mul", "silu_mul_q8", "silu_mul_fp8")


def _why_not_strides(spec: KernelSpec, launch: Launch) -> str:
    """Kernels take a stride between rows only where they have a stride parameter for that operand."""
    strided = {p.binding.split(".")[0] for p in spec.parameters if p.binding.endswith(".stride0")}
    for kind, views in (("in", launch.inputs), ("out", launch.outputs)):
        for index, view in enumerate(views):
            if view is None or view.storage.memory_class in (MemoryClass.WEIGHTS, MemoryClass.CACHE):
                continue
            operand = f"{kind}{index}"
            dense_from = 1 if operand in strided and index not in _must_be_dense(spec, kind) else 0
            if not is_dense(view, dense_from):
                shape = tuple(format_dim(dim) for dim in view.shape)
                return f"{operand} has strides {view.strides} over {shape}, which it can't address"
    return ""


def _must_be_dense(spec: KernelSpec, kind: str) -> tuple[int, ...]:
    return spec.dense_inputs if kind == "in" else spec.dense_outputs


def _cache_dtype(spec: KernelSpec, launch: Launch) -> str:
    for parameter in spec.parameters:
        if parameter.name == "cache":
            view: View | None = launch.inputs[int(parameter.binding[2:].split(".")[0])]
            return view.storage.dtype if view is not None else "absent"
    return "absent"
