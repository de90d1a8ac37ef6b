"""What the handlers share: the engine, its text front, and running a request's choices side by side."""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from castiron.runtime.engine_client import EngineClient
from castiron.runtime.messages import AddRequest
from castiron.server.error_responses import engine_failure
from castiron.server.generated_text import GeneratedText, TextDelta
from castiron.server.json_types import JsonObject
from castiron.server.logprob_entries import prompt_entries
from castiron.server.openai_schema import SharedFields
from castiron.server.text_front import TextFront


@dataclass
class ServedModel:
    """One engine process and its name in the API."""

    name: str
    client: EngineClient
    front: TextFront
    created: int = field(default_factory=lambda: int(time.time()))
    request_numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def new_id(self, prefix: str) -> str:
        """An id no other request has: "cmpl-…", "chatcmpl-…"."""
        return f"{prefix}-{next(self.request_numbers):x}{secrets.token_hex(12)}"


@dataclass
class Choice:
    """One answer being generated: one of the n to one of the prompts."""

    request: AddRequest
    text: GeneratedText


async def choice_deltas(
    model: ServedModel, choices: Sequence[Choice]
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """(choice index, what it gained) as it comes, until all are finished. Leaving early aborts what runs.

    Raises WorkFailedError if the engine fails.
    """
    if len(choices) == 1:
        async with aclosing(_deltas(model, choices[0])) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue()

    async def run(index: int, choice: Choice) -> None:
        try:
            async with aclosing(_deltas(model, choice)) as deltas:
                async for delta in deltas:
                    queue.put_nowait((index, delta))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(run(index, choice)) for index, choice in enumerate(choices)]
    try:
        num_unfinished = len(choices)
        while num_unfinished:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_unfinished -= item.finish_reason is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _deltas(model: ServedModel, choice: Choice) -> AsyncGenerator[TextDelta, None]:
    # closing the engine's stream before its end (a stop string, a client that left) aborts the request
    async with aclosing(model.client.generate(choice.request)) as outputs:
        async for output in outputs:
            delta = choice.text.add(output)
            if delta.finish_reason in ("error", "abort"):
                raise engine_failure(delta.error)
            yield delta
            if delta.finish_reason is not None:
                return
    raise engine_failure(None)


def prompt_logprobs(body: SharedFields, choice: Choice, model: ServedModel) -> JsonObject:
    """The member of that name of a choice, if it was asked for."""
    if body.prompt_logprobs is None:
        return {}
    prompt_ids = choice.request.prompt_token_ids
    return {"prompt_logprobs": prompt_entries(model.front.tokenizer, prompt_ids, choice.text.prompt_logprobs)}
