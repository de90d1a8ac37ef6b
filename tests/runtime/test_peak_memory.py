"""Peak memory is a process's own."""

import subprocess
import sys

from castiron.runtime.peak_memory import peak_memory_bytes

CHILD = "from castiron.runtime.peak_memory import peak_memory_bytes; print(peak_memory_bytes())"
PARENT = f"""
import subprocess, sys
held = b"x" * (300 << 20)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
{CHILD}
"""


def test_a_process_does_not_count_what_its_parent_had() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True)
    child, parent = sorted(map(int, done.stdout.split()))
    assert 1 << 20 < child < 100 << 20 < 300 << 20 < parent


def test_memory_that_was_freed_counts() -> None:
    before = peak_memory_bytes()
    held = b"x" * (before + (64 << 20))
    del held
    assert peak_memory_bytes() >= before + (64 << 20)
