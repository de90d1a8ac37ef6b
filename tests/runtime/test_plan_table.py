"""Plan table: the smallest bucket that holds a step, and engines whose plans can't serve."""

import msgspec
import pytest
from simulated_device import simulated_header

from castiron.runtime.engine_options import ServingLimits
from castiron.runtime.errors import EngineFormatError
from castiron.runtime.manifest import Profile
from castiron.runtime.plan_format import Plan, PlanHeader
from castiron.runtime.plan_table import PlanTable
from castiron.runtime.step_abi import Bucket

PROFILE = Profile(max_seqs=8, max_seq_len=128, max_batched_tokens=256)
LIMITS = ServingLimits(8, 128, 256)


def header_with_ladder() -> PlanHeader:
    """Decode buckets of 1, 2 and 8 sequences (up to 4 tokens each) and mixed ones of 64 and 256 tokens."""
    plans: list[Plan] = []
    for n in (8, 1, 2):
        plans.append(Plan(f"forward.decode{n}", "forward", "decode", Bucket(4 * n, n, n, 4), 0, 0))
    for n in (256, 64):
        plans.append(Plan(f"forward.mixed{n}", "forward", "mixed", Bucket(n, 8, 8, n), 0, 0))
    samples = [
        msgspec.structs.replace(plan, name=f"sample.greedy.{plan.name.split('.')[1]}", kind="sample")
        for plan in plans
    ]
    return msgspec.structs.replace(simulated_header(PROFILE), plans=(*plans, *samples))


@pytest.mark.parametrize(
    ("step", "plan"),
    [
        ((1, 1, 1, 1), "decode1"),
        ((4, 1, 1, 4), "decode1"),
        ((2, 2, 2, 1), "decode2"),
        ((5, 1, 1, 5), "mixed64"),  # longer than a decode query
        ((3, 3, 3, 1), "decode8"),
        ((33, 8, 8, 4), "mixed64"),
        ((65, 1, 1, 65), "mixed256"),
        ((256, 8, 8, 249), "mixed256"),
    ],
)
def test_the_smallest_bucket_that_holds_the_step_is_chosen(
    step: tuple[int, int, int, int], plan: str
) -> None:
    header = header_with_ladder()
    table = PlanTable(header, LIMITS)
    forward = table.choose_forward(*step)
    assert header.plans[forward].name == f"forward.{plan}"
    assert header.plans[table.sample_of(forward, "greedy")].name == f"sample.greedy.{plan}"


def test_variants_are_those_every_bucket_has() -> None:
    assert PlanTable(simulated_header(PROFILE), LIMITS).variants == ("greedy", "random")
    header = simulated_header(PROFILE)
    without = tuple(p for p in header.plans if p.name != "sample.random.decode")
    assert PlanTable(msgspec.structs.replace(header, plans=without), LIMITS).variants == ("greedy",)


def test_plans_that_cannot_hold_the_largest_step_or_be_sampled_are_refused() -> None:
    header = simulated_header(PROFILE)
    without_mixed = tuple(p for p in header.plans if p.name != "forward.mixed")
    with pytest.raises(EngineFormatError, match="no forward plan holds a step of 256 tokens and 8 sequences"):
        PlanTable(msgspec.structs.replace(header, plans=without_mixed), LIMITS)
    without_greedy = tuple(p for p in header.plans if p.name != "sample.greedy.decode")
    with pytest.raises(EngineFormatError, match=r"forward\.decode has no greedy sampling plan"):
        PlanTable(msgspec.structs.replace(header, plans=without_greedy), LIMITS)
    with pytest.raises(EngineFormatError, match="4 rows, max_seqs is 8"):
        PlanTable(msgspec.structs.replace(header, max_rows=4), LIMITS)
