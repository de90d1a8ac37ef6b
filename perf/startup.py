"""bench-engine startup: run-engine started again and again, from process start to its first token."""

import errno
import json
import subprocess
import sys
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
    peak_rss_bytes: int  # of all its processes; as it tells itself, since ru_maxrss may be its parent's
    num_prompt_tokens: int


def start_once(engine: str, prompt: str | Sequence[int], engine_flags: Sequence[str]) -> Start:
    """Run `run-engine ENGINE --json` once, with --prompt for a text and --prompt-ids for token ids.

    Raises what the command's exit code says: InputError (2), CastironError (3), else WorkFailedError.
    """
    asked = f"--prompt={prompt}" if isinstance(prompt, str) else f"--prompt-ids={','.join(map(str, prompt))}"
    command = [sys.executable, "-m", "castiron.server.cli", engine, asked]
    command += ["--max-tokens", "1", "--temperature", "0", "--json", *engine_flags]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        raise InputError(f"the prompt ({len(prompt)} long) doesn't fit a command line: shorten it") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _failure(done.returncode, lines[-1] if lines else "no message")
    answer = json.loads(done.stdout)
    timings = {name: value for name, value in answer["timings"].items() if value is not None}
    return Start(timings, answer["peak_rss_bytes"], len(answer["prompt_token_ids"]))


def _failure(exit_code: int, line: str) -> CastironError:
    message = line.removeprefix("run-engine: ")
    if exit_code == InputError.exit_code:
        return InputError(message)
    error = WorkFailedError(f"run-engine ended with exit code {exit_code}: {message}")
    if exit_code == 3:
        error.exit_code = exit_code
    return error


def measure_startup(
    engine: str, repeats: int, prompt: str | Sequence[int], engine_flags: Sequence[str] = ()
) -> dict[str, Any]:
    """{"startup_s": {"start_to_first_token": {"p50", "p99"}, "import": …}, "ttft_ms": …, "memory_bytes": …}.

    One start before the measured ones warms the page cache. memory_bytes is the largest peak RSS seen.
    """
    num_tokens = start_once(engine, prompt, engine_flags).num_prompt_tokens
    starts = [start_once(engine, prompt, engine_flags) for _ in range(repeats)]
    startup_s = {
        name.removesuffix("_s"): summarize([start.timings[name] for start in starts])
        for name in ("start_to_first_token_s", *PHASES)
    }
    return {
        "startup_s": startup_s,
        "ttft_ms": {f"p{num_tokens}": summarize([start.timings["ttft_ms"] for start in starts])},
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
