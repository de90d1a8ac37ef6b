"""Arena offsets by liveness: values that are never live together share bytes."""

from collections import defaultdict
from dataclasses import dataclass

ARENA_ALIGNMENT = 256  # bytes; more than any cache line, vector or tensor map asks for


@dataclass(frozen=True)
class Interval:
    """One arena value: bytes it needs, first record that writes it, last record that touches it.

    Two are live together if they share a record: a record's inputs and outputs do.
    """

    name: str
    num_bytes: int
    first: int
    last: int


def place(intervals: list[Interval], reserved_bytes: int = 0) -> tuple[dict[str, int], int]:
    """Byte offset of each interval, and the arena's size in bytes.

    Greedy by size: the largest first, each into the smallest gap that fits among the values live at the same
    time (Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020). Everything is
    placed at or above `reserved_bytes`. The same intervals give the same offsets.
    """
    base = _aligned(reserved_bytes)
    offsets: dict[str, int] = {}
    busy: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # record -> byte ranges taken during it
    end = base
    for interval in sorted(intervals, key=lambda i: (-i.num_bytes, i.first, i.name)):
        need = _aligned(interval.num_bytes)
        records = range(interval.first, interval.last + 1)
        start = _best_gap(sorted(set().union(*(busy[record] for record in records))), base, need)
        offsets[interval.name] = start
        for record in records:
            busy[record].add((start, start + need))
        end = max(end, start + need)
    return offsets, end


def check_disjoint(intervals: list[Interval], offsets: dict[str, int]) -> None:
    """Assert that no two values live at the same record share a byte, whatever placed them."""
    live: list[Interval] = []
    for two in sorted(intervals, key=lambda interval: interval.first):
        live = [one for one in live if one.last >= two.first]
        for one in live:
            a, b = offsets[one.name], offsets[two.name]
            assert a + one.num_bytes <= b or b + two.num_bytes <= a, (
                f"{one.name} and {two.name} are live together and share arena bytes"
            )
        live.append(two)


def _best_gap(busy: list[tuple[int, int]], base: int, need: int) -> int:
    """Start of the smallest free gap of at least `need` bytes; after the last busy range if there is none."""
    best_start, best_size = -1, 0
    cursor = base
    for start, stop in busy:
        gap = start - cursor
        if gap >= need and (best_start < 0 or gap < best_size):
            best_start, best_size = cursor, gap
        cursor = max(cursor, stop)
    return best_start if best_start >= 0 else cursor


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
