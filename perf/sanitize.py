"""compute-sanitizer over the CUDA kernels' small tests: memory errors, races in shared memory, wrong barriers.

    perf/gpu.sh sanitize [--tools memcheck,racecheck,synccheck] [--files attention,linear] [--json FILE]

Runs the tests marked `sanitize` of tests/plugins_cuda, one process a tool and file, several at once; only our own
kernels are watched (torch's are not ours, and slow). Each tool must find a planted mistake first. Reads of memory
that nobody wrote are not looked for here: the tests poison it with NaN. Exit code 1 if anything was found.
"""

import argparse
import concurrent.futures
import datetime
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from castiron.perf.snapshot import Machine, source_version, this_machine, write_snapshot
from castiron.runtime.command_line import OneLineParser, positive_int, run_command
from castiron.runtime.devices.cuda_dummy import ENTRY as FILL_DUMMY
from castiron.runtime.errors import EXIT_FAILED, EngineTargetError, InputError
from castiron.runtime.output_file import check_output_file, output_file

TOOLS = ("memcheck", "racecheck", "synccheck")
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "plugins_cuda"
PLANTED = "planted_mistakes.py"
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_PLANTED_TIMEOUT_S = 120
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_PASSED = re.compile(r"\b(\d+) passed")
# Every tensor its own allocation: torch's pool would hide what lies just beyond one from memcheck.
_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
_INTERNAL_ERROR = "Internal Sanitizer Error"  # after which errors may go undetected
_REPORT = "========="  # what each line of the tool begins with


class Result(msgspec.Struct, frozen=True):
    """One tool over one file."""

    file: str
    tool: str
    outcome: str  # "clean", "errors", "tests failed", "no tests", "timeout", "no summary", "internal error"
    errors: int  # that the tool counted
    warnings: int  # of racecheck: hazards that may be meant
    tests: int  # that passed
    seconds: float
    message: str = ""  # the first report, or what went wrong


class SanitizeSnapshot(msgspec.Struct, frozen=True):
    machine: Machine
    commit: str
    date: str  # UTC, ISO 8601
    command: str
    results: list[Result]


def find_tool() -> str:
    """Path of compute-sanitizer: on PATH, in CUDA_HOME, or where the toolkit puts it. Raises EngineTargetError."""
    home = os.environ.get("CUDA_HOME")
    places = [os.environ.get("PATH", ""), f"{home}/bin" if home else "", *_PLACES]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(filter(None, places)))
    if found is None:
        raise EngineTargetError(
            "no compute-sanitizer found: put it on PATH, or set CUDA_HOME to CUDA's folder"
        )
    return found


def marked_files(names: Iterable[str] = ()) -> list[Path]:
    """Test files with tests marked `sanitize`, those whose name contains one of `names` if there are any."""
    marked = [path for path in sorted(FOLDER.glob("test_*.py")) if "mark.sanitize" in path.read_text()]
    chosen = [path for path in marked if not names or any(name in path.name for name in names)]
    if not chosen:
        known = ", ".join(path.stem.removeprefix("test_") for path in marked)
        raise InputError(
            f"--files {','.join(names)} names no test file with small launches, expected of {known}"
        )
    return chosen


def kernel_names() -> list[str]:
    """Entries of all our kernels: whole names, as extern "C" leaves them."""
    from castiron.plugins_cuda.specs import SPECS

    return sorted({FILL_DUMMY, *(spec.entry for spec in SPECS.values())})


def command_of(sanitizer: str, tool: str, kernels: Iterable[str], program: Sequence[str]) -> list[str]:
    """The command line that runs a Python program with these kernels watched."""
    options = ["--tool", tool, "--report-api-errors", "no", "--target-processes", "application-only"]
    options += ["--print-limit", "20"]
    for name in kernels:
        options += ["--kernel-name", f"kne={name}"]
    return [sanitizer, *options, sys.executable, *program]


def pytest_of(path: Path) -> list[str]:
    """Arguments of Python: the small tests of a file."""
    options = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    return ["-m", "pytest", *options, "-m", "gpu and sanitize", str(path)]


def judge(file: str, tool: str, code: int | None, text: str, seconds: float) -> Result:
    """What a run's exit code (None: it ran out of time) and output say."""
    hazards, summary = _HAZARDS.search(text), _ERRORS.search(text)
    passed = _PASSED.search(text)
    errors = warnings = 0
    if hazards is not None:
        errors, warnings = int(hazards[1]), int(hazards[2])
    elif summary is not None:
        errors = int(summary[1])
    tests = int(passed[1]) if passed is not None else 0
    if code is None:
        outcome = "timeout"
    elif errors:
        outcome = "errors"
    elif hazards is None and summary is None:
        outcome = "no summary"
    elif _INTERNAL_ERROR in text:
        outcome = "internal error"
    elif code == 5 or (code == 0 and not tests):  # pytest's code for an empty selection
        outcome = "no tests"
    else:
        outcome = "clean" if code == 0 else "tests failed"
    message = "" if outcome == "clean" else _first_message(text)
    return Result(file, tool, outcome, errors, warnings, tests, round(seconds, 1), message)


