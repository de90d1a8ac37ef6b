"""Zero-filled memory outside Python's heap, with or without huge pages."""

import contextlib
import mmap

import numpy as np

from castiron.runtime.errors import EngineTargetError

HUGE_PAGE_BYTES = 2 << 20


def allocate(num_bytes: int, what: str, huge_pages: bool) -> np.ndarray:
    """A zero-filled, page-aligned uint8 array of `num_bytes` that takes memory only where it is touched.

    With `huge_pages` it begins at a huge page and asks for them; without, it asks for none, so that a touch
    takes a small page. It lives until the last view of it is gone. Raises EngineTargetError if there is no
    room.
    """
    num_bytes = max(num_bytes, 1)
    slack = HUGE_PAGE_BYTES if huge_pages else 0
    try:
        memory = mmap.mmap(-1, num_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise EngineTargetError(
            f"no memory for {num_bytes} bytes of {what}: free some, lower `kv_memory_bytes` or use a smaller "
            "engine"
        ) from error
    _advise(memory, huge_pages)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE_BYTES if huge_pages else 0
    return array[start : start + num_bytes]


def _advise(memory: mmap.mmap, huge_pages: bool) -> None:
    """A hint only: kernels without transparent huge pages refuse it."""
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):
            memory.madvise(advice)
