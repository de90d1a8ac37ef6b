"""castiron's commands as tests call them: in this process (importing torch anew takes seconds), or in their own."""

import gc
import importlib
import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

MODULES = {
    "build-engine": "castiron.builder.cli",
    "run-engine": "castiron.server.cli",
    "verify-engine": "castiron.runtime.verify_cli",
    "inspect-engine": "castiron.runtime.inspect_cli",
}
Done = subprocess.CompletedProcess[str]

cpu_level: str | None = None  # of pytest's --cpu-level


def run(command: str, *arguments: object) -> Done:
    """Call the command's main() with these arguments; an exception that it lets through fails the test."""
    main = importlib.import_module(MODULES[command]).main
    argv = [str(argument) for argument in arguments]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
        finally:
            gc.unfreeze()  # build-engine freezes what it imported; tests go on making and dropping engines
    return Done([command, *argv], code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def run_process(command: str, *arguments: object, env: dict[str, str] | None = None) -> Done:
    """Run the command as a user does, with `env` on top of this process's environment."""
    return subprocess.run(
        [sys.executable, "-m", MODULES[command], *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )


def build(model: Path, engine: Path, *flags: str) -> Path:
    """Build an engine for the CPU level that pytest was told, and return its path."""
    target = () if cpu_level is None else ("--target", f"cpu:{cpu_level}")
    done = run("build-engine", model, "-o", engine, *flags, *target)
    assert done.returncode == 0, done.stderr
    return engine
