"""Plain HTTP requests to a server under test."""

import http.client
import json
from typing import Any
from urllib.parse import urlparse

HELLO = "Hello 😀, world!"  # what the shared scripted engine answers
USER = [{"role": "user", "content": "hi"}]


def request(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and decoded JSON; `body` is sent as it is if bytes."""
    connection = http.client.HTTPConnection(urlparse(url).netloc, timeout=20)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    status, content = response.status, response.read()
    connection.close()
    return status, json.loads(content)
