"""bench-engine tune: times the candidate kernels of a tuning engine on this machine's GPU.

A candidate's plan is a chain of one launch over distinct weights and caches (builder/plan/tuning.py). Its time is
that of the chain's graph by events, divided by its launches: the median of ROUNDS rounds, which take turns over
a case's candidates so that a drift of the clocks meets all of them alike. Who is far behind after the first round
is not measured again.
"""

import datetime
import shlex
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from castiron.configs.tuning_results import FORMAT, MeasuredKernel, TuningResult, TuningResults
from castiron.runtime.tuning_format import LiveCounts, TuningCase, TuningInfo

ROUNDS = 3
FAR_BEHIND = 1.25  # times the best
_TABLE_NAMES = 60  # characters of a key that the table shows
# name of a GPU -> bytes/s of its memory, dense flop/s of its tensor cores with bf16 and with 8-bit operands.
# Source: NVIDIA's data sheets of the H200 and H100 SXM.
_LIMITS = {"NVIDIA H200": (4.8e12, 989e12, 1979e12), "NVIDIA H100 80GB HBM3": (3.35e12, 989e12, 1979e12)}


class LaunchTimer(Protocol):
    """Times plans of a tuning engine; cuda_timer.py has the GPU's."""

    gpu: str
    driver: str

    def prepare(self, case: TuningCase) -> None:
        """Get ready to time the case's plans, in any order."""
        ...

    def chain_us(self, plan: int) -> float:
        """µs of one run of the plan."""
        ...


def measure(
    info: TuningInfo, timer: LaunchTimer, argv: Sequence[str], progress: Callable[[str], None]
) -> TuningResults:
    """Time every case; `progress` gets a line of the table after each, the heading before all."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    progress(heading())
    results = []
    for case in info.cases:
        timer.prepare(case)
        times = _times(case, timer)
        measured = [
            MeasuredKernel(candidate.kernel, candidate.source_hash, round(us, 4))
            for candidate, us in zip(case.candidates, times, strict=True)
        ]
        result = TuningResult(
            key=case.key,
            live=case.live,
            copies=case.copies,
            distinct_bytes=case.distinct_bytes,
            candidates=tuple(sorted(measured, key=lambda one: one.us)),  # the first of equals stays first
            date=date,
            driver=timer.driver,
            compiler=info.compiler,
            command=shlex.join(["bench-engine", *argv]),
        )
        results.append(result)
        progress(table_line(case, result, timer.gpu))
    return TuningResults(FORMAT, info.target, timer.gpu, tuple(results))


def _times(case: TuningCase, timer: LaunchTimer) -> list[float]:
    """µs of a launch, by candidate."""
    times = [[timer.chain_us(candidate.plan) / case.copies] for candidate in case.candidates]
    limit = FAR_BEHIND * min(first[0] for first in times)
    for _ in range(ROUNDS - 1):
        for candidate, own in zip(case.candidates, times, strict=True):
            if own[0] <= limit:
                own.append(timer.chain_us(candidate.plan) / case.copies)
    return [float(np.median(own)) for own in times]


def heading() -> str:
    """Of the table."""
    return (
        f"{'op, sizes':{_TABLE_NAMES}} {'best kernel':36}{'us':>10}{'limit':>7}  "
        f"{'second, us':48}  by the cost model, us"
    )


def table_line(case: TuningCase, result: TuningResult, gpu: str) -> str:
    """The case's fastest two, the share of the GPU's limit, and what the cost model would have taken."""
    best = result.candidates[0]
    second = "-"
    if len(result.candidates) > 1:
        second = f"{result.candidates[1].kernel} {result.candidates[1].us:.2f}"
    guess = next(c for c in result.candidates if c.kernel == case.candidates[0].kernel)
    guessed = "the same" if guess is best else f"{guess.kernel} {guess.us:.2f}"
    share = share_of_limit(case, best.us, gpu)
    limit = "-" if share is None else f"{share:.0%}"
    hidden = ("num_sms",)
    sizes = " ".join(f"{name}={value}" for name, value in case.key.sizes.items() if name not in hidden)
    name = f"{case.key.op} {case.key.scheme} {sizes}".replace("  ", " ")
    return f"{name:{_TABLE_NAMES}} {best.kernel:36}{best.us:10.2f}{limit:>7}  {second:48}  {guessed}"


def share_of_limit(case: TuningCase, us: float, gpu: str) -> float | None:
    """Time the GPU's memory or tensor cores need at least, over `us`; None for a GPU whose limits aren't known."""
    if gpu not in _LIMITS:
        return None
    bytes_per_s, bf16_flops, byte_flops = _LIMITS[gpu]
    flops_per_s = bf16_flops if case.key.operands.startswith("bf16") else byte_flops
    least_s = max(case.launch_bytes / bytes_per_s, case.launch_flops / flops_per_s)
    return least_s * 1e6 / us


def tokens_of_sequences(live: LiveCounts) -> np.ndarray:
    """How many of the step's tokens each sequence has, int32 [num_seqs], as even as can be."""
    each, rest = divmod(live.num_tokens, live.num_seqs)
    return each + (np.arange(live.num_seqs, dtype=np.int32) < rest).astype(np.int32)


def blocks_needed(info: TuningInfo, block_size: int) -> int:
    """Cache blocks of the case that has most tokens in its cache."""
    return max(case.live.num_seqs * -(-case.live.context // block_size) for case in info.cases)
