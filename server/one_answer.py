"""run-engine --prompt and --prompt-ids: one answer, engine in this process, first token soon."""

import argparse
import gc
import json
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from castiron.runtime.errors import EngineFormatError, RequestError
from castiron.runtime.peak_memory import peak_memory_bytes
from castiron.server.process_start import process_age_s

if TYPE_CHECKING:  # imported when needed: the tokenizer's side by the process that has it
    from castiron.runtime.llm_engine import LLMEngine
    from castiron.runtime.messages import TokenLogprobs
    from castiron.server.answer_text import AnswerText
    from castiron.server.text_process import TextProcess

DEFAULT_MAX_TOKENS = 256


def answer_once(args: argparse.Namespace) -> int:
    """Answer on stdout, speeds on stderr. Returns 0, or raises CastironError."""
    # what the terminal can't show must not end the answer
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if args.prompt == "":
        raise RequestError("the prompt is empty, expected some text", "prompt")
    gc.disable()  # starting makes many objects that stay: searching them for garbage takes time
    with ExitStack() as stack:
        stack.callback(gc.enable)
        text = None
        if args.prompt is not None:
            text = _start_text(stack, args.engine, args.prompt, args.raw)
        from castiron.runtime.llm_engine import LLMEngine
        from castiron.server.engine_arguments import engine_options

        import_s = process_age_s()
        engine = stack.enter_context(LLMEngine.load(args.engine, engine_options(args, default_max_seqs=1)))
        for warning in engine.info.warnings:
            print(f"run-engine: {warning}", file=sys.stderr)
        prompt_ids = text.prompt_ids() if text is not None else list(args.prompt_ids)
        gc.enable()
        answer = _generate(engine, args, text, prompt_ids)
        answer.peak_rss_bytes = peak_memory_bytes() + (text.child_peak_bytes() if text is not None else 0)
    answer.timings = {"import_s": import_s, **engine.timings, **answer.timings}
    if text is None:
        answer.text = _decode_late(args.engine, answer.shown_ids)
    if args.json:
        print(json.dumps(answer.as_json()))
        return 0
    if text is None:
        print(answer.text if answer.text is not None else ",".join(map(str, answer.token_ids)))
    else:
        print()
    print(answer.speeds(), file=sys.stderr)
    return 0


def _start_text(stack: ExitStack, engine_path: str, prompt: str, raw: bool) -> "AnswerText | TextProcess":
    """The text side: loading in a process of its own, which `stack` ends, or where that can't be loaded here."""
    import castiron.runtime.engine_file  # noqa: F401 (what both need, before there are two)
    from castiron.server.text_process import TextProcess, can_fork

    if can_fork():
        return stack.enter_context(TextProcess(engine_path, prompt, raw))
    from castiron.server.answer_text import AnswerText

    return AnswerText(engine_path, prompt, raw)


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
        self.peak_rss_bytes = 0  # of all processes

    def as_json(self) -> dict[str, object]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_ids,
            "finish_reason": self.finish_reason,
            "logprobs": self.logprob_entries,
            "timings": self.timings,
            "peak_rss_bytes": self.peak_rss_bytes,
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
    engine: "LLMEngine",
    args: argparse.Namespace,
    text: "AnswerText | TextProcess | None",
    prompt_ids: list[int],
) -> _Answer:
    from castiron.runtime.messages import AddRequest
    from castiron.server.engine_arguments import sampling_of

    max_tokens = args.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, engine.info.max_seq_len - len(prompt_ids)))
    sampling = sampling_of(args, engine.info.generation_defaults, max_tokens)
    request = AddRequest("answer", tuple(prompt_ids), sampling)
    engine.validate(request)

    pieces: list[str] = []
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
        if text is not None:
            pieces.append(text.add(output))
            if pieces[-1] and not args.json:
                sys.stdout.write(pieces[-1])
                sys.stdout.flush()
    if text is not None:
        answer.text = "".join(pieces)
    if sampling.logprobs is not None:
        answer.logprob_entries = _logprob_entries(text, answer.token_ids, logprobs)
    num_later = len(answer.token_ids) - 1
    answer.timings = {
        "start_to_first_token_s": start_to_first_token_s,
        "ttft_ms": (first_s - start_s) * 1e3,
        "tpot_ms": (last_s - first_s) * 1e3 / num_later if num_later > 0 else None,
    }
    return answer


def _logprob_entries(
    text: "AnswerText | TextProcess | None", token_ids: list[int], logprobs: list["TokenLogprobs"]
) -> list[object]:
    """One object a token: token_id, token (None without a tokenizer), logprob, and the top ones alike."""
    from castiron.server.logprob_entries import finite

    shown_ids = sorted({*token_ids, *(top_id for item in logprobs for top_id in item.top_token_ids)})
    tokens: dict[int, str] = {}
    if text is not None:
        tokens = dict(zip(shown_ids, text.token_texts(shown_ids), strict=True))

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        return {"token_id": token_id, "token": tokens.get(token_id), "logprob": finite(logprob)}

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
