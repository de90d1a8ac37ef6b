"""LLM: an engine file as a Python object, in this process."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import msgspec

from castiron.runtime.engine_info import EngineInfo
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.errors import InputError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest, TokenLogprobs
from castiron.runtime.nearest_name import unknown_name
from castiron.server.generated_text import GeneratedText
from castiron.server.llm_request import (
    Conversation,
    Prompt,
    as_list,
    encode_conversation,
    encode_prompt,
    is_list,
    make_request,
    one_each,
)
from castiron.server.llm_sampling import SamplingParams
from castiron.server.text_front import TextFront

Params = SamplingParams | list[SamplingParams] | tuple[SamplingParams, ...] | None


def checked_engine_options(given: dict[str, Any]) -> EngineOptions:
    """Raises InputError for an unknown option or a wrong type."""
    known = EngineOptions.__struct_fields__
    for name in given:
        if name not in known:
            raise InputError(unknown_name("engine option", name, known))
    try:
        return msgspec.convert(given, EngineOptions)
    except msgspec.ValidationError as error:
        raise InputError(f"an engine option has the wrong type: {error}") from error


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
        options = checked_engine_options(engine_options)
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
        sampling_params: Params = None,
        stop: str | Sequence[str] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continue raw prompts (text, or token ids), all at once, batched by the engine; in the order given.

        sampling_params: for all prompts, or one a prompt; None: the model's generation config with 16 new tokens.
        `stop`: strings that end an answer as those of sampling_params do. `progress`: a bar on standard error of the
        answers that are done; None: for several prompts, if it is a terminal. Raises InputError, and RequestError for
        a prompt that can't be served, before anything runs.
        """
        encoded = [encode_prompt(self._front, prompt) for prompt in as_list(prompts)]
        return self._run(encoded, sampling_params, stop, 16, progress)

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: Params = None,
        stop: str | Sequence[str] | None = None,
        *,
        progress: bool | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params = None,
        stop: str | Sequence[str] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        stop: str | Sequence[str] | None = None,
        *,
        progress: bool | None = None,
    ) -> Completion | list[Completion]:
        """Answer a conversation ([{"role", "content"}, …]) through the model's chat template: its Completion.

        Several conversations are answered side by side: a list of Completions, in their order. sampling_params None:
        the model's generation config and all the tokens that fit. Raises InputError, RequestError.
        """
        several = is_list(messages) and len(messages) > 0 and is_list(messages[0])
        conversations: list[Any] = list(messages) if several else [messages]
        encoded = [encode_conversation(self._front, conversation) for conversation in conversations]
        answers = self._run(encoded, sampling_params, stop, None, progress)
        return answers if several else answers[0]

    def _run(
        self,
        prompts: list[tuple[int, ...]],
        sampling_params: Params,
        stop: str | Sequence[str] | None,
        default_max_tokens: int | None,
        progress: bool | None,
    ) -> list[Completion]:
        asked: list[tuple[AddRequest, GeneratedText]] = []
        for prompt_ids, params in zip(prompts, one_each(sampling_params, len(prompts)), strict=True):
            request_id = f"llm-{self._num_requests}"
            self._num_requests += 1
            asked.append(
                make_request(request_id, prompt_ids, params, stop, default_max_tokens, self._front, self.info)
            )
            self._engine.validate(asked[-1][0])
        texts = {request.request_id: generated for request, generated in asked}
        if progress is None:
            progress = len(asked) > 1 and sys.stderr.isatty()
        with _progress_bar(len(asked), shown=progress) as bar:
            for output in self._engine.generate([request for request, _ in asked]):
                generated = texts[output.request_id]
                if generated.finish_reason is not None:
                    continue  # ended by a stop string: its abort is reported too
                if generated.add(output).finish_reason is not None:
                    bar.update()
                    if output.finish_reason is None:
                        self._engine.abort(output.request_id)
        return [_completion(request, generated) for request, generated in asked]


def _progress_bar(total: int, *, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="answer", disable=not shown)


def _completion(request: AddRequest, generated: GeneratedText) -> Completion:
    return Completion(
        text=generated.text,
        token_ids=tuple(generated.token_ids),
        prompt_token_ids=request.prompt_token_ids,
        finish_reason=str(generated.finish_reason),
        logprobs=tuple(generated.logprobs),
        prompt_logprobs=generated.prompt_logprobs,
        num_cached_tokens=generated.num_cached_tokens,
    )
