"""Verifies an engine on this machine: every member's hash, then its golden values through the device."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from castiron.runtime.devices.base import Device
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_purpose import is_tuning
from castiron.runtime.golden import GOLDEN_MEMBER, Comparison, GoldenCase, compare, read_golden
from castiron.runtime.golden_forward import blocks_needed, sequence_logits
from castiron.runtime.load_engine import open_device
from castiron.runtime.manifest import QuantizationInfo

MAX_DECODED = 8  # tokens a case that go through the decode plan in the second pass


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    name: str
    passed: bool
    detail: str
    skipped: bool = False  # not done, which is no pass either
    values: dict[str, float] = field(default_factory=dict)


def verify_engine(
    engine_file: EngineFile, num_threads: int | None, report: Callable[[Check], None]
) -> list[Check]:
    """All checks, each also given to `report` as it is done.

    An engine with a damaged member isn't run: its golden checks are reported as
    skipped. Raises EngineTargetError if the engine can't run here.
    """
    checks: list[Check] = []

    def add(check: Check) -> None:
        checks.append(check)
        report(check)

    def add_hash(name: str, matches: bool) -> None:
        add(
            Check(
                f"sha256 {name}",
                matches,
                "matches" if matches else "differs from engine.json: the member is damaged",
            )
        )

    damaged = engine_file.verify_hashes(add_hash)
    if damaged:
        detail = f"skipped, an engine with a damaged member is not run ({', '.join(damaged)})"
        add(Check("golden", False, detail, skipped=True))
        return checks
    if is_tuning(engine_file):
        add(Check("golden", True, "a tuning engine computes no model's values: hashes only"))
        return checks
    if not engine_file.has(GOLDEN_MEMBER):
        add(Check("golden", True, "the engine holds no golden values (report.json says why): hashes only"))
        return checks
    for check in _verify_golden(engine_file, num_threads):
        add(check)
    return checks


def _verify_golden(engine_file: EngineFile, num_threads: int | None) -> list[Check]:
    cases = read_golden(engine_file)
    header, _ = engine_file.plan()
    longest = max(len(case.token_ids) for case in cases)
    device = open_device(engine_file, blocks_needed(header, longest), num_threads)
    try:
        quantization = engine_file.manifest.quantization
        prefilled = [(case, sequence_logits(device, case.token_ids, case.rows, 0)) for case in cases]
        decoded = [_decoded_logits(device, case) for case in cases]
    finally:
        device.close()
    return [
        _golden_check("golden prefill", prefilled, quantization),
        _golden_check("golden decode", decoded, quantization),
    ]


def _decoded_logits(device: Device, case: GoldenCase) -> tuple[GoldenCase, np.ndarray]:
    """The case again, its last tokens one a step through the decode plan."""
    num_decoded = min(MAX_DECODED, len(case.token_ids))
    return case, sequence_logits(device, case.token_ids, case.rows, num_decoded)


def _golden_check(
    name: str, cases: list[tuple[GoldenCase, np.ndarray]], quantization: QuantizationInfo
) -> Check:
    compute = quantization.compute
    comparisons: list[Comparison] = compare(cases, compute, quantization.schemes)
    num_rows = sum(len(case.rows) for case, _ in cases)
    measured = ", ".join(f"{c.measure} {c.value:.3g} (limit {c.limit:.3g})" for c in comparisons)
    values = {c.measure: c.value for c in comparisons}
    passed = all(c.passed for c in comparisons)
    detail = f"{len(cases)} cases, {num_rows} rows, {compute} compute: {measured}"
    return Check(name, passed, detail, values=values)
