"""Which steps a GraphTimer counts, against events of a pretend driver. No GPU is needed."""

from types import SimpleNamespace
from typing import Any

import pytest

from castiron.runtime.devices import cuda_driver, cuda_timer
from castiron.runtime.devices.cuda_timer import GraphTimer


class PretendDriver:
    """Events are [milliseconds they were recorded at]."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0)

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_events = 0

    def cuEventCreate(self, flags: int) -> tuple[int, list[float]]:
        self.num_events += 1
        return 0, []

    def cuEventRecord(self, event: list[float], stream: int) -> tuple[int]:
        event[:] = [self.now_ms]
        return (0,)

    def cuEventElapsedTime(self, begin: list[float], end: list[float]) -> tuple[int, float]:
        return 0, end[0] - begin[0]

    def cuEventDestroy(self, event: list[float]) -> tuple[int]:
        self.num_events -= 1
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PretendDriver:
    pretend: Any = PretendDriver()
    for module in (cuda_driver, cuda_timer):
        monkeypatch.setattr(module, "driver", pretend)
    return pretend


def run_step(timer: GraphTimer, driver: PretendDriver, slot: int, milliseconds: float) -> None:
    timer.begin(slot, 7)
    driver.now_ms += milliseconds
    timer.end(slot, 7)


def test_steps_are_added_when_they_are_done_and_events_are_used_again(driver: PretendDriver) -> None:
    timer = GraphTimer(3)
    assert driver.num_events == 6
    for step in range(10):
        run_step(timer, driver, step % 3, 2.0)
        driver.now_ms += 5.0
        if step:
            timer.add((step - 1) % 3)
    assert timer.seconds() == pytest.approx(9 * 2e-3)  # the tenth isn't waited for
    assert driver.num_events == 6
    timer.close()
    timer.close()
    assert driver.num_events == 0


def test_a_reset_forgets_steps_on_their_way(driver: PretendDriver) -> None:
    timer = GraphTimer(3)
    run_step(timer, driver, 0, 2.0)
    timer.reset()
    timer.add(0)
    timer.add(1)
    assert timer.seconds() == 0.0
    run_step(timer, driver, 1, 4.0)
    timer.add(1)
    assert timer.seconds() == pytest.approx(4e-3)
