"""Statistics of repeated measurements."""

from collections.abc import Sequence

import numpy as np


def summarize(values: Sequence[float]) -> dict[str, float]:
    """{"p50", "p99"} of measurements, in their own unit. Of few values p99 is close to the largest."""
    p50, p99 = np.percentile(np.asarray(values, dtype=np.float64), [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def summarize_rates(values: Sequence[float]) -> dict[str, float]:
    """As summarize, for rates: the bad end of a rate is its low one, so p99 is what 99 % reach."""
    p50, p1 = np.percentile(np.asarray(values, dtype=np.float64), [50, 1])
    return {"p50": float(p50), "p99": float(p1)}
