"""The front's view of an engine in its own process: streams of outputs, and a supervisor that restarts it."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Literal

from castiron.runtime.admission import validate_request
from castiron.runtime.engine_child import ENGINE_COMMAND, EngineChild
from castiron.runtime.engine_info import EngineInfo, EngineStats
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.errors import CastironError, RequestError, WorkFailedError
from castiron.runtime.messages import AbortRequest, AddRequest, RequestOutput
from castiron.runtime.restart_policy import RestartPolicy
from castiron.runtime.watchdog import STEP_TIMEOUT_S, Watchdog

_logger = logging.getLogger(__name__)

State = Literal["ready", "restarting", "failed", "stopping", "stopped"]
_Queue = asyncio.Queue[RequestOutput]


class EngineClient:
    """Requests to one engine process; made by `start`, used from one event loop.

    If the process dies, its requests end with an error and it is started again, as often as the restart
    policy allows; requests that come in between wait.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: EngineOptions,
        command: Sequence[str],
        step_timeout_s: float,
        restarts: RestartPolicy,
        child: EngineChild,
    ) -> None:
        self._path = path
        self._options = options
        self._command = command
        self._restarts = restarts
        self._child = child
        self._state: State = "ready"
        self._is_ending = False  # stop() is past draining
        self._settled = asyncio.Event()  # set unless restarting
        self._settled.set()
        self._idle = asyncio.Event()  # set while no request is unfinished
        self._idle.set()
        # every request the process may still report on; None: nobody listens any more
        self._streams: dict[str, _Queue | None] = {}
        self._progress = _progress(child.stats)
        self._watchdog = Watchdog(step_timeout_s, self._kill_stalled_child)
        self._supervisor = asyncio.create_task(self._supervise())

    @classmethod
    async def start(
        cls,
        path: str | os.PathLike[str],
        options: EngineOptions | None = None,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        step_timeout_s: float = STEP_TIMEOUT_S,
        restarts: RestartPolicy | None = None,
    ) -> "EngineClient":
        """Spawn a process and load the engine at `path` in it.

        `step_timeout_s`: a busy process that moves no request for so long is killed (and restarted). Raises what
        LLMEngine.load would, and WorkFailedError if the process can't be run.
        """
        options = options or EngineOptions()
        child = await EngineChild.launch(path, options, command)
        return cls(path, options, command, step_timeout_s, restarts or RestartPolicy(), child)

    @property
    def info(self) -> EngineInfo:
        return self._child.info

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken and answered: not while the process is restarted, or gets nowhere."""
        return self._state == "ready" and not self._watchdog.is_worried

    @property
    def pid(self) -> int:
        """Process id of the engine process (of the last one, if it ended)."""
        return self._child.pid

    def stats(self) -> EngineStats:
        """As of the last step; counters start at 0 when the process is restarted."""
        return self._child.stats

    def validate(self, request: AddRequest) -> None:
        """Raise RequestError unless the engine can serve the request and its id is new."""
        validate_request(request, self.info)
        if request.request_id in self._streams:
            raise RequestError(
                f"request_id {request.request_id!r} is in use, expected a new one", "request_id"
            )

    def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs as they come; the last has a finish_reason. Leaving early aborts the request.

        Raises RequestError at once; WorkFailedError, when iterated, if the engine is stopped or given up.
        """
        self.validate(request)
        return self._generate(request)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream's last output has finish_reason "abort". Unknown ids are ignored."""
        if request_id in self._streams:
            self._child.send(AbortRequest(request_id))

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no more requests, give running ones up to `drain_s`, abort the rest and end the process.

        A call cancelled while draining leaves the ending to the next one.
        """
        if self._is_ending:
            return
        self._state = "stopping"
        self._settled.set()
        if drain_s > 0 and not self._idle.is_set():
            idle = asyncio.create_task(self._idle.wait())
            try:
                await asyncio.wait(
                    {idle, self._supervisor}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                idle.cancel()
        if self._is_ending:  # another call ended it meanwhile
            return
        self._is_ending = True
        self._end_streams("abort", None)
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})
        await self._child.end()
        self._state = "stopped"

    async def _generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        await self._settled.wait()
        if self._state != "ready":
            raise WorkFailedError(f"the engine is {self._state}: start it again")
        self.validate(request)  # another request may have taken the id since
        queue: _Queue = asyncio.Queue()
        self._streams[request.request_id] = queue
        self._idle.clear()
        self._watchdog.wake()
        self._child.send(request)
        is_finished = False
        try:
            while not is_finished:
                output = await queue.get()
                is_finished = output.finish_reason is not None
                yield output
        finally:
            if self._streams.get(request.request_id) is queue:  # left before the end
                self._streams[request.request_id] = None
                self._child.send(AbortRequest(request.request_id))

    async def _supervise(self) -> None:
        """Hand out reports; when the process ends, fail its requests and start another."""
        while True:
            try:
                async for report in self._child.reports():
                    if (progress := _progress(report.stats)) != self._progress:
                        self._progress = progress
                        self._watchdog.feed()
                    for output in report.outputs:
                        self._deliver(output)
                error = await self._child.end()
            except WorkFailedError as bad_frame:
                error = bad_frame
                self._child.kill()
                await self._child.end()
            _logger.error("engine process %d: %s", self._child.pid, error)
            if self._state == "ready":
                self._state = "restarting"
                self._settled.clear()
            self._end_streams("error", f"{error}; send the request again")
            if self._state == "stopping" or not await self._restart():
                return

    async def _restart(self) -> bool:
        while self._restarts.allow():
            try:
                self._child = await EngineChild.launch(self._path, self._options, self._command)
            except CastironError as error:
                _logger.error("the engine process could not be restarted: %s", error)
                continue
            _logger.warning("the engine process was restarted as %d", self._child.pid)
            self._settle("ready")
            return True
        _logger.error(
            "the engine process is given up after %d restarts in %.0f s",
            self._restarts.max_restarts,
            self._restarts.window_s,
        )
        self._settle("failed")
        return False

    def _settle(self, state: State) -> None:
        if self._state == "restarting":  # not if it is being stopped
            self._state = state
        self._settled.set()

    def _deliver(self, output: RequestOutput) -> None:
        queue = self._streams.get(output.request_id)
        if output.finish_reason is not None:
            self._streams.pop(output.request_id, None)
            if not self._streams:
                self._idle.set()
                self._watchdog.rest()
        if queue is not None:
            queue.put_nowait(output)

    def _end_streams(self, finish_reason: str, error: str | None) -> None:
        for request_id in tuple(self._streams):
            self._deliver(RequestOutput(request_id, (), finish_reason=finish_reason, error=error))

    def _kill_stalled_child(self) -> None:
        self._child.kill(
            f"the engine process had requests and moved none for {self._watchdog.timeout_s:g} s, so it was killed"
        )


def _progress(stats: EngineStats) -> tuple[int, ...]:
    """What changes when a step computes or ends something."""
    return stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_finished, stats.num_aborted
