"""AsyncLLM: an engine in a process of its own, its answers streamed to any number of tasks of one event loop."""

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from castiron.runtime.engine_client import EngineClient
from castiron.runtime.engine_info import EngineInfo
from castiron.server.generated_text import TextDelta
from castiron.server.llm import checked_engine_options
from castiron.server.llm_request import Conversation, Prompt, encode_conversation, encode_prompt, make_request
from castiron.server.llm_sampling import SamplingParams
from castiron.server.served_model import Choice, ServedModel, choice_deltas
from castiron.server.text_front import TextFront


class AsyncLLM:
    """One engine process and its tokenizer; made by `start`.

        async with await AsyncLLM.start("model.engine") as llm:
            async for delta in llm.generate("The capital of France is"):
                print(delta.text, end="")

    Requests of all tasks are batched. Leaving a stream early aborts its request.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    @classmethod
    async def start(cls, engine: str | os.PathLike[str], **engine_options: int | str | None) -> "AsyncLLM":
        """Load the engine in a new process; `engine_options` are the fields of EngineOptions.

        Raises what LLM does, and WorkFailedError if the process can't be run.
        """
        options = checked_engine_options(engine_options)
        front = TextFront.load(engine)
        client = await EngineClient.start(engine, options)
        return cls(ServedModel("llm", client, front))

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what runs and end the process."""
        await self._model.client.stop()

    @property
    def info(self) -> EngineInfo:
        """The engine's EngineInfo: limits, vocabulary size, timings."""
        return self._model.client.info

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a raw prompt (text, or token ids); what it gains as it comes, the last with a finish_reason.

        sampling_params None: the model's generation config with 16 new tokens. Raises InputError and RequestError at
        once, WorkFailedError while it streams if the engine is lost.
        """
        return self._stream(encode_prompt(self._model.front, prompt), sampling_params, stop, 16)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation ([{"role", "content"}, …]) through the model's chat template.

        sampling_params None: the model's generation config and all the tokens that fit.
        """
        return self._stream(encode_conversation(self._model.front, messages), sampling_params, stop, None)

    def _stream(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams | None,
        stop: str | Sequence[str] | None,
        default_max_tokens: int | None,
    ) -> AsyncGenerator[TextDelta, None]:
        model = self._model
        request, text = make_request(
            model.new_id("llm"), prompt_ids, params, stop, default_max_tokens, model.front, self.info
        )
        model.client.validate(request)
        return self._deltas(Choice(request, text))

    async def _deltas(self, choice: Choice) -> AsyncGenerator[TextDelta, None]:
        async with aclosing(choice_deltas(self._model, [choice])) as deltas:
            async for _, delta in deltas:
                yield delta
