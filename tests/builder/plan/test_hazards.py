"""Dependencies by bytes: read after write, write after read, write after write; never read after read."""

from hypothesis import given
from hypothesis import strategies as st

from castiron.builder.plan.hazards import Access, HazardTracker

ARENA, OTHER = (1, 0), (2, 3)


def read(start: int, stop: int, space: tuple[int, int] = ARENA) -> Access:
    return Access(space, start, stop, is_write=False)


def write(start: int, stop: int, space: tuple[int, int] = ARENA) -> Access:
    return Access(space, start, stop, is_write=True)


def test_each_kind_of_hazard_is_a_dependency() -> None:
    tracker = HazardTracker()
    assert tracker.add(0, [write(0, 64)]) == []
    assert tracker.add(1, [read(0, 64), write(64, 128)]) == [0]
    assert tracker.add(2, [read(0, 64), write(128, 192)]) == [0]  # not on the other reader
    assert tracker.add(3, [write(32, 96)]) == [0, 1, 2]
    assert tracker.add(4, [write(32, 96, OTHER)]) == []


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8), st.booleans()), min_size=1, max_size=3),
        min_size=1,
        max_size=15,
    )
)
def test_every_conflict_is_ordered_by_a_chain_of_dependencies(
    records: list[list[tuple[int, int, bool]]],
) -> None:
    tracker = HazardTracker()
    accesses = [[Access(ARENA, s, s + n, w) for s, n, w in record] for record in records]
    before: list[set[int]] = []  # all records that are surely finished when a record starts
    for index, own in enumerate(accesses):
        direct = tracker.add(index, own)
        before.append(set(direct).union(*(before[i] for i in direct)))
        for earlier in range(index):
            conflicts = any(
                a.start < b.stop and b.start < a.stop and (a.is_write or b.is_write)
                for a in own
                for b in accesses[earlier]
            )
            assert not conflicts or earlier in before[index]
