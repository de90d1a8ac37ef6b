"""The reverse of emission: a plan as readable records, for tests, dry runs and bug reports."""

import struct
from dataclasses import dataclass

import numpy as np

from castiron.models.kernel_spec import TYPE_CODES
from castiron.plugins_cpu.specs import SPECS
from castiron.runtime.plan_format import MemoryClass, Plan, PlanArrays, PlanHeader, RecordFlag


@dataclass(frozen=True)
class Address:
    """A relocated parameter."""

    memory_class: MemoryClass
    target_index: int
    offset: int  # bytes
    extent: int  # bytes


@dataclass(frozen=True)
class DescribedRecord:
    """One launch with its parameters by name; None is a null address."""

    kernel: str
    parameters: dict[str, Address | int | float | None]
    dependencies: tuple[int, ...]  # record indices in the same plan
    has_barrier: bool


def describe_plan(header: PlanHeader, arrays: PlanArrays, plan: Plan) -> list[DescribedRecord]:
    """The plan's records in order."""
    stop = plan.records_start + plan.records_count
    return [_describe(header, arrays, record) for record in arrays.records[plan.records_start : stop]]


def _describe(header: PlanHeader, arrays: PlanArrays, record: np.void) -> DescribedRecord:
    name = header.kernels[int(record["kernel"])].name
    start = int(record["params_offset"])
    block = arrays.params[start : start + int(record["params_bytes"])].tobytes()
    relocations = _part(arrays.relocations, record, "relocations")
    addresses = {
        int(r["param_offset"]): Address(
            MemoryClass(int(r["memory_class"])),
            int(r["target_index"]),
            int(r["target_offset"]),
            int(r["extent_bytes"]),
        )
        for r in relocations
    }
    parameters: dict[str, Address | int | float | None] = {}
    offset = 0
    for parameter in SPECS[name].parameters:
        code = "<" + TYPE_CODES[parameter.type]
        if parameter.type == "p":
            parameters[parameter.name] = addresses.pop(offset, None)
        else:
            parameters[parameter.name] = struct.unpack_from(code, block, offset)[0]
        offset += struct.calcsize(code)
    assert not addresses, f"relocations of {name} at {sorted(addresses)} fill no parameter"
    return DescribedRecord(
        kernel=name,
        parameters=parameters,
        dependencies=tuple(int(d) for d in _part(arrays.dependencies, record, "dependencies")),
        has_barrier=bool(int(record["flags"]) & RecordFlag.BARRIER),
    )


def _part(array: np.ndarray, record: np.void, what: str) -> np.ndarray:
    start = int(record[f"{what}_start"])
    return array[start : start + int(record[f"{what}_count"])]
