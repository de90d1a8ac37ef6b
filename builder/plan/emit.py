"""Launches become plan records: parameter blocks from the kernels' bindings, relocations, dependencies."""

import struct
from dataclasses import dataclass, field

import numpy as np

from castiron.builder.dims import Dim, evaluate_dim
from castiron.builder.graph import symbol_of
from castiron.builder.plan.hazards import Access, HazardTracker
from castiron.builder.plan.launches import Launch, Program
from castiron.builder.plan.views import Storage, View
from castiron.plugins_cpu.specs import TYPE_CODES, KernelSpec
from castiron.runtime.plan_format import (
    RECORD_DTYPE,
    RELOCATION_DTYPE,
    Kernel,
    MemoryClass,
    Plan,
    PlanArrays,
    RecordFlag,
    RecordKind,
    RelocationKind,
)
from castiron.runtime.step_abi import SYMBOLS, Bucket

_PARAMS_ALIGNMENT = 8


@dataclass(frozen=True)
class Placement:
    """Where storages are in one plan: byte offsets by name, and the capacities behind the symbols."""

    offsets: dict[tuple[MemoryClass, str], int]
    extents: dict[
        tuple[MemoryClass, str], int
    ]  # bytes, of storages without a dense shape (packed weights, caches)
    symbols: dict[str, int]  # num_tokens, num_seqs, num_logits at capacity


