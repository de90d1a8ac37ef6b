"""What all commands share: every way a command can end is one line and an exit code."""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_engine import write_synthetic_engine

from castiron.runtime.command_line import OneLineParser, run_command, with_flags
from castiron.runtime.errors import EngineTargetError, InputError

COMMANDS = {
    "build-engine": "castiron.builder.cli",
    "run-engine": "castiron.server.cli",
    "inspect-engine": "castiron.runtime.inspect_cli",
    "verify-engine": "castiron.runtime.verify_cli",
    "bench-engine": "castiron.perf.cli",
}


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("a\nb `max_seqs` c"), 2, "a\\nb --max-seqs c"),
        (EngineTargetError("not here"), 3, "not here"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "out of memory: free some or ask for less"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
    ],
)
def test_what_the_work_raises_is_one_line_and_an_exit_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(_: argparse.Namespace) -> int:
        raise error

    assert run_command(OneLineParser(prog="some-engine"), [], work) == code
    assert capsys.readouterr().err == f"some-engine: {line}\n"


def test_settings_are_spelled_as_flags() -> None:
    message = "`kv_memory_bytes` and `num_threads` and `max_seq_len`, not `build-engine MODEL`"
    assert with_flags(message) == "--kv-memory and --threads and --max-seq-len, not `build-engine MODEL`"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_a_wrong_flag_in_the_same_form(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(COMMANDS[command]).main
    assert main(["--no-such-flag\n"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"{command}: ") and captured.err.endswith(f" (see {command} --help)\n")


def test_output_that_can_not_be_written_is_one_line(tmp_path: Path) -> None:
    engine = write_synthetic_engine(tmp_path / "a.engine")
    command = [sys.executable, "-m", COMMANDS["inspect-engine"], str(engine.path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (
        1,
        b"inspect-engine: can't write standard output: No space left on device\n",
    )
