"""The most memory this process has held."""

import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Most resident memory this process has had since it began, mapped files included.

    On Linux from /proc: ru_maxrss there begins with what the process had before it called exec, which is its
    parent's memory.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # "VmHWM:     1234 kB"
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
