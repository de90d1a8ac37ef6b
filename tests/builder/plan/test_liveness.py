"""Arena placement: values live together never share bytes, values that aren't do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castiron.builder.plan.liveness import ARENA_ALIGNMENT, Interval, check_disjoint, place


@st.composite
def intervals(draw: st.DrawFn) -> list[Interval]:
    spans = draw(
        st.lists(
            st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=30
        )
    )
    return [Interval(f"v{i}", size, first, first + length) for i, (size, first, length) in enumerate(spans)]


@given(intervals(), st.integers(0, 1000))
def test_values_live_together_never_share_a_byte(values: list[Interval], reserved: int) -> None:
    offsets, end = place(values, reserved)
    check_disjoint(values, offsets)
    assert all(offset % ARENA_ALIGNMENT == 0 and offset >= reserved for offset in offsets.values())
    assert all(offsets[value.name] + value.num_bytes <= end for value in values)


@given(intervals())
def test_placement_does_not_depend_on_the_order_given(values: list[Interval]) -> None:
    assert place(values) == place(values[::-1])


def test_a_chain_of_equal_values_needs_two_places() -> None:
    chain = [Interval(f"v{i}", 4096, i, i + 1) for i in range(20)]
    assert place(chain)[1] == 2 * 4096


def test_the_smallest_gap_that_fits_is_taken() -> None:
    values = [
        Interval("base", 1000, 0, 9),
        Interval("wide gap", 640, 0, 3),
        Interval("between", 512, 0, 9),
        Interval("narrow gap", 384, 0, 3),
        Interval("top", 320, 0, 9),
        Interval("late", 100, 5, 6),
    ]
    offsets, _ = place(values)
    assert offsets["late"] == offsets["narrow gap"]


def test_an_overlap_is_caught() -> None:
    with pytest.raises(AssertionError, match="share arena bytes"):
        check_disjoint([Interval("a", 100, 0, 2), Interval("b", 10, 2, 3)], {"a": 0, "b": 64})
