"""Notices an engine process that is alive but gets nowhere: it no longer steps, or its steps move no request."""

import asyncio
from collections.abc import Callable

STEP_TIMEOUT_S = 300.0  # far beyond the longest step: a full prefill chunk of a large model on a slow CPU


class Watchdog:
    """Calls `on_silence` once if, while it is awake, `timeout_s` pass without progress.

    One timer serves any number of signs of it: it looks at the time of the last one when it goes off.
    """

    def __init__(self, timeout_s: float, on_silence: Callable[[], None]) -> None:
        self.timeout_s = timeout_s
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._last_sign = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_worried(self) -> bool:
        """Whether half the time has passed."""
        return self._timer is not None and self._loop.time() - self._last_sign >= self.timeout_s / 2

    def wake(self) -> None:
        """Work was given: expect progress from now on."""
        if self._timer is None:
            self.feed()
            self._timer = self._loop.call_later(self.timeout_s, self._look)

    def feed(self) -> None:
        """There was progress."""
        self._last_sign = self._loop.time()

    def rest(self) -> None:
        """Nothing is left to do: silence is fine."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        silence_s = self._loop.time() - self._last_sign
        if silence_s >= self.timeout_s:
            self._timer = None
            self._on_silence()
        else:
            self._timer = self._loop.call_later(self.timeout_s - silence_s, self._look)
