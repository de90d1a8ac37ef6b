"""All an engine file says about itself, as one machine-readable object."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np

from castiron.runtime.engine_file import EngineFile
from castiron.runtime.plan_check import step_bytes
from castiron.runtime.plan_format import PlanArrays, PlanHeader, RecordFlag

REPORT_MEMBER = "report.json"


def summarize(engine_file: EngineFile) -> dict[str, Any]:
    """manifest (as stored), file, memory, plans, kernels, cache and the builder's report, JSON-ready.

    Raises EngineFormatError if a small member is damaged; weights are not read.
    """
    header, arrays = engine_file.plan()
    return {
        "path": str(engine_file.path),
        "file_bytes": engine_file.path.stat().st_size,
        "manifest": msgspec.to_builtins(engine_file.manifest),
        "memory": memory_plan(header),
        "cache_groups": msgspec.to_builtins(header.cache_groups),
        "cache_tensors": msgspec.to_builtins(header.cache_tensors),
        "plans": plan_entries(header, arrays),
        "kernels": kernel_counts(header, arrays),
        "report": read_report(engine_file),
    }


def memory_plan(header: PlanHeader) -> dict[str, int]:
    """Bytes of each memory class; of the cache, per block of a group."""
    names = ("weights", "arena", "rows", "counters", "exchange", "staging")
    memory = {name: int(getattr(header, f"{name}_bytes")) for name in names}
    memory["step"] = max(step_bytes(header, plan) for plan in header.plans)
    for group in header.cache_groups:
        tensors = [tensor for tensor in header.cache_tensors if tensor.group == group.name]
        memory[f"cache.{group.name}.block"] = sum(tensor.block_bytes for tensor in tensors)
    return memory


def plan_entries(header: PlanHeader, arrays: PlanArrays) -> list[dict[str, Any]]:
    """Each plan with its bucket, its number of records and barriers, and its kernels by count."""
    entries = []
    for plan in header.plans:
        records = arrays.records[plan.records_start : plan.records_start + plan.records_count]
        entries.append(
            {
                "name": plan.name,
                "kind": plan.kind,
                "ladder": plan.ladder,
                "bucket": msgspec.to_builtins(plan.bucket),
                "records": len(records),
                "barriers": int(np.count_nonzero(records["flags"] & RecordFlag.BARRIER)),
                "kernels": _count_kernels(header, records),
            }
        )
    return entries


def kernel_counts(header: PlanHeader, arrays: PlanArrays) -> dict[str, int]:
    """Records of each kernel over all plans, by name."""
    return _count_kernels(header, arrays.records)


def read_report(engine_file: EngineFile) -> Any:
    """The builder's report; {} if the engine has none."""
    if not engine_file.has(REPORT_MEMBER):
        return {}
    return engine_file.decode_json(REPORT_MEMBER)


def kernel_choices(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Each kernel with how often the plans launch it, its op and why other candidates weren't taken.

    Most launched first. `summary` is that of `summarize`; what the builder's report doesn't say is left out.
    """
    report = summary["report"].get("kernels", {}) if isinstance(summary["report"], dict) else {}
    choices = []
    for name, launches in sorted(summary["kernels"].items(), key=lambda item: (-item[1], item[0])):
        entry = report.get(name) if isinstance(report, dict) else None
        known = entry if isinstance(entry, dict) else {}
        refused = known.get("refused")
        choices.append(
            {
                "kernel": name,
                "launches": launches,
                "op": str(known.get("op", "")),
                "refused": refused if isinstance(refused, dict) else {},
            }
        )
    return choices


def tactic_choices(summary: dict[str, Any]) -> dict[str, Any]:
    """The report's account of how kernels were chosen, key by key; {} if it has none."""
    report = summary["report"]
    tactics = report.get("tactics") if isinstance(report, dict) else None
    return tactics if isinstance(tactics, dict) else {}


def _count_kernels(header: PlanHeader, records: np.ndarray) -> dict[str, int]:
    counts = Counter(header.kernels[index].name for index in records["kernel"].tolist())
    return dict(sorted(counts.items()))
