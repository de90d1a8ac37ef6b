"""run-engine ENGINE: the OpenAI API over HTTP. The engine runs in a process of its own."""

import argparse
import asyncio
import errno
import logging
import signal
import sys
from pathlib import Path

from aiohttp import web

from castiron.runtime.command_line import EXIT_INTERRUPTED
from castiron.runtime.engine_client import EngineClient
from castiron.runtime.errors import InputError
from castiron.server.chat_completions import handle_chat_completions
from castiron.server.completions import handle_completions
from castiron.server.engine_arguments import engine_options
from castiron.server.error_responses import ModelNotFoundError, error_middleware, json_response
from castiron.server.http_runner import HttpRunner
from castiron.server.json_types import JsonObject
from castiron.server.served_model import ServedModel
from castiron.server.text_front import TextFront

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
MAX_BODY_BYTES = 16 << 20
DRAIN_S = 30.0  # running requests get this long to finish when the server is told to stop
CLOSE_S = 5.0  # and connections this long to take what was written to them


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM (returns 0) or SIGINT (returns 130). Raises CastironError if it can't start."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr
    )
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    host = args.host or DEFAULT_HOST
    port = DEFAULT_PORT if args.port is None else args.port
    front = TextFront.load(args.engine)
    client = await EngineClient.start(args.engine, engine_options(args))
    runner = None
    try:
        for warning in client.info.warnings:
            print(f"run-engine: {warning}", file=sys.stderr)
        model = ServedModel(
            args.served_model_name or client.info.model_name or Path(args.engine).stem, client, front
        )
        # cancelled handlers are how a client that left aborts its requests
        runner = HttpRunner(
            make_app(model),
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSE_S,
        )
        await runner.setup()
        stop_signal = _stop_signal()
        await _listen(runner, host, port)
        print(f"run-engine: serving {model.name} on http://{_address(runner)}", file=sys.stderr, flush=True)
        received = await stop_signal
        print(
            f"run-engine: {received.name}, finishing running requests, {DRAIN_S:.0f} s at most (again: stop now)",
            file=sys.stderr,
        )
        again = _stop_signal()
        draining = asyncio.ensure_future(_drain(runner, client))
        await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            print("run-engine: stopping now, unfinished requests are cut", file=sys.stderr)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        return EXIT_INTERRUPTED if received == signal.SIGINT else 0
    finally:
        await client.stop()
        if runner is not None:
            await runner.cleanup()


def make_app(model: ServedModel) -> web.Application:
    """All routes."""

    async def health(_: web.Request) -> web.Response:
        healthy = model.client.is_healthy
        status = "stalled" if not healthy and model.client.state == "ready" else model.client.state
        return json_response({"status": status}, 200 if healthy else 503)

    async def models(_: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [_model_card(model)]})

    async def one_model(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != model.name:
            raise ModelNotFoundError(
                f"the model {name[:200]!r} is not served here, {model.name!r} is", "model"
            )
        return json_response(_model_card(model))

    async def completions(request: web.Request) -> web.StreamResponse:
        return await handle_completions(request, model)

    async def chat_completions(request: web.Request) -> web.StreamResponse:
        return await handle_chat_completions(request, model)

    app = web.Application(middlewares=[error_middleware], client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", one_model)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat_completions)
    return app


def _model_card(model: ServedModel) -> JsonObject:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "castiron",
        "max_model_len": model.client.info.max_seq_len,
    }


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
        raise InputError(
            f"can't listen on {host}:{port}: {reason}; choose another --port or --host"
        ) from error


def _address(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _stop_signal() -> "asyncio.Future[signal.Signals]":
    """A future that the next SIGTERM or SIGINT fulfils."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return received


async def _drain(runner: web.AppRunner, client: EngineClient) -> None:
    """Take no new connections, let running requests finish, then end the engine process."""
    for site in list(runner.sites):
        await site.stop()
    await client.stop(drain_s=DRAIN_S)
