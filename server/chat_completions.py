"""POST /v1/chat/completions: a conversation answered through the model's chat template."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from castiron.runtime.admission import tokens_left
from castiron.runtime.errors import RequestError
from castiron.runtime.grammar_spec import GrammarSpec
from castiron.runtime.messages import AddRequest
from castiron.runtime.step_abi import MAX_LOGPROBS
from castiron.server.error_responses import json_response
from castiron.server.generated_text import GeneratedText, TextDelta
from castiron.server.json_types import Json, JsonObject
from castiron.server.logprob_entries import chat_entries
from castiron.server.openai_schema import UNSUPPORTED_CHAT, ChatCompletionRequest, check_messages, decode_body
from castiron.server.request_sampling import sampling_of
from castiron.server.served_model import Choice, ServedModel, choice_deltas, prompt_logprobs
from castiron.server.stop_strings import checked_stop_strings
from castiron.server.streaming import stream_chunks
from castiron.server.structured_outputs import checked_grammar
from castiron.server.usage import usage_object


async def handle_chat_completions(request: web.Request, model: ServedModel) -> web.StreamResponse:
    """The endpoint. Raises RequestError for a bad request, WorkFailedError if the engine is lost."""
    body = decode_body(await request.read(), ChatCompletionRequest, UNSUPPORTED_CHAT)
    body.check_shared(model.name)
    messages = check_messages(body.messages)
    prompt_ids = await asyncio.to_thread(model.front.prompter.encode, messages)
    grammar = await checked_grammar(body.response_format, body.structured_outputs)
    try:
        choices = _choices(body, tuple(prompt_ids), model, grammar)
    except RequestError as error:
        if error.param != "max_tokens" or body.max_completion_tokens is None:
            raise
        message = str(error).replace("`max_tokens`", "`max_completion_tokens`")
        raise RequestError(message, "max_completion_tokens") from error
    head: JsonObject = {
        "id": model.new_id("chatcmpl"),
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": model.name,
    }
    if body.stream:
        async with aclosing(_chunks(head, body, choices, model)) as chunks:
            return await stream_chunks(request, chunks)
    async with aclosing(choice_deltas(model, choices)) as deltas:
        async for _ in deltas:
            pass
    answers: list[Json] = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text.text, "refusal": None},
            "logprobs": _logprobs(body, choice.text, model),
            "finish_reason": choice.text.finish_reason,
            **prompt_logprobs(body, choice, model),
        }
        for index, choice in enumerate(choices)
    ]
    return json_response({**head, "choices": answers, "usage": usage_object(choices, body.num_choices)})


def _choices(
    body: ChatCompletionRequest, prompt_ids: tuple[int, ...], model: ServedModel, grammar: GrammarSpec | None
) -> list[Choice]:
    """The n choices, all validated. Raises RequestError."""
    info = model.client.info
    wanted = body.max_completion_tokens
    if wanted is None:
        wanted = body.max_tokens
    elif body.max_tokens is not None and body.max_tokens != wanted:
        raise RequestError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {wanted}: give only the latter",
            "max_completion_tokens",
        )
    left = tokens_left(len(prompt_ids), info.max_seq_len, "messages")
    stop_strings = checked_stop_strings(body.stop)
    choices = []
    for number in range(body.num_choices):
        sampling = sampling_of(
            body,
            number,
            info,
            model.front.tokenizer,
            max_tokens=left if wanted is None else wanted,
            logprobs=_num_logprobs(body),
        )
        request = AddRequest(
            model.new_id("chatcmpl"), prompt_ids, sampling, cache_salt=body.cache_salt, grammar=grammar
        )
        model.client.validate(request)
        text = GeneratedText(model.front.tokenizer, stop_strings, sampling.min_tokens)
        choices.append(Choice(request, text))
    return choices


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.logprobs:
        num_logprobs = body.top_logprobs or 0
        if not 0 <= num_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"`top_logprobs` is {num_logprobs}, expected 0 to {MAX_LOGPROBS}", "top_logprobs"
            )
        return num_logprobs
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs true", "top_logprobs")
    return None


async def _chunks(
    head: JsonObject, body: ChatCompletionRequest, choices: list[Choice], model: ServedModel
) -> AsyncGenerator[JsonObject, None]:
    no_usage: JsonObject = {"usage": None} if body.include_usage else {}

    def chunk(
        index: int, delta: JsonObject, logprobs: Json = None, finish_reason: str | None = None
    ) -> JsonObject:
        choice: JsonObject = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return {**head, "choices": [choice], **no_usage}

    begun: set[int] = set()
    async with aclosing(choice_deltas(model, choices)) as deltas:
        async for index, delta in deltas:
            if index not in begun:
                begun.add(index)
                yield chunk(index, {"role": "assistant", "content": ""})
            if delta.text or (body.logprobs and delta.token_ids):
                yield chunk(index, {"content": delta.text}, _logprobs(body, delta, model))
            if delta.finish_reason is not None:
                yield chunk(index, {}, None, delta.finish_reason)
    if body.include_usage:
        yield {**head, "choices": [], "usage": usage_object(choices, body.num_choices)}


def _logprobs(body: ChatCompletionRequest, gained: TextDelta | GeneratedText, model: ServedModel) -> Json:
    if not body.logprobs:
        return None
    content = chat_entries(model.front.tokenizer, gained.token_ids, gained.logprobs)
    return {"content": content, "refusal": None}
