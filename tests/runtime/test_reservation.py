"""Reservations: the first moment at which the front can start if all that runs goes on as long as it may."""

from hypothesis import given
from hypothesis import strategies as st

from castiron.runtime.reservation import Amounts, reserve


def test_the_front_starts_when_enough_has_ended() -> None:
    running = [(10, (3, 1)), (20, (2, 1)), (30, (4, 1))]
    assert reserve((10, 4), (5, 1), running).start_by == 20
    assert reserve((10, 4), (1, 1), running).start_by == 0
    assert reserve((10, 4), (7, 1), running).start_by == 30
    assert reserve((10, 3), (1, 1), running).start_by == 10, "a row is needed too"


def test_spare_is_what_is_left_beside_the_front_at_its_start() -> None:
    running = [(10, (3, 1)), (20, (2, 1)), (30, (4, 1))]
    assert reserve((10, 4), (5, 1), running).spare == (1, 2)
    assert reserve((10, 4), (7, 1), running).spare == (3, 3)


def test_a_request_passes_if_it_ends_by_then_or_is_spare() -> None:
    reservation = reserve((10, 4), (5, 1), [(20, (4, 1)), (30, (4, 1))])
    assert (reservation.start_by, reservation.spare) == (20, (1, 2))
    assert reservation.lets_pass(20, (9, 1))
    assert not reservation.lets_pass(21, (2, 1))
    assert reservation.lets_pass(99, (1, 1))


_AMOUNTS = st.tuples(st.integers(0, 9), st.integers(0, 3))
_RUNNING = st.lists(st.tuples(st.integers(1, 12), _AMOUNTS), max_size=8)


@given(_RUNNING, _AMOUNTS, st.integers(1, 15), _AMOUNTS)
def test_whoever_passes_does_not_make_the_start_later(
    running: list[tuple[int, Amounts]], needed: Amounts, end: int, passing: Amounts
) -> None:
    total = (30, 12)
    before = reserve(total, needed, running)
    assert before.start_by in {0, *(end for end, _ in running)}
    if before.lets_pass(end, passing):
        assert reserve(total, needed, [*running, (end, passing)]).start_by <= before.start_by
