"""Launches become plan records: parameter blocks from the kernels' bindings, relocations, dependencies."""

from dataclasses import dataclass, field

import numpy as np

from castiron.builder.plan.hazards import Access, HazardTracker
from castiron.builder.plan.launches import Launch, Program
from castiron.builder.plan.params import Placement, Relocation, TensorMaps, address, fill_params
from castiron.models.kernel_spec import KernelSpec
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.runtime.plan_format import (
    RECORD_DTYPE,
    RELOCATION_DTYPE,
    Kernel,
    MemoryClass,
    Plan,
    PlanArrays,
    RecordFlag,
    RecordKind,
)
from castiron.runtime.step_abi import Bucket


def cubin_member(spec: CudaKernelSpec) -> str:
    """Where the engine file keeps a CUDA kernel."""
    return f"kernels/{spec.name}.cubin"


@dataclass
class PlanEmitter:
    """Collects the records of all plans of one engine."""

    has_programmatic_edges: (
        bool  # of the target; without them a CUDA kernel waits for the end of the one before
    )
    _kernels: dict[str, int] = field(default_factory=dict)
    _kernel_records: list[Kernel] = field(default_factory=list)
    _records: list[np.ndarray] = field(default_factory=list)
    _params: bytearray = field(default_factory=bytearray)
    _relocations: list[Relocation] = field(default_factory=list)
    _dependencies: list[int] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    tensor_maps: TensorMaps = field(default_factory=TensorMaps)
    kernel_specs: dict[str, KernelSpec] = field(default_factory=dict)  # by name, in order of first use

    def add_plan(
        self, program: Program, kind: str, ladder: str, name: str, bucket: Bucket, placement: Placement
    ) -> Plan:
        """Append one plan.

        On the CPU a record gets a barrier if it depends on one that no barrier has closed yet. On CUDA the
        records are a chain, of programmatic edges where the target has them: each kernel waits for the one
        before it, which waited for all others.
        """
        start = len(self._records)
        tracker = HazardTracker()
        last_barrier = 0
        for index, launch in enumerate(program.launches):
            if launch.shape is not None:
                is_programmatic = index > 0 and self.has_programmatic_edges
                flags = RecordFlag.PDL_IN_EDGE if is_programmatic else RecordFlag(0)
                self._add_record(launch, placement, [index - 1] if index else [], flags)
                continue
            dependencies = tracker.add(index, accesses(launch, placement))
            is_barrier = index == 0 or any(earlier >= last_barrier for earlier in dependencies)
            if is_barrier:
                last_barrier = index
            self._add_record(launch, placement, dependencies, RecordFlag(int(is_barrier)))
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
        self, launch: Launch, placement: Placement, dependencies: list[int], flags: RecordFlag
    ) -> None:
        assert launch.spec is not None
        block, relocations = fill_params(launch, placement, self.tensor_maps)
        record = np.zeros((), RECORD_DTYPE)
        record["kind"] = RecordKind.KERNEL
        record["flags"] = flags
        record["kernel"] = self._kernel_index(launch.spec, len(block))
        record["params_bytes"] = len(block)
        record["params_offset"] = len(self._params)
        record["relocations_start"] = len(self._relocations)
        record["relocations_count"] = len(relocations)
        record["dependencies_start"] = len(self._dependencies)
        record["dependencies_count"] = len(dependencies)
        if launch.shape is not None:
            record["grid"], record["block"] = launch.shape.grid, (launch.shape.threads, 1, 1)
            record["cluster"], record["shared_bytes"] = launch.shape.cluster, launch.shape.shared_bytes
        self._records.append(record)
        self._params += block
        self._relocations += relocations
        self._dependencies += dependencies

    def _kernel_index(self, spec: KernelSpec, params_bytes: int) -> int:
        if spec.name not in self._kernels:
            self._kernels[spec.name] = len(self._kernels)
            member, entry = "", ""
            if isinstance(spec, CudaKernelSpec):
                member, entry = cubin_member(spec), spec.entry
            self._kernel_records.append(Kernel(spec.name, params_bytes, member, entry))
            self.kernel_specs[spec.name] = spec
        return self._kernels[spec.name]


def accesses(launch: Launch, placement: Placement) -> list[Access]:
    """Byte ranges the launch reads and writes in memory that a plan changes."""
    found = []
    for views, is_write in ((launch.inputs, False), (launch.outputs, True)):
        for view in views:
            if view is None or view.storage.memory_class in (MemoryClass.WEIGHTS, MemoryClass.STEP):
                continue
            start, extent = address(view, placement)
            space = (int(view.storage.memory_class), view.storage.target_index)
            found.append(Access(space, start, start + extent, is_write))
    return found
