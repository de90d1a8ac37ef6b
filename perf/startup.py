"""bench-engine startup: run-engine started again and again, from process start to its first token."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from castiron.perf.timing import summarize
from castiron.runtime.errors import CastironError, InputError, WorkFailedError

PHASES = ("import_s", "load_plan_s", "device_init_s", "load_weights_s", "build_graphs_s")


@dataclass(frozen=True)
class Start:
    """One run of run-engine."""

    timings: dict[str, float]  # as run-engine --json gives them
    peak_rss_bytes: int


def start_once(engine: str, prompt_ids: Sequence[int], engine_flags: Sequence[str]) -> Start:
    """Run `run-engine ENGINE --prompt-ids … --json` once.

    Raises what the command's exit code says: InputError (2), CastironError (3), else WorkFailedError.
    """
    command = [
        sys.executable,
        "-m",
        "castiron.server.cli",
        engine,
        "--prompt-ids",
        ",".join(map(str, prompt_ids)),
    ]
    command += ["--max-tokens", "1", "--temperature", "0", "--json", *engine_flags]
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL)
        try:
            _, status, usage = os.wait4(process.pid, 0)  # the child's own peak, not that of all children
        except BaseException:
            process.kill()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            stderr.seek(0)
            lines = stderr.read().decode(errors="replace").strip().splitlines()
            raise _failure(process.returncode, lines[-1] if lines else "no message")
        stdout.seek(0)
        answer = json.loads(stdout.read())
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB but for macOS
    timings = {name: value for name, value in answer["timings"].items() if value is not None}
    return Start(timings, usage.ru_maxrss * scale)


def _failure(exit_code: int, line: str) -> CastironError:
    message = line.removeprefix("run-engine: ")
    if exit_code == InputError.exit_code:
        return InputError(message)
    error = WorkFailedError(f"run-engine ended with exit code {exit_code}: {message}")
    if exit_code == 3:
        error.exit_code = exit_code
    return error


def measure_startup(
    engine: str, repeats: int, prompt_ids: Sequence[int], engine_flags: Sequence[str] = ()
) -> dict[str, Any]:
    """{"startup_s": {"start_to_first_token": {"p50", "p99"}, "import": …}, "ttft_ms": …, "memory_bytes": …}.

    One start before the measured ones warms the page cache. memory_bytes is the largest peak RSS seen.
    """
    start_once(engine, prompt_ids, engine_flags)
    starts = [start_once(engine, prompt_ids, engine_flags) for _ in range(repeats)]
    startup_s = {
        name.removesuffix("_s"): summarize([start.timings[name] for start in starts])
        for name in ("start_to_first_token_s", *PHASES)
    }
    return {
        "startup_s": startup_s,
        "ttft_ms": {f"p{len(prompt_ids)}": summarize([start.timings["ttft_ms"] for start in starts])},
        "memory_bytes": max(start.peak_rss_bytes for start in starts),
    }


def startup_table(metrics: dict[str, Any]) -> str:
    """The metrics for people."""
    lines = [
        f"{name:>20}  {value['p50']:7.3f} s  (p99 {value['p99']:.3f} s)"
        for name, value in metrics["startup_s"].items()
    ]
    lines.append(f"{'peak memory':>20}  {metrics['memory_bytes'] / 2**20:7.1f} MiB")
    return "\n".join(lines)
