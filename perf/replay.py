"""Replays a recorded request trace: the same requests at the same steps, and every step compared.

    run-engine ENGINE --record trace.jsonl          records
    python -m castiron.perf.replay ENGINE trace.jsonl

Exit code 0 if all steps are the recorded ones, 1 with the first that differs.
"""

import argparse
import os
import sys

from castiron.runtime.command_line import OneLineParser, add_engine_options, engine_path, run_command
from castiron.runtime.errors import EXIT_FAILED, InputError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.request_trace import Aborted, Arrived, Event, Stepped, TraceHeader, read_trace
from castiron.server.engine_arguments import engine_options


class _Last:
    """A Recorder that keeps the last event."""

    def __init__(self) -> None:
        self.event: Event | None = None

    def record(self, event: Event) -> None:
        self.event = event

    def close(self) -> None:
        """Nothing is open."""


def replay(engine: LLMEngine, path: str | os.PathLike[str]) -> tuple[int, str]:
    """Steps that were equal, and how the first other one differs ("" if none does).

    Raises InputError if the trace is of an engine with other limits, or is none.
    """
    header, events = read_trace(path)
    last = _Last()
    own = engine.start_recording(last)
    if own != header:
        names = [
            name for name in TraceHeader.__struct_fields__ if getattr(own, name) != getattr(header, name)
        ]
        what = ", ".join(
            f"{name} {getattr(own, name)!r} instead of {getattr(header, name)!r}" for name in names
        )
        raise InputError(
            f"{os.fspath(path)} was recorded by another engine or with other options: here is {what}"
        )
    num_steps = 0
    for event in events:
        if isinstance(event, Arrived):
            engine.add_request(event.request)
        elif isinstance(event, Aborted):
            engine.abort(event.request_id)
        else:
            engine.step()
            if last.event != event:
                return num_steps, _difference(event, last.event)
            num_steps += 1
    return num_steps, ""


def _difference(recorded: Stepped, found: Event | None) -> str:
    assert isinstance(found, Stepped)
    for name in ("scheduled", "outputs"):
        was, now = getattr(recorded, name), getattr(found, name)
        for place, (a, b) in enumerate(zip(was, now, strict=False)):
            if a != b:
                return f"{name}[{place}] was {a}, is {b}"
        if len(was) != len(now):
            return f"{name} had {len(was)} entries, has {len(now)}"
    raise AssertionError("the steps are equal")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="replay", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("engine", type=engine_path, metavar="ENGINE")
    parser.add_argument("trace", metavar="TRACE")
    add_engine_options(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    with LLMEngine.load(args.engine, engine_options(args)) as engine:
        num_steps, difference = replay(engine, args.trace)
    if difference:
        print(f"step {num_steps} differs after {num_steps} equal ones: {difference}")
        return EXIT_FAILED
    print(f"{num_steps} steps are the recorded ones")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(_parser(), None, _run))
