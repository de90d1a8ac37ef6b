"""run-engine serving: real processes on a loopback port, the official client, signals, a killed engine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from castiron.server.cli import main
from castiron.server.llm import LLM
from castiron.server.llm_sampling import SamplingParams


class Server:
    """A started run-engine."""

    def __init__(self, engine: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "castiron.server.cli", str(engine), "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.notes = ""
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._serving.wait(90), self.notes
        match = re.search(r"serving (\S+) on (http://\S+)", self.notes)
        assert match, self.notes
        self.name, self.url = match.groups()
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="any", max_retries=0, timeout=60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.notes += line
            if "serving" in line:
                self._serving.set()
        self._serving.set()

    def health(self) -> int:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@contextmanager
def serving(engine: Path, *flags: str) -> Iterator[Server]:
    server = Server(engine, *flags)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def server(tiny_chat_engine: Path) -> Iterator[Server]:
    with serving(tiny_chat_engine, "--served-model-name", "tiny") as server:
        yield server
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.notes


def test_it_is_healthy_and_has_the_name_it_was_given(server: Server) -> None:
    assert server.health() == 200
    assert [model.id for model in server.client.models.list()] == ["tiny"] and server.name == "tiny"


def test_served_answers_equal_those_in_process(server: Server, tiny_chat_engine: Path) -> None:
    prompts = [f"prompt {index} " * (index + 1) for index in range(8)]
    with LLM(tiny_chat_engine) as llm:
        expected = [answer.text for answer in llm.generate(prompts, SamplingParams(max_tokens=24))]

    def ask(prompt: str) -> str:
        stream = server.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == expected


def test_a_chat_streams_with_usage(server: Server) -> None:
    messages = [{"role": "user", "content": "hello"}]
    fields = {"model": "tiny", "messages": messages, "max_tokens": 12, "seed": 1, "temperature": 1.0}
    whole = server.client.chat.completions.create(**fields)  # type: ignore[call-overload]
    chunks = list(
        server.client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


def test_usage_tells_how_much_of_the_prompt_was_cached(server: Server) -> None:
    prompt = [7 * i % 250 for i in range(40)]

    def cached(n: int = 1, salt: str | None = None) -> int:
        answer = server.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=2, n=n, temperature=0, extra_body={"cache_salt": salt}
        )
        assert len({choice.text for choice in answer.choices}) == 1
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(), cached(), cached(n=3), cached(salt="mine"), cached(salt="mine")] == [0, 32, 32, 0, 32]


def test_a_server_told_not_to_cache_does_not(tiny_chat_engine: Path) -> None:
    with serving(tiny_chat_engine, "--served-model-name", "tiny", "--no-prefix-cache") as server:
        for _ in range(2):
            answer = server.client.completions.create(
                model="tiny", prompt=[5] * 40, max_tokens=2, temperature=0
            )
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert server.end(signal.SIGTERM) == 0


def test_a_prompt_too_long_is_a_400_with_counts_streamed_or_not(server: Server) -> None:
    limit = 1024
    for stream in (False, True):
        for length, max_tokens in ((limit + 1, 1), (limit, 1), (limit - 9, 10)):
            with pytest.raises(openai.BadRequestError, match=str(length)):
                server.client.completions.create(
                    model="tiny", prompt=[5] * length, max_tokens=max_tokens, stream=stream
                )
    answer = server.client.completions.create(
        model="tiny", prompt=[5] * (limit - 10), max_tokens=10, temperature=0
    )
    assert answer.usage is not None and answer.usage.prompt_tokens == limit - 10


def test_leaving_a_stream_frees_the_engine(server: Server) -> None:
    for _ in range(3):
        stream = server.client.completions.create(
            model="tiny", prompt="a", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    start_s = time.monotonic()
    server.client.completions.create(model="tiny", prompt="a", max_tokens=2)
    assert time.monotonic() - start_s < 20


def engine_pids(server: Server) -> list[int]:
    """Child processes of the server."""
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def test_a_killed_engine_fails_its_requests_and_comes_back(tiny_chat_engine: Path) -> None:
    with serving(tiny_chat_engine) as server:
        stream = server.client.completions.create(
            model=server.name, prompt="a", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        (pid,) = engine_pids(server)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        deadline = time.monotonic() + 60
        while server.health() != 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        answer = server.client.completions.create(model=server.name, prompt="a", max_tokens=3, temperature=0)
        assert answer.usage is not None and answer.usage.completion_tokens <= 3
        assert engine_pids(server) != [pid]
        assert server.end(signal.SIGINT) == 130
        assert "Traceback" not in server.notes


def test_a_request_in_flight_is_finished_before_the_server_ends(tiny_chat_engine: Path) -> None:
    with serving(tiny_chat_engine) as server:
        stream = server.client.completions.create(
            model=server.name, prompt="a", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
        assert server.process.wait(60) == 0
        with pytest.raises(openai.APIConnectionError):
            server.client.models.list()


def test_a_second_signal_stops_at_once(smollm2_engine: Path) -> None:
    with serving(smollm2_engine) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}).encode()
        response = urllib.request.urlopen(server.url + "/v1/completions", body, timeout=30)
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None  # still finishing the request
        started = time.monotonic()
        assert server.end(signal.SIGTERM) == 0
        assert time.monotonic() - started < 4, "a cut request must not hold the server"
        assert "Traceback" not in server.notes


def test_a_port_in_use_is_one_line_and_exit_code_2(
    tiny_chat_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main([str(tiny_chat_engine), "--port", str(taken.getsockname()[1])]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "in use" in captured.err
