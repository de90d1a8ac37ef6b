"""aiohttp's runner, with errors of HTTP itself (a header too long, say) as the API's JSON and without a traceback."""

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from castiron.server.error_responses import bad_http, error_object, json_response

_log = logging.getLogger("castiron.server")


class HttpRunner(web.AppRunner):
    """An AppRunner whose connections are _JsonErrorHandlers."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server  # aiohttp has no setting for the class of its handlers
        return server


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _JsonErrorHandler(self, loop=self._loop, **self._kwargs)


class _JsonErrorHandler(RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        error = bad_http(exc)
        _log.info("refused: %s", error)
        response = json_response(error_object(error)[1], status)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        if not isinstance(
            kw.get("exc_info"), HttpProcessingError | web.RequestPayloadError
        ):  # of a body: the handler answered it
            super().log_exception(*args, **kw)
