"""The engine loop in a process of its own: `python -m castiron.runtime.engine_process FD`.

FD is an inherited Unix socket, the only tie to the front: the process ends when the other end closes,
however the front ended. It ignores SIGINT and SIGTERM, which a service manager may send to all processes, so
that the front can let running requests finish.
"""

import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.engine_protocol import (
    EngineFailed,
    EngineReady,
    FromEngine,
    StartEngine,
    StepReport,
    ToEngine,
    encode_frame,
    engine_side_reader,
)
from castiron.runtime.errors import EXIT_FAILED, EXIT_USAGE, CastironError, RequestError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AbortRequest, AddRequest, RequestOutput

_logger = logging.getLogger(__name__)
_READ_BYTES = 1 << 18


class FrontChannel:
    """The process's end of the socket. Every method raises ConnectionError once the front is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = engine_side_reader()

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """All records that have arrived; with `wait`, at least one, sleeping until it comes."""
        records: list[ToEngine] = []
        while True:
            block = wait and not records
            try:
                data = self._connection.recv(_READ_BYTES, 0 if block else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return records
            if not data:
                raise ConnectionResetError("the front closed its end")
            records += self._reader.feed(data)

    def send(self, record: FromEngine) -> None:
        self._connection.sendall(encode_frame(record))


def serve(connection: socket.socket, load: Callable[[Path, EngineOptions], LLMEngine]) -> int:
    """Load the engine the front asks for and serve it until the front is gone; the process's exit code."""
    channel = FrontChannel(connection)
    try:
        first = channel.receive(wait=True)
        if not isinstance(first[0], StartEngine):
            _logger.error("the first record is %s, expected StartEngine", type(first[0]).__name__)
            return EXIT_USAGE
        try:
            engine = load(Path(first[0].path), first[0].options)
        except Exception as error:
            return _fail(channel, error)
        channel.send(EngineReady(engine.info, engine.stats()))
        try:
            run_loop(engine, channel, first[1:])
        except ConnectionError:
            raise
        except Exception as error:
            return _fail(channel, error)
        finally:
            engine.close()
    except ConnectionError:
        return 0  # nobody is left to serve


def run_loop(engine: LLMEngine, channel: FrontChannel, records: list[ToEngine]) -> NoReturn:
    """Take records between steps, step while there is work, sleep on the socket otherwise. Never returns."""
    gc.freeze()  # what loading left behind isn't looked at again
    while True:
        refused = _apply(engine, records)
        if refused or engine.has_unfinished():
            outputs = engine.step()
            channel.send(StepReport((*refused, *outputs), engine.stats()))
        records = channel.receive(wait=not engine.has_unfinished())


def _apply(engine: LLMEngine, records: list[ToEngine]) -> list[RequestOutput]:
    """Hand records to the engine; the last outputs of requests it didn't admit."""
    refused = []
    for record in records:
        if isinstance(record, AddRequest):
            try:
                engine.add_request(record)
            except RequestError as error:  # the front validates first, so its bug: it must still not hang
                refused.append(RequestOutput(record.request_id, (), finish_reason="error", error=str(error)))
        elif isinstance(record, AbortRequest):
            engine.abort(record.request_id)
        else:
            raise AssertionError(f"{type(record).__name__} after the engine was started")
    return refused


def _fail(channel: FrontChannel, error: Exception) -> int:
    """Tell the front why the process ends; its exit code."""
    if not isinstance(error, CastironError):
        _logger.error("the engine process ends", exc_info=error)
    channel.send(EngineFailed.from_error(error))
    return error.exit_code if isinstance(error, CastironError) else EXIT_FAILED


def main(load: Callable[[Path, EngineOptions], LLMEngine] = LLMEngine.load) -> int:
    """Serve on the socket whose descriptor is the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        print("usage: engine_process FD (started by castiron.runtime.engine_client)", file=sys.stderr)
        return EXIT_USAGE
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        return serve(connection, load)


if __name__ == "__main__":
    sys.exit(main())
