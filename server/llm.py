"""LLM: an engine file as a Python object, in this process."""

import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from castiron.runtime.admission import longer_sequences, tokens_left
from castiron.runtime.engine_info import EngineInfo
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.errors import InputError, RequestError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest, TokenLogprobs
from castiron.runtime.nearest_name import unknown_name
from castiron.server.bad_words import bad_words_token_ids
from castiron.server.generated_text import GeneratedText
from castiron.server.json_types import JsonObject
from castiron.server.llm_sampling import SamplingParams
from castiron.server.sampling_defaults import sampling_params as default_sampling
from castiron.server.stop_strings import checked_stop_strings
from castiron.server.text_front import TextFront

Prompt = str | Sequence[int]
_EXPECTED = "expected text or a list of token ids, or a list of those"


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]  # with the token that ended it
    prompt_token_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(
        default=(), repr=False
    )  # of prompt_token_ids[1:], if asked for
    num_cached_tokens: int = field(default=0, compare=False)  # of the prompt, found in the prefix cache


class LLM:
    """One engine and its tokenizer.

        with LLM("model.engine") as llm:
            print(llm.generate(["The capital of France is"])[0].text)
            print(llm.chat([{"role": "user", "content": "Hello"}]).text)

    Not for several threads at once.
    """

    def __init__(self, engine: str | os.PathLike[str], **engine_options: int | str | None) -> None:
        """`engine_options` are the fields of EngineOptions (kv_memory_bytes, num_threads, max_seqs, prefix_cache, …).

        Raises InputError for an unknown option, else as LLMEngine.load.
        """
        known = EngineOptions.__struct_fields__
        for name in engine_options:
            if name not in known:
                raise InputError(unknown_name("engine option", name, known))
        try:
            options = msgspec.convert(engine_options, EngineOptions)
        except msgspec.ValidationError as error:
            raise InputError(f"an engine option has the wrong type: {error}") from error
        self._front = TextFront.load(engine)
        self._engine = LLMEngine.load(engine, options)
        self._num_requests = 0

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine's memory and threads."""
        self._engine.close()

    @property
    def info(self) -> EngineInfo:
        """The engine's EngineInfo: limits, vocabulary size, timings."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | tuple[SamplingParams, ...] | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """Continue raw prompts (text, or token ids), all at once, batched by the engine; in the order given.

        sampling_params: for all prompts, or one a prompt; None: the model's generation config with 16 new tokens.
        `stop`: strings that end an answer as those of sampling_params do. Raises InputError, and RequestError
        for a prompt that can't be served, before anything runs.
        """
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        if isinstance(sampling_params, list | tuple):
            params: list[SamplingParams | None] = list(sampling_params)
        else:
            params = [sampling_params] * len(encoded)
        if len(params) != len(encoded):
            raise InputError(
                f"{len(params)} sampling_params for {len(encoded)} prompts, expected one, or one a prompt"
            )
        return self._run(
            [
                self._request(ids, asked, stop, default_max_tokens=16)
                for ids, asked in zip(encoded, params, strict=True)
            ]
        )

    def chat(
        self,
        messages: Sequence[JsonObject],
        sampling_params: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Completion:
        """Answer a conversation ([{"role", "content"}, …]) through the model's chat template.

        sampling_params None: the model's generation config and all the tokens that fit. Raises RequestError.
        """
        if not _is_list(messages):
            kind = type(messages).__name__
            raise RequestError(
                f"messages is a {kind}, expected a list of {{role, content}} objects", "messages"
            )
        if not messages:
            raise RequestError("messages is empty, expected at least one message", "messages")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{index}] is no {{role, content}} object", "messages")
        prompt_ids = tuple(self._front.prompter.encode(list(messages)))
        return self._run([self._request(prompt_ids, sampling_params, stop, default_max_tokens=None)])[0]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty, expected some text", "prompt")
            return tuple(self._front.tokenizer.encode_prompt(prompt))
        if not _is_list(prompt):
            raise RequestError(f"a prompt is a {type(prompt).__name__}, {_EXPECTED}", "prompt")
        return tuple(prompt)

    def _request(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams | None,
        stop: str | Sequence[str] | None,
        default_max_tokens: int | None,  # None: all that fit
    ) -> tuple[AddRequest, GeneratedText]:
        """A validated request and where its text will go. Raises InputError, RequestError."""
        if params is None:
            left = tokens_left(len(prompt_ids), self.info.max_seq_len, advice=longer_sequences(self.info))
            max_tokens = left if default_max_tokens is None else min(left, default_max_tokens)
            sampling = default_sampling(self._engine.info.generation_defaults, max_tokens=max_tokens)
        elif isinstance(params, SamplingParams):
            words = bad_words_token_ids(params.bad_words, self._front.tokenizer)
            sampling = params.for_engine
            if words:
                sampling = msgspec.structs.replace(
                    sampling, bad_words_token_ids=(*sampling.bad_words_token_ids, *words)
                )
        else:
            raise InputError(
                f"sampling_params is a {type(params).__name__}, expected castiron.SamplingParams"
            )
        request = AddRequest(f"llm-{self._num_requests}", prompt_ids, sampling)
        self._num_requests += 1
        self._engine.validate(request)
        stop_strings = (*checked_stop_strings(stop), *(params.stop if params is not None else ()))
        return request, GeneratedText(self._front.tokenizer, stop_strings, sampling.min_tokens)

    def _run(self, asked: list[tuple[AddRequest, GeneratedText]]) -> list[Completion]:
        texts = {request.request_id: generated for request, generated in asked}
        for output in self._engine.generate([request for request, _ in asked]):
            generated = texts[output.request_id]
            if generated.finish_reason is not None:
                continue  # ended by a stop string: its abort is reported too
            if generated.add(output).finish_reason is not None and output.finish_reason is None:
                self._engine.abort(output.request_id)
        return [
            Completion(
                text=generated.text,
                token_ids=tuple(generated.token_ids),
                prompt_token_ids=request.prompt_token_ids,
                finish_reason=str(generated.finish_reason),
                logprobs=tuple(generated.logprobs),
                prompt_logprobs=generated.prompt_logprobs,
                num_cached_tokens=generated.num_cached_tokens,
            )
            for request, generated in asked
        ]


def _is_list(value: object) -> bool:
    """Whether it holds items in an order: a list, tuple, range or array, and not text, bytes or a mapping."""
    ordered = all(hasattr(value, name) for name in ("__len__", "__getitem__", "__iter__"))
    return ordered and not isinstance(value, str | bytes | bytearray | memoryview | Mapping)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, or token ids) or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(f"prompts is a {type(prompts).__name__}, {_EXPECTED}", "prompt")
    if len(prompts) > 0 and isinstance(prompts[0], numbers.Number):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
