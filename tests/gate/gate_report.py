"""The gate: is a low-precision engine as good as its float32 reference, position by position?

Teacher-forced over many positions. Per position, regret is the reference's logprob of its own top-1 minus its
logprob of our top-1: zero when we agree, small at near ties, so it tells harmless flips from damage.
"""

from dataclasses import dataclass

import numpy as np

MAX_REGRET_BASE, MAX_REGRET_SLOPE = 0.30, 0.35
MIN_SAME_TOP1 = 0.95
MAX_MEAN_DELTA, MAX_P99_DELTA = 0.05, 0.50
MIN_GREEDY_COVERAGE = 0.60


@dataclass(frozen=True)
class GateReport:
    num_positions: int
    same_top1: float  # share of positions
    worst_regret_excess: float  # max over positions of regret - bound; <= 0 passes
    mean_delta: float  # |logprob difference| over the reference's top 8
    p99_delta: float

    def failures(self) -> list[str]:
        """The conditions that do not hold, in words; empty when the gate is passed."""
        checks = (
            (self.worst_regret_excess <= 0, f"regret exceeds its bound by {self.worst_regret_excess:.3f}"),
            (self.same_top1 >= MIN_SAME_TOP1, f"same top-1 {self.same_top1:.3f} < {MIN_SAME_TOP1}"),
            (self.mean_delta <= MAX_MEAN_DELTA, f"mean delta {self.mean_delta:.4f} > {MAX_MEAN_DELTA}"),
            (self.p99_delta <= MAX_P99_DELTA, f"p99 delta {self.p99_delta:.3f} > {MAX_P99_DELTA}"),
        )
        return [text for holds, text in checks if not holds]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Row-wise log-softmax, float32; the sum over the vocabulary in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)


@dataclass(frozen=True)
class _Positions:
    """Per position: whether top-1 agrees, regret minus its bound; |difference| over the reference's top 8."""

    same: np.ndarray
    excess: np.ndarray
    delta: np.ndarray


def _compare(reference: np.ndarray, ours: np.ndarray) -> _Positions:
    reference_logprobs, our_logprobs = log_softmax(reference), log_softmax(ours)
    rows = np.arange(len(reference))
    best, chosen = reference_logprobs.argmax(axis=1), our_logprobs.argmax(axis=1)
    best_logprob = reference_logprobs[rows, best]
    regret = best_logprob - reference_logprobs[rows, chosen]
    top8 = np.argpartition(-reference_logprobs, 8, axis=1)[:, :8]
    difference = np.take_along_axis(reference_logprobs, top8, 1) - np.take_along_axis(our_logprobs, top8, 1)
    bound = MAX_REGRET_BASE + MAX_REGRET_SLOPE * -best_logprob
    return _Positions(best == chosen, regret - bound, np.abs(difference))


def measure(reference: list[np.ndarray], ours: list[np.ndarray]) -> GateReport:
    """Compare the reference's logits with ours on the same inputs, arrays [positions, vocab] piece by piece."""
    pieces = []
    for expected, got in zip(reference, ours, strict=True):
        assert expected.shape == got.shape
        pieces.append(_compare(expected, got))
    delta = np.concatenate([piece.delta for piece in pieces])
    return GateReport(
        num_positions=sum(len(piece.same) for piece in pieces),
        same_top1=float(np.concatenate([piece.same for piece in pieces]).mean()),
        worst_regret_excess=float(max(piece.excess.max() for piece in pieces)),
        mean_delta=float(delta.mean()),
        p99_delta=float(np.quantile(delta, 0.99)),
    )


def quantized_failures(
    exact: list[np.ndarray], reference: list[np.ndarray], ours: list[np.ndarray]
) -> list[str]:
    """What doesn't hold of an engine that rounds activations to float8, in words.

    Rounding is a step: a difference of one bfloat16 unit in front of it may become one of 1/8, so that two right
    implementations of a tiny random model differ by more than the gate allows. The measure is what rounding itself
    does: `exact` logits are those of the same weights without rounded activations, `reference` those with. Ours must
    be as near to the exact ones as the reference is, and no further from the reference than if the errors of both had
    nothing in common (the root of 2, and a little).
    """
    noise, found, total = (measure(*pair) for pair in ((exact, reference), (reference, ours), (exact, ours)))
    checks = (
        ("mean delta from the reference", found.mean_delta, 1.5 * noise.mean_delta),
        ("p99 delta from the reference", found.p99_delta, 1.6 * noise.p99_delta),
        ("mean delta from the exact logits", total.mean_delta, 1.15 * noise.mean_delta),
        ("p99 delta from the exact logits", total.p99_delta, 1.25 * noise.p99_delta),
    )
    return [f"{name} {value:.4f} > {bound:.4f}" for name, value, bound in checks if not value <= bound]


def greedy_coverage(reference: list[list[int]], ours: list[list[int]]) -> float:
    """Share of tokens before the first difference, over all sequences."""
    same = total = 0
    for expected, got in zip(reference, ours, strict=True):
        total += len(expected)
        for left, right in zip(expected, got, strict=False):
            if left != right:
                break
            same += 1
    return same / total


def perplexity(logits: np.ndarray, token_ids: list[int], start: int) -> float:
    """exp of the mean negative logprob of token_ids[start + 1:], each predicted by the position before it."""
    logprobs = log_softmax(logits[start:-1])
    targets = np.array(token_ids[start + 1 :])
    return float(np.exp(-logprobs[np.arange(len(targets)), targets].mean()))
