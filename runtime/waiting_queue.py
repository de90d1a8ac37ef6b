"""Sequences that wait for a row and blocks, in order of (priority, arrival)."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from castiron.runtime.sequence import Sequence

ORDER = attrgetter("order")


class WaitingQueue:
    """A sorted list: arrivals differ, so no two orders are equal."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, place: int) -> Sequence:
        return self._sequences[place]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=ORDER)

    def remove(self, sequence: Sequence) -> None:
        place = bisect_left(self._sequences, sequence.order, key=ORDER)
        assert self._sequences[place] is sequence
        del self._sequences[place]
