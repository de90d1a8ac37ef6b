"""Work that runs beside the phases of a build: kernel library, golden values, hashes of the checkpoint."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class CancelledError(Exception):
    """The build failed elsewhere, so this work isn't wanted any more."""


class Background(Generic[T]):
    """One function running on a thread of its own; its error surfaces at `check` or `result`.

    The function is given `keep_going`, to call now and then: it raises CancelledError once the build failed.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        self._cancelled = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(work, self._keep_going)

    def check(self) -> None:
        """Raise the work's error if it has failed already."""
        if self._future.done():
            self._future.result()

    def result(self) -> T:
        """Wait for the result, or raise the work's error."""
        return self._future.result()

    def __enter__(self) -> "Background[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._cancelled.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _keep_going(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError
