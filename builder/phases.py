"""Phases of a build: progress lines, seconds, peak memory and the time limit."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from castiron.runtime.errors import WorkFailedError


class Phases:
    """Times named phases; each ends with a line on standard error unless `quiet`."""

    def __init__(self, max_seconds: float | None = None, quiet: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._max_seconds = max_seconds
        self._quiet = quiet
        self._start = time.perf_counter()
        self.name = ""  # of the newest phase

    @contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """Run one phase; append to the yielded list what its line shall say.

        Raises WorkFailedError if the build's time was up before it began.
        """
        self.name = name
        self.check_time()
        notes: list[str] = []
        start = time.perf_counter()
        yield notes
        self.seconds[name] = time.perf_counter() - start
        self.say(f"{name:<10}{self.seconds[name]:7.2f} s  {'; '.join(notes)}".rstrip())

    def check_time(self) -> None:
        """Raise WorkFailedError if the time limit has passed."""
        if self._max_seconds is not None and self.total() > self._max_seconds:
            raise WorkFailedError(
                f"the build took {self.total():.1f} s at phase {self.name!r}, "
                f"--max-build-seconds allows {self._max_seconds:g}: allow more, or build on a faster machine"
            )

    def say(self, line: str) -> None:
        """One line of progress."""
        if not self._quiet:
            print(line, file=sys.stderr, flush=True)

    def total(self) -> float:
        """Seconds since the build began."""
        return time.perf_counter() - self._start
