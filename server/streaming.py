"""Server-sent events."""

from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from castiron.server.error_responses import error_object
from castiron.server.json_types import JsonObject

_DONE = b"data: [DONE]\n\n"


async def stream_chunks(request: web.Request, chunks: AsyncIterator[JsonObject]) -> web.StreamResponse:
    """Send `chunks` as events, then [DONE].

    The first chunk is awaited before the headers go out, so whatever is wrong with the request is still an
    HTTP error. An error after that is sent as an event {"error": …}, and the stream ends without [DONE].
    """
    first = await anext(chunks)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    await response.write(_event(first))
    try:
        async for chunk in chunks:
            await response.write(_event(chunk))
    except (ConnectionError, OSError):  # the client left
        raise
    except Exception as error:
        await response.write(_event(error_object(error)[1]))
    else:
        await response.write(_DONE)
    await response.write_eof()
    return response


def _event(body: JsonObject) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
