"""Python's search for reference cycles, out of the way of work that makes many lasting objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No search for reference cycles while the block runs.

    Importing torch and tracing make a million objects and hardly any garbage; going over them again and again
    is a seventh of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
