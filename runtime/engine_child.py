"""One running engine process, seen from the front."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence

from castiron.runtime.engine_info import EngineInfo, EngineStats
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.engine_protocol import (
    EngineFailed,
    EngineReady,
    FromEngine,
    StartEngine,
    StepReport,
    ToEngine,
    encode_frame,
    front_side_reader,
)
from castiron.runtime.errors import CastironError, WorkFailedError

ENGINE_COMMAND = (sys.executable, "-m", "castiron.runtime.engine_process")
_READ_BYTES = 1 << 18
_END_TIMEOUT_S = 10.0  # for a process whose socket was closed: it ends after the step it is in


class EngineChild:
    """A spawned engine process that has loaded its engine; made by `launch`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = front_side_reader()
        self._early: list[FromEngine] = []  # came with the first answer
        self._failure: CastironError | None = None
        self.info: EngineInfo
        self.stats: EngineStats

    @classmethod
    async def launch(
        cls, path: str | os.PathLike[str], options: EngineOptions, command: Sequence[str] = ENGINE_COMMAND
    ) -> "EngineChild":
        """Spawn `command` with a socket and have it load the engine at `path`.

        Raises the error the process reports (same class, exit code and message), or WorkFailedError if it
        ends without a word.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,  # the front's output is its own
                process_group=0,  # a terminal's Ctrl-C reaches the front only
            )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise WorkFailedError(f"the engine process could not be started: {error}") from error
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        child = cls(process, reader, writer)
        try:
            child.send(StartEngine(os.fspath(path), options))
            await child._receive_ready()
        except BaseException:
            await child.end(timeout_s=0)
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, record: ToEngine) -> None:
        """Queue a record; dropped without notice if the process has ended (`reports` says so)."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(record))

    async def reports(self) -> AsyncIterator[StepReport]:
        """Each step's report, until the process ends."""
        records, self._early = self._early, []
        while True:
            for record in records:
                if isinstance(record, StepReport):
                    self.stats = record.stats
                    yield record
                elif isinstance(record, EngineFailed):
                    self._failure = record.to_error()
            records = await self._read()
            if not records:
                return

    async def end(self, timeout_s: float = _END_TIMEOUT_S) -> CastironError:
        """Close the socket, wait for the process, kill it after `timeout_s`; why it ended."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        return self._failure or WorkFailedError(f"the engine process ended with {self._exit_status()}")

    def kill(self, reason: str | None = None) -> None:
        """End the process at once, whatever it does; `reason` is what `end` then says."""
        if reason is not None and self._failure is None:
            self._failure = WorkFailedError(reason)
        if self._process.returncode is None:
            self._process.kill()

    async def _receive_ready(self) -> None:
        while not self._early:
            self._early = await self._read()
            if not self._early:
                raise await self.end()
        first = self._early.pop(0)
        if isinstance(first, EngineFailed):
            raise first.to_error()
        if not isinstance(first, EngineReady):
            raise WorkFailedError(
                f"the engine process began with {type(first).__name__}, expected EngineReady"
            )
        self.info, self.stats = first.info, first.stats

    async def _read(self) -> list[FromEngine]:
        """The next records, at least one; none once the process is gone."""
        while True:
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                return []
            records = self._frames.feed(data)
            if records:
                return records

    def _exit_status(self) -> str:
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
