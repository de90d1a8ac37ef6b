"""Requests that are no sound HTTP get the API's error object, and no traceback is logged."""

import gzip
import json
import socket
from urllib.parse import urlparse

import pytest

JSON_BODY = b'{"prompt": "a", "max_tokens": 2}'


def send(url: str, headers: str, body: bytes = b"") -> tuple[int, dict[str, object]]:
    host = urlparse(url)
    with socket.create_connection((host.hostname, host.port), timeout=20) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n\r\n"
        connection.sendall(head.encode() + body)
        received = b""
        while part := connection.recv(65536):
            received += part
    answer_head, _, content = received.partition(b"\r\n\r\n")
    return int(answer_head.split()[1]), json.loads(content)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ("Content-Length: -5", b""),
        (f"X-Long: {'a' * 20000}", b""),
        (f"Content-Encoding: gzip\r\nContent-Length: {len(JSON_BODY)}", JSON_BODY),
        (f"Content-Encoding: deflate\r\nContent-Length: {len(JSON_BODY)}", JSON_BODY),
    ],
    ids=["negative length", "long header", "not gzip", "not deflate"],
)
def test_it_is_a_400_of_one_line_and_no_traceback(
    url: str, headers: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = send(url, headers, body)
    assert status == 400
    error = answer["error"]
    assert isinstance(error, dict) and error["type"] == "invalid_request_error"
    assert "\n" not in error["message"] and len(error["message"]) < 300
    assert not [record for record in caplog.records if record.exc_info]


def test_valid_gzip_is_read(url: str) -> None:
    body = gzip.compress(JSON_BODY)
    status, _ = send(url, f"Content-Encoding: gzip\r\nContent-Length: {len(body)}", body)
    assert status == 200
