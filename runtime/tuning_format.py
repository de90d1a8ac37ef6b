"""Member `tuning.json` of a tuning engine: which kernels its plans time, and for which launches.

A tuning engine (`build-engine --tune`) serves no requests. Its plans are of kind "tune": each is a chain of one
launch, many times over distinct weights and caches, by one candidate kernel. `bench-engine tune` times them on
the GPU; builds then take the fastest (castiron/configs/tuning_results.py).
"""

import math

import msgspec

from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_purpose import is_tuning
from castiron.runtime.errors import EngineFormatError, InputError
from castiron.runtime.manifest_check import refuse
from castiron.runtime.plan_format import Plan, PlanHeader
from castiron.runtime.printable import printable

MEMBER = "tuning.json"
MAX_COPIES = 1 << 16


class TacticKey(msgspec.Struct, frozen=True):
    """What the choice of a kernel depends on; equal keys are one launch to every candidate."""

    op: str
    scheme: str  # of the weight matrix; "" where the launch reads none
    operands: str  # dtypes of inputs and outputs, "bf16 int4_g128 - -> bf16"; "-" = absent
    # the candidates' integer parameters, the bucket capacities their launch rules read, and num_sms
    sizes: dict[str, int]

    @property
    def text(self) -> str:
        """One line that equal keys share."""
        sizes = " ".join(f"{name}={value}" for name, value in sorted(self.sizes.items()))
        return f"{self.op} [{self.operands}] {sizes}"


class LiveCounts(msgspec.Struct, frozen=True):
    """The step a launch is timed with: its bucket at full capacity."""

    num_tokens: int  # shared evenly by the sequences
    num_seqs: int
    num_logits: int
    context: int  # tokens every sequence has, this step's included


class TuningCandidate(msgspec.Struct, frozen=True):
    kernel: str
    source_hash: str  # of what it is compiled from and how it is launched
    estimate_us: float  # the cost model's
    plan: int  # index of its plan


class TuningCase(msgspec.Struct, frozen=True):
    """One key and the kernels that compete for it."""

    key: TacticKey
    live: LiveCounts
    copies: int  # launches of each plan
    distinct_bytes: int  # of weights and caches that the copies read, all together
    launch_bytes: int  # that one launch must move
    launch_flops: int  # that one launch must do, 0 = unknown
    candidates: tuple[TuningCandidate, ...]  # cheapest estimate first: what the cost model takes


class TuningInfo(msgspec.Struct, frozen=True):
    target: str  # "sm_90"
    compiler: str  # of the kernels, "nvcc 13.0.88"
    cases: tuple[TuningCase, ...]


def read_tuning(engine_file: EngineFile) -> TuningInfo:
    """The checked member. Raises InputError for a serving engine, EngineFormatError if it doesn't fit the plans."""
    if not is_tuning(engine_file):
        raise InputError(
            f"{engine_file.path} is a serving engine, expected a tuning engine: build one with "
            "`build-engine MODEL --target sm_90 --tune`"
        )
    label = str(engine_file.path)
    try:
        info = msgspec.json.decode(engine_file.member(MEMBER), type=TuningInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(f"{label}: {MEMBER} is damaged: {error}; rebuild it") from error
    header, _ = engine_file.plan()
    if not info.cases:
        refuse(label, "it has no cases to time")
    for case in info.cases:
        _check_case(case, header, label)
    plans = [candidate.plan for case in info.cases for candidate in case.candidates]
    if len(set(plans)) != len(plans):
        refuse(label, "two candidates share a plan")
    return info


def _check_case(case: TuningCase, header: PlanHeader, label: str) -> None:
    what = f"case {printable(case.key.text, 80)}"
    if not case.candidates:
        refuse(label, f"{what} has no candidates")
    numbers = (case.distinct_bytes, case.launch_bytes, case.launch_flops)
    if not 1 <= case.copies <= MAX_COPIES or any(not 0 <= number < 1 << 62 for number in numbers):
        refuse(label, f"{what} has impossible counts")
    for candidate in case.candidates:
        if not 0 <= candidate.plan < len(header.plans) or not math.isfinite(candidate.estimate_us):
            refuse(label, f"{what} names plan {candidate.plan}, there are {len(header.plans)}")
        plan = header.plans[candidate.plan]
        if plan.records_count != case.copies:
            refuse(label, f"{what} has {case.copies} copies, its plan {plan.records_count} records")
        if not _fits(case.live, plan, header):
            refuse(label, f"{what} is timed with counts beyond its bucket")


def _fits(live: LiveCounts, plan: Plan, header: PlanHeader) -> bool:
    bucket = plan.bucket
    room = min((group.table_width * group.block_size for group in header.cache_groups), default=0)
    return (
        1 <= live.num_seqs <= bucket.max_seqs
        and live.num_seqs <= live.num_tokens <= bucket.max_tokens
        and 1 <= live.num_logits <= bucket.max_logits
        and -(-live.num_tokens // live.num_seqs) <= min(live.context, bucket.max_query_len)
        and live.context <= room
    )
