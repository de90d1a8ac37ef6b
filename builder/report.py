"""report.json: what the builder decided and why. The same inputs give the same report: no timings in it."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from castiron.builder.parameters import Parameter
from castiron.builder.pipeline import PassResult
from castiron.builder.plan.planner import PlannedEngine
from castiron.builder.plan.tactics import PRUNE_FACTOR, TacticUse
from castiron.builder.plan.tuning import PlannedTuning
from castiron.builder.plan.weights import WeightsLayout

MEMBER = "report.json"


def make_report(
    passes: list[PassResult],
    planned: PlannedEngine,
    layout: WeightsLayout,
    parameters: Iterable[Parameter],
    quantization_error: float,
    golden_level: str,
    warnings: Iterable[str],
    batch_invariant: bool,
    row_stable: bool,
    tuning: PlannedTuning | None = None,
) -> dict[str, Any]:
    """The report as JSON data. tuning: of a tuning engine."""
    header = planned.header
    report: dict[str, Any] = {
        "passes": passes,
        "kernels": {
            name: {"op": use.op, "launches": use.launches, "refused": use.refused}
            for name, use in planned.kernels.items()
        },
        "plans": {
            plan.name: {
                "records": plan.records_count,
                "barriers": planned.barriers[plan.name],
                "bucket": plan.bucket,
                "arena_bytes_unshared": planned.arena_values_bytes[plan.name],
            }
            for plan in header.plans
        },
        "views": planned.num_views,
        "copies_inserted": 0,  # a view no kernel can read is an error
        "arena_bytes": header.arena_bytes,
        "schemes": scheme_sizes(parameters, layout),
        "quantization_error": quantization_error,
        "golden": golden_level,
        "batch_invariant": {"asked": batch_invariant, "row_stable": row_stable},
        "warnings": list(warnings),
    }
    if tuning is None:
        report["tactics"] = _tactics(planned.tactics.values())
    else:
        report["tuning"] = {
            "keys": len(tuning.info.cases),
            "candidates": sum(len(case.candidates) for case in tuning.info.cases),
            "left_out_by_estimate": {"candidates": tuning.num_pruned, "above_best_times": PRUNE_FACTOR},
        }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(report))
    return plain


def _tactics(uses: Collection[TacticUse]) -> dict[str, Any]:
    """How kernels were chosen, and for each key which: inspect-engine --tactics shows it."""
    origins = Counter(use.origin for use in uses)
    return {
        "measured": origins["measured"],
        "by_cost_model": origins["stale"] + origins["untuned"],
        "stale": origins["stale"],  # of those by cost model: times of other kernels or another compiler
        "keys": [
            {
                "key": use.key,
                "kernel": use.kernel,
                "origin": use.origin,
                "us": round(use.us, 3),
                "runners_up": {kernel: round(us, 3) for kernel, us in use.runners_up},
                "launches": use.launches,
            }
            for use in uses
        ],
    }


def scheme_sizes(parameters: Iterable[Parameter], layout: WeightsLayout) -> dict[str, dict[str, int]]:
    """Scheme -> how many parameters are stored in it, and their bytes."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for parameter in parameters:
        counts[parameter.scheme] += 1
        sizes[parameter.scheme] += layout.places[parameter.name][1]
    return {scheme: {"parameters": counts[scheme], "bytes": sizes[scheme]} for scheme in sorted(counts)}


def encode_report(report: dict[str, Any]) -> bytes:
    """The engine member."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)
