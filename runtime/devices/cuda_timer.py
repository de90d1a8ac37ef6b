"""GPU time of steps by events: how long the graphs of each step took, without waiting for any of them."""

from typing import Any

from castiron.runtime.devices.cuda_driver import check, driver

_DOING = "timing a step"


class GraphTimer:
    """A pair of events a slot, one slot for each step that may be on its way; made once, used again and again."""

    def __init__(self, num_slots: int) -> None:
        """Raises WorkFailedError if the GPU fails, as all methods do."""
        timed = driver.CUevent_flags.CU_EVENT_DEFAULT
        self._events: list[list[Any]] = []
        for _ in range(num_slots):
            self._events.append([check(driver.cuEventCreate(timed), _DOING) for _ in range(2)])
        self._running: set[int] = set()  # slots whose step is timed
        self._seconds = 0.0

    def reset(self) -> None:
        """Forget what was added up, and steps on their way."""
        self._running.clear()
        self._seconds = 0.0

    def begin(self, slot: int, stream: Any) -> None:
        """Before a step's graphs are launched."""
        check(driver.cuEventRecord(self._events[slot][0], stream), _DOING)

    def end(self, slot: int, stream: Any) -> None:
        """After they were launched."""
        check(driver.cuEventRecord(self._events[slot][1], stream), _DOING)
        self._running.add(slot)

    def add(self, slot: int) -> None:
        """Once the step is done, which the caller has waited for. Nothing if it was launched untimed."""
        if slot in self._running:
            self._running.remove(slot)
            begin, end = self._events[slot]
            self._seconds += float(check(driver.cuEventElapsedTime(begin, end), _DOING)) / 1e3

    def seconds(self) -> float:
        """Of all steps added since the last reset."""
        return self._seconds

    def close(self) -> None:
        """Destroy the events. Calling it twice is fine."""
        for pair in self._events:
            for event in pair:
                driver.cuEventDestroy(event)
        self._events = []
