"""A prompt and sampling parameters as callers of LLM and AsyncLLM give them, as a request to the engine."""

import numbers
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from castiron.runtime.admission import longer_sequences, tokens_left
from castiron.runtime.engine_info import EngineInfo
from castiron.runtime.errors import InputError, RequestError
from castiron.runtime.messages import AddRequest
from castiron.server.bad_words import bad_words_token_ids
from castiron.server.generated_text import GeneratedText
from castiron.server.json_types import JsonObject
from castiron.server.llm_sampling import SamplingParams
from castiron.server.sampling_defaults import sampling_params as default_sampling
from castiron.server.stop_strings import checked_stop_strings
from castiron.server.text_front import TextFront

Prompt = str | Sequence[int]
Conversation = Sequence[JsonObject]  # [{"role", "content"}, …]
_EXPECTED = "expected text or a list of token ids, or a list of those"


def encode_prompt(front: TextFront, prompt: Prompt) -> tuple[int, ...]:
    """Raises RequestError for an empty prompt, or something else."""
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty, expected some text", "prompt")
        return tuple(front.tokenizer.encode_prompt(prompt))
    if not is_list(prompt):
        raise RequestError(f"a prompt is a {type(prompt).__name__}, {_EXPECTED}", "prompt")
    return tuple(prompt)


def encode_conversation(front: TextFront, messages: Conversation) -> tuple[int, ...]:
    """Through the model's chat template. Raises RequestError for what is no conversation."""
    if not is_list(messages):
        kind = type(messages).__name__
        raise RequestError(f"messages is a {kind}, expected a list of {{role, content}} objects", "messages")
    if not messages:
        raise RequestError("messages is empty, expected at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] is no {{role, content}} object", "messages")
    return tuple(front.prompter.encode(list(messages)))


def make_request(
    request_id: str,
    prompt_ids: tuple[int, ...],
    params: SamplingParams | None,
    stop: str | Sequence[str] | None,
    default_max_tokens: int | None,
    front: TextFront,
    info: EngineInfo,
) -> tuple[AddRequest, GeneratedText]:
    """The request, not validated yet, and where its text will go.

    params None: the model's generation config with default_max_tokens new tokens (None: all that fit). Raises
    InputError, RequestError.
    """
    if params is None:
        left = tokens_left(len(prompt_ids), info.max_seq_len, advice=longer_sequences(info))
        max_tokens = left if default_max_tokens is None else min(left, default_max_tokens)
        sampling = default_sampling(info.generation_defaults, max_tokens=max_tokens)
    elif isinstance(params, SamplingParams):
        sampling = params.for_engine
        words = bad_words_token_ids(params.bad_words, front.tokenizer)
        if words:
            words = (*sampling.bad_words_token_ids, *words)
            sampling = msgspec.structs.replace(sampling, bad_words_token_ids=words)
    else:
        raise InputError(f"sampling_params is a {type(params).__name__}, expected castiron.SamplingParams")
    stop_strings = (*checked_stop_strings(stop), *(params.stop if params is not None else ()))
    text = GeneratedText(front.tokenizer, stop_strings, sampling.min_tokens)
    grammar = None if params is None else params.grammar
    return AddRequest(request_id, prompt_ids, sampling, grammar=grammar), text


def is_list(value: object) -> bool:
    """Whether it holds items in an order: a list, tuple, range or array, and not text, bytes or a mapping."""
    ordered = all(hasattr(value, name) for name in ("__len__", "__getitem__", "__iter__"))
    return ordered and not isinstance(value, str | bytes | bytearray | memoryview | Mapping)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, or token ids) or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise RequestError(f"prompts is a {type(prompts).__name__}, {_EXPECTED}", "prompt")
    if len(prompts) > 0 and isinstance(prompts[0], numbers.Number):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    """Parameters for all prompts, or one a prompt, as one a prompt. Raises InputError if there are others."""
    if not isinstance(params, list | tuple):
        return [params] * count  # type: ignore[list-item]
    if len(params) != count:
        raise InputError(f"{len(params)} sampling_params for {count} prompts, expected one, or one a prompt")
    return list(params)
