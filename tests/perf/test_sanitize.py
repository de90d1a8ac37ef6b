"""The runner of compute-sanitizer, against outputs as the tool writes them and a pretend tool. No GPU is needed."""

import json
import os
import time
from pathlib import Path

import pytest

from castiron.perf import sanitize as module
from castiron.perf.sanitize import (
    FOLDER,
    PLANTED,
    TOOLS,
    Result,
    command_of,
    find_tool,
    judge,
    kernel_names,
    marked_files,
    run_one,
    table,
)
from castiron.runtime.command_line import run_command
from castiron.runtime.errors import EngineTargetError, InputError

BANNER = "========= COMPUTE-SANITIZER\n"
CLEAN = f"{BANNER}....\n4 passed, 9 deselected in 3.20s\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (0, CLEAN, ("clean", 0, 0, 4, "")),
        (
            0,
            f"{BANNER}1 passed in 2s\n========= RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)\n",
            ("clean", 0, 3, 1, ""),
        ),
        (
            0,
            f"{BANNER}========= Error: Race reported between Write access at add+0x10\n1 passed in 2s\n"
            "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
            ("errors", 1, 0, 1, "Error: Race reported between Write access at add+0x10"),
        ),
        (
            1,
            f"{BANNER}========= Invalid __global__ write of size 4 bytes\n"
            "FAILED x\n1 failed in 2s\n========= ERROR SUMMARY: 12 errors\n",
            ("errors", 12, 0, 0, "Invalid __global__ write of size 4 bytes"),
        ),
        (
            1,
            f"{BANNER}E  assert 1 == 2\n1 failed, 2 passed in 2s\n========= ERROR SUMMARY: 0 errors\n",
            ("tests failed", 0, 0, 2, "E  assert 1 == 2"),
        ),
        (
            5,
            f"{BANNER}7 deselected in 0.1s\n========= ERROR SUMMARY: 0 errors\n",
            ("no tests", 0, 0, 0, "7 deselected in 0.1s"),
        ),
        (
            255,
            f"{BANNER}========= Error: Device not supported.\n",
            ("no summary", 0, 0, 0, "Error: Device not supported."),
        ),
        (
            0,
            CLEAN.replace(
                "....", "========= Internal Sanitizer Error: The Sanitizer didn't track the launch."
            ),
            ("internal error", 0, 0, 4, "Internal Sanitizer Error: The Sanitizer didn't track the launch."),
        ),
        (0, "4 passed in 2s\n", ("no summary", 0, 0, 4, "4 passed in 2s")),
        (1, "", ("no summary", 0, 0, 0, "no output")),
        (None, BANNER, ("timeout", 0, 0, 0, "no output")),
    ],
)
def test_outcomes(code: int | None, text: str, expected: tuple[str, int, int, int, str]) -> None:
    result = judge("test_x.py", "racecheck", code, text, 1.26)
    assert (result.outcome, result.errors, result.warnings, result.tests, result.message) == expected
    assert result.seconds == 1.3


def test_only_our_own_kernels_are_watched_by_their_whole_names() -> None:
    command = command_of("cs", "racecheck", ["add", "rms_norm"], ["x.py"])
    assert command[:3] == ["cs", "--tool", "racecheck"] and command[-1] == "x.py"
    filters = [command[i + 1] for i, word in enumerate(command) if word == "--kernel-name"]
    assert filters == ["kne=add", "kne=rms_norm"]
    assert {"add", "fill_dummy", "sample_greedy"} <= set(kernel_names())


def test_every_kernel_test_file_has_small_launches() -> None:
    with_gpu = [
        path
        for path in sorted(FOLDER.glob("test_*.py"))
        if "pytestmark = pytest.mark.gpu" in path.read_text()
    ]
    assert marked_files() == with_gpu
    assert [path.name for path in marked_files(["attention", "few"])] == [
        "test_attention.py",
        "test_linear_few.py",
    ]
    with pytest.raises(InputError, match="--files bogus names no test file with small launches, expected of"):
        marked_files(["bogus"])


def test_each_tool_has_its_planted_mistake() -> None:
    source = (FOLDER / PLANTED).with_suffix(".cu").read_text()
    assert all(f" planted_{tool}(" in source for tool in TOOLS)


def test_a_run_out_of_time_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = ["bash", "-c", f"echo started; sleep 60 & echo $! > {pid_file}; wait"]
    started = time.perf_counter()
    result = run_one(command, "test_x.py", "memcheck", 1.0, tmp_path)
    assert time.perf_counter() - started < 20
    assert (result.outcome, result.message) == ("timeout", "started")
    assert "started" in (tmp_path / "test_x.memcheck.log").read_text()
    for _ in range(100):  # its parent is gone: init reaps it
        state = Path(f"/proc/{pid_file.read_text().strip()}/stat")
        if not state.exists() or ") Z " in state.read_text():
            return
        time.sleep(0.05)
    pytest.fail("a child of the run lives on")


PRETEND = """#!/bin/sh
case "$*" in
*planted_mistakes.py?memcheck) echo '========= ERROR SUMMARY: 1 error' ;;
*planted_mistakes.py*) echo '========= ERROR SUMMARY: 0 errors' ;;
*test_attention.py) echo '3 passed in 1s'; echo '========= ERROR SUMMARY: 0 errors' ;;
*) echo '========= Invalid read'; echo '3 passed in 1s'; echo '========= ERROR SUMMARY: 2 errors' ;;
esac
"""


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tool on PATH whose memcheck works, and whose other tools find nothing anywhere."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(PRETEND)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    return tool


def run(*flags: str) -> int:
    return run_command(module._parser(), list(flags), module._run)


def test_results_are_printed_and_written(
    pretend: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "s.json"
    assert run("--tools", "memcheck", "--files", "attention", "--json", str(target)) == 0
    assert "test_attention.py" in capsys.readouterr().out
    snapshot = json.loads(target.read_text())
    assert [(r["file"], r["outcome"], r["errors"]) for r in snapshot["results"]] == [
        (PLANTED, "clean", 1),
        ("test_attention.py", "clean", 0),
    ]
    assert snapshot["commit"] and snapshot["command"].startswith("perf/gpu.sh sanitize")


def test_errors_and_tools_that_miss_their_planted_mistake_are_failures(
    pretend: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--tools", "memcheck", "--files", "embedding") == 1
    assert "Invalid read" in capsys.readouterr().out
    assert run("--tools", "synccheck", "--files", "attention") == 1
    out = capsys.readouterr().out
    assert "planted mistake not found" in out and "test_attention.py" not in out


@pytest.mark.parametrize(
    "flags", [("--tools", "valgrind"), ("--tools", ""), ("--jobs", "0"), ("--files", "bogus")]
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*flags) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_machine_without_the_tool_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda *_, **__: None)
    with pytest.raises(EngineTargetError, match="no compute-sanitizer found"):
        find_tool()


def test_the_table_has_a_line_a_run_and_one_for_what_was_found() -> None:
    clean = Result("test_a.py", "memcheck", "clean", 0, 0, 4, 1.0)
    found = Result("test_b.py", "memcheck", "errors", 2, 0, 4, 1.0, "Invalid read")
    assert [line.split()[0] for line in table([clean, found]).splitlines()] == [
        "file", "test_a.py", "test_b.py", "Invalid",
    ]  # fmt: skip
