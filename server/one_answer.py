"""run-engine --prompt and --prompt-ids: one answer, engine in this process, first token soon."""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from castiron.runtime.errors import EngineFormatError, RequestError
from castiron.server.process_start import process_age_s

if TYPE_CHECKING:  # imported when needed, the heavy ones beside the loading of the weights
    from castiron.runtime.llm_engine import LLMEngine
    from castiron.runtime.messages import TokenLogprobs
    from castiron.server.text_front import TextFront

DEFAULT_MAX_TOKENS = 256


class _Text:
    """The tokenizer side, loaded in a thread while the engine loads its weights."""

    def __init__(self, load: Callable[[], tuple["TextFront", list[int]]]) -> None:
        self._result: tuple[TextFront, list[int]] | None = None
        self._error: BaseException | None = None
        self._load = load
        self._thread = threading.Thread(target=self._run, name="tokenizer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._load()
        except BaseException as error:  # raised again in the main thread
            self._error = error

    def get(self) -> tuple["TextFront", list[int]]:
        """The front and the prompt's ids. Raises what loading or encoding raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def _load_text(engine_path: str, prompt: str, raw: bool) -> tuple["TextFront", list[int]]:
    from castiron.server.text_front import TextFront

    front = TextFront.load(engine_path)
    if raw or not front.has_chat_template:
        return front, front.tokenizer.encode_prompt(prompt)
    return front, front.prompter.encode([{"role": "user", "content": prompt}])


def answer_once(args: argparse.Namespace) -> int:
    """Answer on stdout, speeds on stderr. Returns 0, or raises CastironError."""
    # what the terminal can't show must not end the answer
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    text = None
    if args.prompt is not None:
        if not args.prompt:
            raise RequestError("the prompt is empty, expected some text", "prompt")
        text = _Text(lambda: _load_text(args.engine, args.prompt, args.raw))
    from castiron.runtime.llm_engine import LLMEngine
    from castiron.server.engine_arguments import engine_options

    import_s = process_age_s()
    with LLMEngine.load(args.engine, engine_options(args, default_max_seqs=1)) as engine:
        for warning in engine.info.warnings:
            print(f"run-engine: {warning}", file=sys.stderr)
        front, prompt_ids = text.get() if text is not None else (None, list(args.prompt_ids))
        answer = _generate(engine, args, front, prompt_ids)
    answer.timings = {"import_s": import_s, **engine.timings, **answer.timings}
    if front is None:
        answer.text = _decode_late(args.engine, answer.shown_ids)
    if args.json:
        print(json.dumps(answer.as_json()))
        return 0
    if front is None:
        print(answer.text if answer.text is not None else ",".join(map(str, answer.token_ids)))
    else:
        print()
    print(answer.speeds(), file=sys.stderr)
    return 0


class _Answer:
    """What one request gave, and how fast."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.shown_ids: list[int] = []  # without the token that ended the text
        self.text: str | None = None
        self.finish_reason: str | None = None
        self.logprobs: list[TokenLogprobs] | None = None
        self.logprob_entries: list[object] | None = None
        self.timings: dict[str, float | None] = {}

    def as_json(self) -> dict[str, object]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_ids,
            "finish_reason": self.finish_reason,
            "logprobs": self.logprob_entries,
            "timings": self.timings,
        }

    def speeds(self) -> str:
        """One line: tokens and tokens/s of prefill and decode, and the time to the first token."""
        prefill_s = (self.timings["ttft_ms"] or 0.0) / 1e3
        num_prompt = len(self.prompt_ids)
        line = f"prefill {num_prompt} tokens, {num_prompt / max(prefill_s, 1e-9):.1f} tokens/s"
        tpot_ms = self.timings["tpot_ms"]
        if tpot_ms:
            line += f"; decode {len(self.token_ids)} tokens, {1e3 / tpot_ms:.1f} tokens/s"
        return line + f"; start to first token {self.timings['start_to_first_token_s']:.2f} s"


def _generate(
    engine: "LLMEngine", args: argparse.Namespace, front: "TextFront | None", prompt_ids: list[int]
) -> _Answer:
    from castiron.runtime.messages import AddRequest
    from castiron.server.engine_arguments import sampling_of

    max_tokens = args.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, engine.info.max_seq_len - len(prompt_ids)))
    sampling = sampling_of(args, engine.info.generation_defaults, max_tokens)
    request = AddRequest("answer", tuple(prompt_ids), sampling)
    engine.validate(request)

    generated = None
    if front is not None:
        from castiron.server.generated_text import GeneratedText

        generated = GeneratedText(front.tokenizer)
    answer = _Answer(prompt_ids)
    logprobs: list[TokenLogprobs] = []
    start_s = time.perf_counter()
    first_s = last_s = start_s
    start_to_first_token_s = 0.0
    for output in engine.generate([request]):
        if output.new_token_ids:
            last_s = time.perf_counter()
            if not answer.token_ids:
                first_s = last_s
                start_to_first_token_s = process_age_s()
        answer.token_ids += output.new_token_ids
        answer.shown_ids += (
            output.new_token_ids if output.stop_token_id is None else output.new_token_ids[:-1]
        )
        logprobs += output.logprobs
        answer.finish_reason = output.finish_reason
        if generated is not None:
            delta = generated.add(output)
            if delta.text and not args.json:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    if generated is not None:
        answer.text = generated.text
    if sampling.logprobs is not None:
        answer.logprob_entries = _logprob_entries(front, answer.token_ids, logprobs)
    num_later = len(answer.token_ids) - 1
    answer.timings = {
        "start_to_first_token_s": start_to_first_token_s,
        "ttft_ms": (first_s - start_s) * 1e3,
        "tpot_ms": (last_s - first_s) * 1e3 / num_later if num_later > 0 else None,
    }
    return answer


def _logprob_entries(
    front: "TextFront | None", token_ids: list[int], logprobs: list["TokenLogprobs"]
) -> list[object]:
    """One object a token: token_id, token (None without a tokenizer), logprob, and the top ones alike."""
    from castiron.server.logprob_entries import finite

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        token = None if front is None else front.tokenizer.token_text(token_id)
        return {"token_id": token_id, "token": token, "logprob": finite(logprob)}

    return [
        {
            **entry(token_id, item.sampled),
            "top_logprobs": [
                entry(top_id, top) for top_id, top in zip(item.top_token_ids, item.top_logprobs, strict=True)
            ],
        }
        for token_id, item in zip(token_ids, logprobs, strict=True)
    ]


def _decode_late(engine_path: str, token_ids: list[int]) -> str | None:
    """Text for --prompt-ids: the tokenizer, if any, is loaded only now that all tokens are there."""
    from castiron.runtime.engine_file import EngineFile

    with EngineFile.open(engine_path) as engine:
        members = engine.tokenizer_members()
        bos_token_id = engine.manifest.model.bos_token_id
    if "tokenizer.json" not in members:
        return None
    from castiron.server.tokenizer import Tokenizer

    try:
        return Tokenizer.from_members(members, bos_token_id).decode(token_ids)
    except EngineFormatError as error:
        print(f"run-engine: {error}", file=sys.stderr)
        return None
