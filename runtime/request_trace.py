"""A record of all that decides what an engine loop does: requests with their seeds, aborts, and every step.

One JSON object a line, in the order of events: first the header, then "arrived", "aborted" and "stepped". Replaying
the first two at their places between steps gives the same steps again, on the same engine with the same options, also
on a GPU: the same schedule runs the same plans, which give the same bits.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from castiron.runtime.engine_info import EngineInfo
from castiron.runtime.errors import InputError, WorkFailedError
from castiron.runtime.messages import AddRequest, RequestOutput
from castiron.runtime.scheduler import ScheduledStep

FORMAT = 1


class TraceHeader(msgspec.Struct, frozen=True, tag="header", forbid_unknown_fields=True):
    """What a replay must have in common with the recorded engine."""

    format: int
    model_name: str
    vocab_size: int
    max_seqs: int
    max_seq_len: int
    max_batched_tokens: int
    block_size: int
    num_blocks: int
    prefix_cache: bool


class Arrived(msgspec.Struct, frozen=True, tag="arrived", forbid_unknown_fields=True):
    request: AddRequest  # its seed the one it was given, or that was drawn for it


class Aborted(msgspec.Struct, frozen=True, tag="aborted", forbid_unknown_fields=True):
    request_id: str


class Stepped(msgspec.Struct, frozen=True, tag="stepped", forbid_unknown_fields=True):
    """One call of LLMEngine.step."""

    scheduled: tuple[
        tuple[str, int, int], ...
    ]  # request, its tokens in the cache before the step, tokens computed
    outputs: tuple[tuple[str, tuple[int, ...], str | None], ...]  # request, new tokens, finish reason


Event = TraceHeader | Arrived | Aborted | Stepped
Record = Callable[[Event], None]


class Recorder(Protocol):
    """Takes events in their order."""

    def record(self, event: Event) -> None: ...

    def close(self) -> None: ...


class TraceWriter:
    """Writes events to a file; every line is with the system once its event is over."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """A file of that name stays: then it is NAME.1, or the next that is free, as after an engine's restart.

        Raises WorkFailedError if it can't be made.
        """
        for number in itertools.count():
            name = f"{os.fspath(path)}.{number}" if number else os.fspath(path)
            try:
                self._file = Path(name).open("xb", buffering=0)  # noqa: SIM115
                return
            except FileExistsError:
                continue
            except OSError as error:
                raise WorkFailedError(f"can't write {name}: {error.strerror or error}") from error

    def record(self, event: Event) -> None:
        """Raises WorkFailedError if it can't be written: a record with a gap can't be replayed."""
        try:
            self._file.write(msgspec.json.encode(event) + b"\n")
        except OSError as error:
            raise WorkFailedError(f"can't write {self._file.name}: {error.strerror or error}") from error

    def close(self) -> None:
        self._file.close()


def header_of(info: EngineInfo) -> TraceHeader:
    return TraceHeader(
        FORMAT,
        info.model_name,
        info.vocab_size,
        info.max_seqs,
        info.max_seq_len,
        info.max_batched_tokens,
        info.block_size,
        info.num_blocks,
        info.prefix_cache,
    )


def stepped(step: ScheduledStep | None, outputs: list[RequestOutput]) -> Stepped:
    """The event of a step: what was scheduled in it, if anything, and what it gave out."""
    scheduled: tuple[tuple[str, int, int], ...] = ()
    if step is not None:
        starts, counts = step.input.starts.tolist(), step.input.counts.tolist()
        ids = [sequence.request_id for sequence in step.sequences]
        scheduled = tuple(zip(ids, starts, counts, strict=True))
    return Stepped(scheduled, tuple((o.request_id, o.new_token_ids, o.finish_reason) for o in outputs))


def read_trace(path: str | os.PathLike[str]) -> tuple[TraceHeader, Iterator[Arrived | Aborted | Stepped]]:
    """The header, and the events as they are read; a last line that was cut off is left out.

    Raises InputError for a file that is no trace, also while it is read.
    """
    decoder = msgspec.json.Decoder(Event)

    def events() -> Iterator[Event]:
        try:
            with Path(path).open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        return
                    try:
                        yield decoder.decode(line)
                    except msgspec.MsgspecError as error:
                        raise InputError(
                            f"{os.fspath(path)}, line {number}, is no event of a trace: {error}"
                        ) from error
        except OSError as error:
            raise InputError(f"can't read {os.fspath(path)}: {error.strerror or error}") from error

    found = events()
    header = next(found, None)
    if not isinstance(header, TraceHeader) or header.format != FORMAT:
        raise InputError(
            f"{os.fspath(path)} is no trace of format {FORMAT}: record one with run-engine's flag for it"
        )
    return header, _after_header(found, path)


def _after_header(
    events: Iterator[Event], path: str | os.PathLike[str]
) -> Iterator[Arrived | Aborted | Stepped]:
    for event in events:
        if isinstance(event, TraceHeader):
            raise InputError(f"{os.fspath(path)} has a second header")
        yield event
