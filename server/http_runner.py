"""aiohttp's runner, with errors of HTTP itself (a header too long, say) as the API's JSON and without a traceback."""

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from castiron.server.error_responses import bad_http, error_object, json_response

_log = logging.getLogger("castiron.server")


class HttpRunner(web.AppRunner):
    """An AppRunner whose connections are _JsonErrorHandlers.

    aiohttp has no setting for the class of its handlers, so the server it made and each handler get theirs here,
    through its public interface (`setup`, `server`, and calling the server for a handler).
    """

    async def setup(self) -> None:
        await super().setup()
        assert self.server is not None
        self.server.__class__ = _Server


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        handler = super().__call__()
        handler.__class__ = _JsonErrorHandler
        return handler


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
