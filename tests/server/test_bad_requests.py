"""Every bad request is refused with a 400 naming the field, before the engine sees it, streamed or not."""

import time
from typing import Any

import pytest
from http_requests import USER, request
from scripted_engine import ScriptedClient

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, 2.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [262]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": ["a"] * 200}, "prompt"),
    ({"prompt": "a" * 257}, "prompt"),
    ({"prompt": "a" * 256}, "prompt"),
    ({"prompt": "a" * 247, "max_tokens": 10}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.5}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 100_000_000}, "n"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ({"prompt": "a", "stop": ["x"] * 5}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 500_000}, "stop"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "stop_token_ids": [262]}, "stop_token_ids"),
    ({"prompt": "a", "echo": True}, "echo"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "suffix": "x"}, "suffix"),
    ({"prompt": "a", "logit_bias": {"191222": -100}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"AI": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": None}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "presence_penalty": False}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "repetition_penalty": -1}, "repetition_penalty"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [262]}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [1] * 2000}, "allowed_token_ids"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words"),
    ({"prompt": "a", "bad_words": ["x"] * 100_000}, "bad_words"),
    ({"prompt": "a", "bad_words": ["x" * 257]}, "bad_words"),
    ({"prompt": "a", "bad_words": "x"}, "bad_words"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"prompt": "a", "stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"prompt": "a", "no_such_field": 1}, "no_such_field"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "x" * 257}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "a\nb"}, "cache_salt"),
    ({"prompt": "a", "seed": 1.5}, "seed"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "seed": -(2**63) - 1, "n": 2}, "seed"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": USER * 5000}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
    ({"messages": USER, "max_tokens": 300}, "max_tokens"),
    ({"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"messages": USER, "max_completion_tokens": 300}, "max_completion_tokens"),
    ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "logprobs": 5}, "logprobs"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, "response_format"),
    ({"messages": USER, "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"messages": USER, "structured_outputs": {"json": {"type": "no such type"}}}, "structured_outputs"),
    ({"messages": USER, "reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": USER, "modalities": ["audio"]}, "modalities"),
    ({"messages": USER, "echo": True}, "echo"),
    ({"messages": USER, "prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_completion_request_is_a_400_naming_the_field(
    url: str, engine: ScriptedClient, body: dict[str, Any], param: str, stream: bool
) -> None:
    check_refused(url, engine, "/v1/completions", {"stream": stream, **body}, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_chat_request_is_a_400_naming_the_field(
    url: str, engine: ScriptedClient, body: dict[str, Any], param: str, stream: bool
) -> None:
    check_refused(url, engine, "/v1/chat/completions", {"stream": stream, **body}, param)


def check_refused(url: str, engine: ScriptedClient, path: str, body: dict[str, Any], param: str) -> None:
    if body["stream"] and "stream_options" in body and "include_usage" in body["stream_options"]:
        return  # right with a stream
    engine.requests.clear()
    start_s = time.monotonic()
    status, answer = request(url, "POST", path, body)
    assert status == 400, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert "\n" not in error["message"] and len(error["message"]) < 500
    assert engine.requests == []
    assert time.monotonic() - start_s < 5


def test_a_prompt_that_is_too_long_is_refused_with_the_counts(url: str) -> None:
    for length in (256, 257):
        message = request(url, "POST", "/v1/completions", {"prompt": "a" * length})[1]["error"]["message"]
        assert str(length) in message and "256" in message
    body = {"messages": [{"role": "user", "content": "a" * 300}]}
    message = request(url, "POST", "/v1/chat/completions", body)[1]["error"]["message"]
    assert "256" in message and "319" in message  # 300 and the template's


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {}, "prompt is missing, expected text, a list of texts, or token ids"),
        ("completions", {"prompt": None}, "prompt is missing, expected text, a list of texts, or token ids"),
        ("completions", {"prompt": "a", "max_token": 3}, "unknown field max_token: did you mean max_tokens?"),
        ("chat/completions", {}, "messages is missing, expected a list of {role, content} objects"),
        (
            "chat/completions",
            {"messages": [{"role": "king", "content": "x"}]},
            "messages[0].role is 'king', expected one of system, developer, user, assistant, tool",
        ),
    ],
)
def test_a_refusal_says_what_is_expected(url: str, path: str, body: dict[str, Any], message: str) -> None:
    assert request(url, "POST", f"/v1/{path}", body)[1]["error"]["message"] == message


def test_a_default_number_of_tokens_never_refuses_a_prompt(url: str) -> None:
    status, answer = request(url, "POST", "/v1/completions", {"prompt": "a" * 250})
    assert status == 200 and answer["usage"]["completion_tokens"] <= 6


@pytest.mark.parametrize("seed", [-1, -(2**63), 0, 2**64 - 1])
def test_any_64_bit_seed_and_a_top_k_of_minus_1_are_taken(
    url: str, engine: ScriptedClient, seed: int
) -> None:
    engine.requests.clear()
    body = {"prompt": "a", "seed": seed, "top_k": -1, "n": 2}
    assert request(url, "POST", "/v1/completions", body)[0] == 200
    assert [r.sampling.seed for r in engine.requests] == [seed, (seed + 1) % 2**64]
    assert {r.sampling.top_k for r in engine.requests} == {-1}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}', b"null"]
)
def test_a_body_that_is_no_json_object_is_a_400(url: str, data: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, answer = request(url, "POST", path, data)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_a_huge_body_is_a_413(url: str) -> None:
    status, answer = request(url, "POST", "/v1/completions", b" " * (17 << 20))
    assert status == 413 and "error" in answer


PATHS = "GET /health, GET /v1/models, GET /v1/models/{name}, POST /v1/completions, POST /v1/chat/completions"


def test_unknown_paths_and_methods_answer_in_the_same_form(url: str) -> None:
    for method, path in (("GET", "/v1/nothing"), ("POST", "/chat/completions"), ("POST", "/v1/completions/")):
        status, answer = request(url, method, path)
        assert (status, set(answer["error"])) == (404, {"message", "type", "param", "code"})
        assert answer["error"]["message"] == f"there is no {method} {path}, expected one of {PATHS}"
    status, answer = request(url, "GET", "/v1/completions")
    assert status == 405 and answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"] == "/v1/completions takes POST, got GET"
    assert request(url, "GET", "/v1/models/other")[1]["error"]["code"] == "model_not_found"
