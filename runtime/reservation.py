"""When the request at the front can start at the latest, so that others may pass it without making it later.

Backfilling with a reservation, as batch systems do it (EASY: D. Lifka, "The ANL/IBM SP Scheduling System",
JSSPP 1995). Every running request ends after a known number of steps at the latest, and then leaves all that
it holds. The first moment at which enough is left for the front is its reservation. A request behind it may
pass if it ends by then, or if what it holds is still left over then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Amounts = tuple[int, ...]  # of each resource: blocks of every cache group, rows


@dataclass(frozen=True)
class Reservation:
    """The front's place in time, and what is left beside it then."""

    start_by: int  # step
    spare: Amounts

    def lets_pass(self, end: int, needed: Amounts) -> bool:
        """Whether a request that ends by step `end` and holds no more than `needed` keeps the front waiting."""
        return end <= self.start_by or all(n <= s for n, s in zip(needed, self.spare, strict=True))


def reserve(total: Amounts, needed: Amounts, running: Sequence[tuple[int, Amounts]]) -> Reservation:
    """The reservation of a front that needs `needed` of `total`, while others run: (last step, most they hold).

    The front alone must fit.
    """
    spare = [t - n for t, n in zip(total, needed, strict=True)]
    assert min(spare) >= 0, "validated at admission"
    start_by = 0
    # from the one that ends last: all that is left beside those that end later
    for end, held in sorted(running, reverse=True):
        left = [s - h for s, h in zip(spare, held, strict=True)]
        if min(left) < 0:
            start_by = end
            break
        spare = left
    return Reservation(start_by, tuple(spare))
