"""run-engine --chat: a conversation in the terminal."""

import argparse
import sys
import time

from castiron.runtime.admission import longer_sequences, tokens_left
from castiron.runtime.command_line import with_flags
from castiron.runtime.errors import InputError, RequestError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest
from castiron.server.engine_arguments import engine_options, sampling_of
from castiron.server.generated_text import GeneratedText
from castiron.server.json_types import JsonObject
from castiron.server.text_front import TextFront

HELP = """\
/reset   forget the conversation
/exit    leave (so does Ctrl-D)
/help    this
Ctrl-C stops an answer; at the prompt it leaves."""


def chat(args: argparse.Namespace) -> int:
    """Talk until /exit or the end of input. Returns 0, or raises CastironError."""
    # what the terminal can't show must not end the answer
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    with LLMEngine.load(args.engine, engine_options(args, default_max_seqs=1)) as engine:
        for warning in engine.info.warnings:
            print(f"run-engine: {warning}", file=sys.stderr)
        front = TextFront.load(args.engine)
        _ = front.prompter  # an engine without a chat template can't chat: say so before the first question
        sampling_of(args, engine.info.generation_defaults, args.max_tokens or 1)
        print(f"{engine.info.model_name}: /help for help, Ctrl-D to leave", file=sys.stderr)
        messages: list[JsonObject] = []
        while True:
            line = _read_line()
            if line is None or line.strip() == "/exit":
                return 0
            line = line.strip()
            if line == "/reset":
                messages.clear()
                print("(forgotten)", file=sys.stderr)
            elif line == "/help":
                print(HELP, file=sys.stderr)
            elif line.startswith("/"):
                print(f"unknown command {line.split()[0]}\n{HELP}", file=sys.stderr)
            elif line:
                _turn(engine, front, args, messages, line)


def _read_line() -> str | None:
    """The next line, None at the end of input; the prompt sign is shown to people only.

    Raises InputError for a line that isn't UTF-8.
    """
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline()
        try:
            return line.decode() if line else None
        except UnicodeDecodeError as error:
            raise InputError(
                f"a line of the input is not UTF-8 text: {error.reason}, got {line[:40]!r}"
            ) from error
    try:
        return input("> ")
    except EOFError:
        print(file=sys.stderr)
        return None


def _turn(
    engine: LLMEngine, front: TextFront, args: argparse.Namespace, messages: list[JsonObject], text: str
) -> None:
    """Answer one line and keep both in `messages`; one that can't be served is reported and forgotten."""
    messages.append({"role": "user", "content": text})
    generated = GeneratedText(front.tokenizer)
    try:
        prompt_ids = front.prompter.encode(messages)
        left = tokens_left(
            len(prompt_ids), engine.info.max_seq_len, "messages", longer_sequences(engine.info)
        )
        sampling = sampling_of(args, engine.info.generation_defaults, args.max_tokens or left)
        request = AddRequest("turn", tuple(prompt_ids), sampling)
        engine.validate(request)
    except RequestError as error:
        messages.pop()
        print(f"run-engine: {with_flags(str(error))} (/reset starts over)", file=sys.stderr)
        return
    start_s = first_s = time.perf_counter()
    outputs = engine.generate([request])
    try:
        for output in outputs:
            if not generated.token_ids:
                first_s = time.perf_counter()
            sys.stdout.write(generated.add(output).text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        outputs.close()  # type: ignore[attr-defined]  # aborts the request
        while engine.has_unfinished():
            engine.step()
    end_s = time.perf_counter()
    print()
    messages.append({"role": "assistant", "content": generated.text})
    num_later = len(generated.token_ids) - 1
    if num_later > 0:
        rate = num_later / max(end_s - first_s, 1e-9)
        print(f"({first_s - start_s:.2f} s to the first token, then {rate:.1f} tokens/s)", file=sys.stderr)
