"""Errors as OpenAI clients expect them: {"error": {"message", "type", "param", "code"}}."""

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from castiron.runtime.errors import CastironError, RequestError, WorkFailedError
from castiron.server.json_types import JsonObject

_log = logging.getLogger("castiron.server")


class ModelNotFoundError(RequestError):
    """The request names a model that isn't served (HTTP 404)."""


def error_object(error: Exception) -> tuple[int, JsonObject]:
    """HTTP status and body for an exception."""
    if isinstance(error, ModelNotFoundError):
        return 404, _body(str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, RequestError):
        return 400, _body(str(error), "invalid_request_error", error.param, None)
    if isinstance(error, CastironError):  # WorkFailedError: the engine process is lost or giving up
        return 503, _body(str(error), "server_error", None, "engine_unavailable")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return 413, _body(f"the request body is too large: {error.text}", "invalid_request_error", None, None)
    if isinstance(error, web.HTTPException):
        return error.status, _body(error.reason, "invalid_request_error", None, None)
    return 500, _body("internal error, see the server's log", "server_error", None, "internal_error")


def bad_http(error: Exception) -> RequestError:
    """The error of a request that is no sound HTTP, or whose body isn't what its headers say."""
    lines = str(getattr(error, "message", "") or error).strip().splitlines()
    return RequestError(f"malformed HTTP request: {lines[0].rstrip(':')[:200] if lines else 'cut off'}")


def _body(message: str, kind: str, param: str | None, code: str | None) -> JsonObject:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(body: object, status: int = 200) -> web.Response:
    """`body` as a JSON response."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


@web.middleware
async def error_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error of a handler as a JSON response; only our own mistakes are logged with a traceback."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        status, body = error_object(error)
        if isinstance(error, web.HTTPNotFound):
            paths = ", ".join(f"{methods} {path}" for path, methods in _methods(request.app).items())
            message = f"there is no {request.method} {request.path[:200]}, expected one of {paths}"
            body = _body(message, "invalid_request_error", None, "unknown_url")
        elif isinstance(error, web.HTTPMethodNotAllowed):
            message = (
                f"{request.path[:200]} takes {' or '.join(sorted(error.allowed_methods))}, got {error.method}"
            )
            body = _body(message, "invalid_request_error", None, "method_not_allowed")
        response = json_response(body, status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except (HttpProcessingError, web.RequestPayloadError) as error:  # while its body was read
        status, body = error_object(bad_http(error))
        response = json_response(body, status)
        response.force_close()
        return response
    except Exception as error:
        status, body = error_object(error)
        if status == 500:
            _log.exception("%s %s failed", request.method, request.path)
        return json_response(body, status)


def _methods(app: web.Application) -> dict[str, str]:
    """Path -> the method it is for, of all routes."""
    routes = (route for route in app.router.routes() if route.method != "HEAD" and route.resource)
    return {route.resource.canonical: route.method for route in routes if route.resource is not None}


def engine_failure(message: str | None) -> WorkFailedError:
    """The error of a request whose engine died under it."""
    return WorkFailedError(message or "the engine stopped while it worked on this request: send it again")