@dataclass
class PlanEmitter:
    """Collects the records of all plans of one engine."""

    _kernels: dict[str, int] = field(default_factory=dict)
    _kernel_records: list[Kernel] = field(default_factory=list)
    _records: list[np.ndarray] = field(default_factory=list)
    _params: bytearray = field(default_factory=bytearray)
    _relocations: list[tuple[int, ...]] = field(default_factory=list)
    _dependencies: list[int] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def add_plan(
        self, program: Program, kind: str, ladder: str, name: str, bucket: Bucket, placement: Placement
    ) -> Plan:
        """Append one plan. A record gets a barrier if it depends on one that no barrier has closed yet."""
        start = len(self._records)
        tracker = HazardTracker()
        last_barrier = 0
        for index, launch in enumerate(program.launches):
            dependencies = tracker.add(index, accesses(launch, placement))
            is_barrier = index == 0 or any(earlier >= last_barrier for earlier in dependencies)
            if is_barrier:
                last_barrier = index
            self._add_record(launch, placement, dependencies, is_barrier)
        plan = Plan(name, kind, ladder, bucket, start, len(program.launches))
        self.plans.append(plan)
        return plan

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels the records name, in order of first use."""
        return tuple(self._kernel_records)

    def arrays(self) -> PlanArrays:
        """The flat arrays of all plans so far."""
        return PlanArrays(
            records=np.array(self._records, RECORD_DTYPE),
            params=np.frombuffer(bytes(self._params), np.uint8),
            relocations=np.array(self._relocations, RELOCATION_DTYPE),
            dependencies=np.array(self._dependencies, np.uint32),
        )

    def _add_record(
        self, launch: Launch, placement: Placement, dependencies: list[int], is_barrier: bool
    ) -> None:
        assert launch.spec is not None
        block, relocations = _fill_params(launch, launch.spec, placement)
        record = np.zeros((), RECORD_DTYPE)
        record["kind"] = RecordKind.KERNEL
        record["flags"] = RecordFlag.BARRIER if is_barrier else 0
        record["kernel"] = self._kernel_index(launch.spec, len(block))
        record["params_bytes"] = len(block)
        record["params_offset"] = len(self._params)
        record["relocations_start"] = len(self._relocations)
        record["relocations_count"] = len(relocations)
        record["dependencies_start"] = len(self._dependencies)
        record["dependencies_count"] = len(dependencies)
        self._records.append(record)
        self._params += block
        self._relocations += relocations
        self._dependencies += dependencies

    def _kernel_index(self, spec: KernelSpec, params_bytes: int) -> int:
        if spec.name not in self._kernels:
            self._kernels[spec.name] = len(self._kernels)
            self._kernel_records.append(Kernel(spec.name, params_bytes))
        return self._kernels[spec.name]


def accesses(launch: Launch, placement: Placement) -> list[Access]:
    """Byte ranges the launch reads and writes in memory that a plan changes."""
    found = []
    for views, is_write in ((launch.inputs, False), (launch.outputs, True)):
        for view in views:
            if view is None or view.storage.memory_class in (MemoryClass.WEIGHTS, MemoryClass.STEP):
                continue
            start, extent = _address(view, placement)
            space = (int(view.storage.memory_class), view.storage.target_index)
            found.append(Access(space, start, start + extent, is_write))
    return found


def _fill_params(
    launch: Launch, spec: KernelSpec, placement: Placement
) -> tuple[bytes, list[tuple[int, ...]]]:
    """The raw parameter block (addresses zero) and the relocations that will fill them."""
    codes = "<"
    values: list[int | float] = []
    relocations: list[tuple[int, ...]] = []
    for parameter in spec.parameters:
        if parameter.type == "p":
            view = _operand(launch, parameter.binding.partition(".")[0])
            if view is None:
                assert parameter.binding.endswith("?"), f"{launch.node}: {parameter.binding} is required"
            else:
                start, extent = _address(view, placement)
                relocations.append(
                    (
                        struct.calcsize(codes),
                        RelocationKind.ADDRESS,
                        view.storage.memory_class,
                        view.storage.target_index,
                        start,
                        extent,
                        0,
                        0,
                    )
                )
            values.append(0)
        else:
            values.append(_value(launch, parameter.binding, placement.symbols))
        codes += TYPE_CODES[parameter.type]
    block = struct.pack(codes, *values)
    return block + bytes(-len(block) % _PARAMS_ALIGNMENT), relocations


def _value(launch: Launch, binding: str, symbols: dict[str, int]) -> int | float:
    """A parameter that isn't an address (see plugins_cpu/specs.py for the bindings)."""
    if binding == "zero":
        return 0
    operand, _, what = binding.partition(".")
    if operand == "attr":
        return launch.attributes[what]
    view = _operand(launch, operand)
    assert view is not None, f"{launch.node}: {binding} of an absent operand"
    if what == "stride0":
        return view.strides[0]
    if what == "count":
        symbol = symbol_of(view.shape[0])
        assert symbol in SYMBOLS, f"{launch.node}: dim 0 of {operand} is not a live count"
        return SYMBOLS.index(symbol)
    assert what.startswith("dim"), binding
    size: Dim = view.shape[int(what[3:])]
    if symbol_of(size) == "max_rows":  # the engine's, not a bucket's capacity
        return evaluate_dim(size, symbols)
    assert isinstance(size, int), f"{launch.node}: {binding} is {size}, expected a known integer"
    return size


def _operand(launch: Launch, name: str) -> View | None:
    if name.startswith("in"):
        index = int(name[2:])
        return launch.inputs[index] if index < len(launch.inputs) else None
    return launch.outputs[int(name[3:])]


def _address(view: View, placement: Placement) -> tuple[int, int]:
    """Byte offset in the memory class, and bytes a kernel may touch from there."""
    key = storage_key(view.storage)
    base = placement.offsets[key]
    if key in placement.extents:
        return base, placement.extents[key]
    itemsize = view.storage.itemsize
    return base + view.offset * itemsize, view.span_elements(placement.symbols) * itemsize


def storage_key(storage: Storage) -> tuple[MemoryClass, str]:
    """How a placement finds the storage."""
    return storage.memory_class, storage.name


def storage_bytes(storage: Storage, symbols: dict[str, int]) -> int:
    """Bytes of a dense storage at these capacities."""
    size = storage.itemsize
    for dim in storage.shape:
        size *= evaluate_dim(dim, symbols)
    return size
