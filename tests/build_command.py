"""build-engine as tests use it: in a process of its own, for the CPU level they were told."""

import subprocess
import sys
from pathlib import Path

cpu_level: str | None = None  # of pytest's --cpu-level


def build(model: Path, engine: Path, *flags: str) -> Path:
    """Build an engine as a user would, and return its path."""
    command = [sys.executable, "-m", "castiron.builder.cli", str(model), "-o", str(engine), *flags]
    if cpu_level is not None:
        command += ["--target", f"cpu:{cpu_level}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return engine
