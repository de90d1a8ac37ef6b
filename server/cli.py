"""run-engine: serve an engine over HTTP, answer one prompt, or chat in the terminal."""

import argparse
import os
import sys

from castiron.runtime.command_line import (
    OneLineParser,
    add_engine_options,
    engine_path,
    named,
    number,
    positive_int,
    run_command,
    token_id_list,
    unicode_text,
    whole_number,
)
from castiron.runtime.errors import InputError

_SERVING_FLAGS = ("host", "port", "served_model_name")
_SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "seed")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="run-engine", description=__doc__, allow_abbrev=False)
    parser.add_argument("engine", type=engine_path, metavar="ENGINE", help="engine file made by build-engine")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--prompt",
        type=unicode_text,
        metavar="TEXT",
        help="answer this once, in the chat template if there is one",
    )
    mode.add_argument(
        "--prompt-ids", type=token_id_list, metavar="IDS", help="continue these token ids: 1,2,3"
    )
    mode.add_argument("--chat", action="store_true", help="chat in the terminal")
    serving = parser.add_argument_group("serving (the default)")
    serving.add_argument("--host", type=named, help="address to listen on (default 127.0.0.1)")
    serving.add_argument(
        "--port", type=whole_number, help="port to listen on, 0 = any free one (default 8000)"
    )
    serving.add_argument(
        "--served-model-name", type=named, metavar="NAME", help="the model's name in the API"
    )
    sampling = parser.add_argument_group("answering (default: the model's generation config, else greedy)")
    sampling.add_argument(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help="new tokens at most (default 256, --chat: all that fit)",
    )
    sampling.add_argument("--temperature", type=number, metavar="T", help="0 = greedy")
    sampling.add_argument("--top-p", type=number, metavar="P", help="1 = off")
    sampling.add_argument("--top-k", type=whole_number, metavar="K", help="0 or -1 = off")
    sampling.add_argument("--seed", type=whole_number, metavar="N", help="same seed, same answer")
    sampling.add_argument(
        "--logprobs", type=whole_number, metavar="N", help="with --json: top N log probabilities a token"
    )
    sampling.add_argument(
        "--raw", action="store_true", help="--prompt without the chat template, markup honoured"
    )
    sampling.add_argument("--json", action="store_true", help="print one JSON object with ids and timings")
    add_engine_options(parser)
    return parser


def _check_combination(args: argparse.Namespace) -> None:
    """Raise InputError for a flag that would do nothing in the chosen mode."""
    answers = args.prompt is not None or args.prompt_ids is not None
    if answers or args.chat:
        mode = "--chat" if args.chat else "--prompt" if args.prompt is not None else "--prompt-ids"
        refused = [name for name in _SERVING_FLAGS if getattr(args, name) is not None]
        if args.chat:
            refused += [name for name in ("json", "raw") if getattr(args, name)]
            refused += ["logprobs"] if args.logprobs is not None else []
        if args.prompt_ids is not None and args.raw:
            refused.append("raw")
    else:
        mode = "serving"
        refused = [name for name in (*_SAMPLING_FLAGS, "logprobs") if getattr(args, name) is not None]
        refused += [name for name in ("json", "raw") if getattr(args, name)]
    if refused:
        raise InputError(f"--{refused[0].replace('_', '-')} has no meaning with {mode}: leave it out")
    if args.logprobs is not None and not args.json:
        raise InputError("--logprobs is printed with --json only: add --json or leave it out")
    if args.port is not None and not 0 <= args.port <= 65535:
        raise InputError(f"--port is {args.port}, expected 0 to 65535")


def _run(args: argparse.Namespace) -> int:
    _check_combination(args)
    # NumPy's BLAS is never called here: its threads would only take time and memory
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # each mode imports what it needs: starting fast is part of the job
    if args.chat:
        from castiron.server.terminal_chat import chat

        return chat(args)
    if args.prompt is not None or args.prompt_ids is not None:
        from castiron.server.one_answer import answer_once

        return answer_once(args)
    from castiron.server.app import serve

    return serve(args)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_command(_parser(), argv, _run)


if __name__ == "__main__":
    sys.exit(main())