def _first_message(text: str) -> str:
    """The tool's first report, else a test's failure, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reports = [line.removeprefix(_REPORT).strip() for line in lines if line.startswith(_REPORT)]
    told = [line for line in reports if line and "SUMMARY" not in line and line != "COMPUTE-SANITIZER"]
    failures = [line for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))]
    others = [line for line in reversed(lines) if not line.startswith(_REPORT)]
    return next(iter([*told, *failures, *others]), "no output")[:200]


def run_one(command: list[str], file: str, tool: str, timeout_s: float, logs: Path | None) -> Result:
    """Run it and whatever it starts, for at most `timeout_s` seconds."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, **_ENVIRONMENT},
    )
    code: int | None
    try:
        text, _ = process.communicate(timeout=timeout_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own group: the tool's children are of it too
        text, _ = process.communicate()
        code = None
    if logs is not None:
        (logs / f"{Path(file).stem}.{tool}.log").write_text(f"{shlex.join(command)}\n{text}")
    return judge(file, tool, code, text, time.perf_counter() - started)


def check_finds_planted(sanitizer: str, tool: str, logs: Path | None) -> Result:
    """The tool over its planted mistake, watched by its whole name as the tests' kernels are.

    The outcome is "clean" if the mistake was found: then the tool works here.
    """
    command = command_of(sanitizer, tool, [f"planted_{tool}"], [str(FOLDER / PLANTED), tool])
    found = run_one(command, PLANTED, tool, _PLANTED_TIMEOUT_S, logs)
    if found.errors or found.warnings:
        return msgspec.structs.replace(found, outcome="clean", message="")
    outcome = found.outcome if found.outcome in ("timeout", "no summary") else "planted mistake not found"
    return msgspec.structs.replace(found, outcome=outcome)


def table(results: Iterable[Result]) -> str:
    """A line a run, for people."""
    lines = [f"{'file':34}{'tool':11}{'outcome':27}{'errors':>7}{'warnings':>10}{'tests':>7}{'seconds':>9}"]
    for r in results:
        lines.append(
            f"{r.file:34}{r.tool:11}{r.outcome:27}{r.errors:>7}{r.warnings:>10}{r.tests:>7}{r.seconds:>9.1f}"
        )
        if r.message:
            lines.append(f"    {r.message}")
    return "\n".join(lines)


def sanitize(
    tools: Sequence[str], files: Sequence[Path], jobs: int, timeout_s: float, logs: Path | None
) -> list[Result]:
    """All tools over all files; a tool that doesn't find its planted mistake isn't run further."""
    sanitizer = find_tool()
    kernels = kernel_names()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda tool: check_finds_planted(sanitizer, tool, logs), tools))
        working = [result.tool for result in results if result.outcome == "clean"]
        runs = [
            pool.submit(
                run_one,
                command_of(sanitizer, tool, kernels, pytest_of(path)),
                path.name,
                tool,
                timeout_s,
                logs,
            )
            for tool in working
            for path in files
        ]
        results += [run.result() for run in runs]
    return results


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _tools(text: str) -> tuple[str, ...]:
    names = _names(text)
    if not names or not set(names) <= set(TOOLS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of tools, expected of {', '.join(TOOLS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="sanitize", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--tools", type=_tools, default=TOOLS, metavar="T,…", help=f"default {','.join(TOOLS)}")
    add(
        "--files", type=_names, default=(), metavar="NAME,…", help="parts of test files' names (default: all)"
    )
    add("--jobs", type=positive_int, default=8, metavar="N", help="processes at once (default 8)")
    add(
        "--timeout", type=positive_int, default=240, metavar="S", help="seconds a file may take (default 240)"
    )
    add("--logs", type=Path, metavar="DIR", help="keep the output of every run there")
    add("--json", type=output_file, metavar="FILE", help="write a snapshot of the results")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.json is not None:
        check_output_file(args.json, ".json")
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    results = sanitize(args.tools, marked_files(args.files), args.jobs, args.timeout, args.logs)
    print(table(results))
    if args.json is not None:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        command = shlex.join(["perf/gpu.sh", "sanitize", *sys.argv[1:]])
        snapshot = SanitizeSnapshot(this_machine(True), source_version(), date, command, results)
        write_snapshot(args.json, snapshot)
    return 0 if all(result.outcome == "clean" for result in results) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(run_command(_parser(), None, _run))
