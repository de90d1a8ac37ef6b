"""Work that runs beside the phases of a build: compiling the kernel library, hashing the checkpoint."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """One function running on a thread of its own; its error surfaces at `check` or `result`."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(work)

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
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
