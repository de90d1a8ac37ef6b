"""How long this process has been running, interpreter start included."""

import os
import time
from pathlib import Path

_IMPORTED_AT = time.perf_counter()


def process_age_s() -> float:
    """Seconds since the process was started (to 10 ms, from /proc; else since this module's import)."""
    try:
        # field 22, counted behind the command name, which may contain anything; man 5 proc
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.perf_counter() - _IMPORTED_AT
