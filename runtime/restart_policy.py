"""How often an engine process may be restarted."""

import time
from collections import deque
from collections.abc import Callable

MAX_RESTARTS = 3
WINDOW_S = 600.0


class RestartPolicy:
    """At most `max_restarts` in any `window_s` seconds: with one more failure restarting doesn't help."""

    def __init__(
        self,
        max_restarts: int = MAX_RESTARTS,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._clock = clock
        self._restarts: deque[float] = deque()

    def allow(self) -> bool:
        """Whether to restart now; counts as a restart if so."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] >= self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.max_restarts:
            return False
        self._restarts.append(now)
        return True
