"""POST /v1/completions: raw prompts, as text or token ids, continued."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from castiron.runtime.admission import tokens_left
from castiron.runtime.errors import RequestError
from castiron.runtime.grammar_spec import GrammarSpec
from castiron.runtime.messages import AddRequest
from castiron.server.error_responses import json_response
from castiron.server.generated_text import GeneratedText, TextDelta
from castiron.server.json_types import Json, JsonObject
from castiron.server.logprob_entries import finite
from castiron.server.openai_schema import (
    MAX_CHOICES,
    UNSUPPORTED_COMPLETION,
    CompletionRequest,
    decode_body,
)
from castiron.server.request_sampling import sampling_of
from castiron.server.served_model import Choice, ServedModel, choice_deltas, prompt_logprobs
from castiron.server.stop_strings import checked_stop_strings
from castiron.server.streaming import stream_chunks
from castiron.server.structured_outputs import checked_grammar
from castiron.server.tokenizer import Tokenizer
from castiron.server.usage import usage_object

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def handle_completions(request: web.Request, model: ServedModel) -> web.StreamResponse:
    """The endpoint. Raises RequestError for a bad request, WorkFailedError if the engine is lost."""
    body = decode_body(await request.read(), CompletionRequest, UNSUPPORTED_COMPLETION)
    body.check_shared(model.name)
    prompts = await asyncio.to_thread(
        encode_prompts, body.prompt, model.front.tokenizer, model.client.info.max_seq_len
    )
    grammar = await checked_grammar(body.response_format, body.structured_outputs)
    choices = _choices(body, prompts, model, grammar)
    head = _head(body, model)
    if body.stream:
        async with aclosing(_chunks(head, body, choices, model)) as chunks:
            return await stream_chunks(request, chunks)
    gained: list[list[TextDelta]] = [[] for _ in choices]
    async with aclosing(choice_deltas(model, choices)) as deltas:
        async for index, delta in deltas:
            gained[index].append(delta)
    answers: list[Json] = [
        {
            "index": index,
            "text": choice.text.text,
            "logprobs": _logprobs(body, gained[index], model.front.tokenizer),
            "finish_reason": choice.text.finish_reason,
            **prompt_logprobs(body, choice, model),
        }
        for index, choice in enumerate(choices)
    ]
    return json_response({**head, "choices": answers, "usage": usage_object(choices, body.num_choices)})


def encode_prompts(prompt: Json, tokenizer: Tokenizer, max_seq_len: int) -> list[tuple[int, ...]]:
    """The field `prompt` (text, a list of texts, token ids, a list of lists of ids) as one tuple of ids each.

    Raises RequestError for anything else, for empty prompts and for too many.
    """
    if prompt is None:
        raise RequestError("prompt is missing, expected text, a list of texts, or token ids", "prompt")
    if isinstance(prompt, list) and prompt and _is_int(prompt[0]):
        prompt = [prompt]
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not prompts:
        raise RequestError("prompt is an empty list, expected at least one prompt", "prompt")
    if len(prompts) > MAX_CHOICES:
        raise RequestError(f"there are {len(prompts)} prompts, at most {MAX_CHOICES} are allowed", "prompt")
    kind = str if isinstance(prompts[0], str) else list
    encoded = []
    for item in prompts:
        if not isinstance(item, kind) or not isinstance(item, str | list):
            raise RequestError(
                "prompt is neither text, a list of texts, token ids, nor a list of lists of token ids",
                "prompt",
            )
        if not item:
            raise RequestError("the prompt is empty, expected at least one token", "prompt")
        if isinstance(item, str):
            encoded.append(tuple(tokenizer.encode_prompt(item)))
        else:
            # of one too long only the count matters
            if len(item) <= max_seq_len and not all(_is_int(token_id) for token_id in item):
                raise RequestError("a list of token ids holds something other than whole numbers", "prompt")
            encoded.append(tuple(item))  # type: ignore[arg-type]
    return encoded


def _is_int(value: Json) -> bool:
    return type(value) is int


def _choices(
    body: CompletionRequest, prompts: list[tuple[int, ...]], model: ServedModel, grammar: GrammarSpec | None
) -> list[Choice]:
    """n choices for each prompt, all validated. Raises RequestError."""
    if len(prompts) * body.num_choices > MAX_CHOICES:
        raise RequestError(f"{len(prompts)} prompts times n {body.num_choices} is above {MAX_CHOICES}", "n")
    stop_strings = checked_stop_strings(body.stop)
    choices = []
    for prompt_ids in prompts:
        left = tokens_left(len(prompt_ids), model.client.info.max_seq_len)
        for number in range(body.num_choices):
            sampling = sampling_of(
                body,
                number,
                model.client.info,
                model.front.tokenizer,
                max_tokens=min(DEFAULT_MAX_TOKENS, left) if body.max_tokens is None else body.max_tokens,
                logprobs=body.logprobs,
            )
            request = AddRequest(
                model.new_id("cmpl"), prompt_ids, sampling, cache_salt=body.cache_salt, grammar=grammar
            )
            model.client.validate(request)
            text = GeneratedText(model.front.tokenizer, stop_strings, sampling.min_tokens)
            choices.append(Choice(request, text))
    return choices


def _head(body: CompletionRequest, model: ServedModel) -> JsonObject:
    return {
        "id": model.new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
    }


async def _chunks(
    head: JsonObject, body: CompletionRequest, choices: list[Choice], model: ServedModel
) -> AsyncGenerator[JsonObject, None]:
    no_usage: JsonObject = {"usage": None} if body.include_usage else {}
    async with aclosing(choice_deltas(model, choices)) as deltas:
        async for index, delta in deltas:
            if delta.text or (body.logprobs is not None and delta.token_ids):
                logprobs = _logprobs(body, [delta], model.front.tokenizer)
                choice: JsonObject = {
                    "index": index,
                    "text": delta.text,
                    "logprobs": logprobs,
                    "finish_reason": None,
                }
                yield {**head, "choices": [choice], **no_usage}
            if delta.finish_reason is not None:
                choice = {"index": index, "text": "", "logprobs": None, "finish_reason": delta.finish_reason}
                yield {**head, "choices": [choice], **no_usage}
    if body.include_usage:
        yield {**head, "choices": [], "usage": usage_object(choices, body.num_choices)}


def _logprobs(body: CompletionRequest, deltas: list[TextDelta], tokenizer: Tokenizer) -> Json:
    """The completions form: parallel lists, `top_logprobs` one object of token text -> logprob a token."""
    if body.logprobs is None:
        return None
    tokens: list[Json] = []
    token_logprobs: list[Json] = []
    top_logprobs: list[Json] = []
    text_offset: list[Json] = []
    for delta in deltas:
        for token_id, logprob, offset in zip(
            delta.token_ids, delta.logprobs, delta.text_offsets, strict=True
        ):
            token = _token_name(tokenizer, token_id)
            top: JsonObject = {
                _token_name(tokenizer, top_id): finite(value)
                for top_id, value in zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
            }
            tokens.append(token)
            token_logprobs.append(finite(logprob.sampled))
            top_logprobs.append({**top, token: finite(logprob.sampled)})
            text_offset.append(offset)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def _token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; one that is only part of a character is written "bytes:\\xe2\\x82", as OpenAI does."""
    text = tokenizer.token_text(token_id)
    if "\ufffd" in text:
        token_bytes = tokenizer.token_bytes(token_id)
        if token_bytes is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
    return text
