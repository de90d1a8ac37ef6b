"""Peak memory of this process since the last reset (Linux)."""

from pathlib import Path

from castiron.runtime.peak_memory import peak_memory_bytes


def reset_peak() -> None:
    """Start a new peak at what the process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_kib() -> int:
    """Most resident KiB since then."""
    return peak_memory_bytes() // 1024
