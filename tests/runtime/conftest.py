"""Fixtures of the runtime's tests."""

import pytest


@pytest.fixture(scope="session")
def generic_library() -> None:
    """The kernel library of level generic, built unless the cache has it."""
    from castiron.plugins_cpu.compile import build_library

    build_library("generic")
