"""An engine client that says what it is told to, and a real HTTP server over it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from small_tokenizers import CHATML, IM_END_ID, byte_level, members

from castiron.runtime.admission import validate_request
from castiron.runtime.engine_info import EngineInfo, EngineStats
from castiron.runtime.errors import WorkFailedError
from castiron.runtime.messages import AddRequest, RequestOutput, TokenLogprobs
from castiron.server.app import make_app
from castiron.server.http_runner import HttpRunner
from castiron.server.served_model import ServedModel
from castiron.server.text_front import TextFront

INFO = EngineInfo(
    model_name="scripted",
    family="llama",
    vocab_size=262,
    max_seq_len=256,
    max_seqs=8,
    max_batched_tokens=64,
    block_size=16,
    num_blocks=64,
    bos_token_id=None,
    eos_token_ids=(IM_END_ID,),
    generation_defaults={},
    compute="f32",
    cache_dtype="f32",
    target_level="generic",
    num_threads=1,
    row_stable=True,
    has_tokenizer=True,
    sample_variants=("greedy", "random", "full"),
    timings={},
)


class ScriptedClient:
    """EngineClient's interface. Every request is answered with `answer`, a byte a token, then end of text."""

    def __init__(self, answer: str = "Hello 😀, world!", info: EngineInfo = INFO) -> None:
        self.info = info
        self.answer = answer
        self.state = "ready"
        self.dies_after: int | None = None  # tokens of an answer after which the engine is lost
        self.token_delay_s = 0.0
        self.num_cached_tokens = 0  # that it says it found of every prompt
        self.requests: list[AddRequest] = []
        self.aborted: list[str] = []

    @property
    def is_healthy(self) -> bool:
        return self.state == "ready"

    def validate(self, request: AddRequest) -> None:
        validate_request(request, self.info)

    def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        self.validate(request)
        return self._generate(request)

    async def _generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        if self.state != "ready":
            raise WorkFailedError(f"the engine is {self.state}: start it again")
        self.requests.append(request)
        ids = [*byte_level().encode_plain(self.answer), IM_END_ID]
        is_finished = False
        try:
            for index, token_id in enumerate(ids):
                await asyncio.sleep(self.token_delay_s)
                if index == self.dies_after:
                    is_finished = True
                    yield RequestOutput(
                        request.request_id, (), finish_reason="error", error="the engine died"
                    )
                    return
                finish = None
                if token_id == IM_END_ID and not request.sampling.ignore_eos:
                    finish = "stop"
                elif index + 1 == request.sampling.max_tokens:
                    finish = "length"
                is_finished = finish is not None
                yield RequestOutput(
                    request.request_id,
                    (token_id,),
                    self._logprobs(request, token_id),
                    finish,
                    token_id if finish == "stop" else None,
                    self.num_cached_tokens,
                    prompt_logprobs=self._prompt_logprobs(request) if index == 0 else (),
                )
                if is_finished:
                    return
        finally:
            if not is_finished:
                self.aborted.append(request.request_id)

    @staticmethod
    def _logprobs(request: AddRequest, token_id: int) -> tuple[TokenLogprobs, ...]:
        num = request.sampling.logprobs
        if num is None:
            return ()
        top = tuple((token_id + offset) % 256 for offset in range(num))
        return (TokenLogprobs(-0.5, 1, top, tuple(-0.5 - index for index in range(num))),)

    @staticmethod
    def _prompt_logprobs(request: AddRequest) -> tuple[TokenLogprobs, ...]:
        num = request.sampling.prompt_logprobs
        if num is None:
            return ()
        top = tuple(range(65, 65 + num))
        entry = TokenLogprobs(-0.25, 3, top, tuple(-0.1 - place for place in range(num)))
        return (entry,) * (len(request.prompt_token_ids) - 1)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def stop(self, drain_s: float = 0.0) -> None:
        self.state = "stopped"


@contextmanager
def http_server(client: ScriptedClient, template: str | None = CHATML) -> Iterator[str]:
    """Serve `client` on a free loopback port, in a thread; gives the base URL."""
    front = TextFront(members(template), client.info.bos_token_id)
    model: Any = ServedModel("scripted", client, front)  # type: ignore[arg-type]
    loop = asyncio.new_event_loop()
    runner: list[web.AppRunner] = []

    async def start() -> str:
        runner.append(
            HttpRunner(make_app(model), handler_cancellation=True, access_log=None, shutdown_timeout=1)
        )
        await runner[0].setup()
        await web.TCPSite(runner[0], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner[0].addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(runner[0].cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
