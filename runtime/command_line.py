"""What all commands share: one-line errors, exit codes, argument types, the options of an engine that is loaded."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from castiron.runtime.errors import EXIT_FAILED, EXIT_USAGE, CastironError
from castiron.runtime.printable import one_line

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader of our output went away

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_FLAGS = {"kv_memory_bytes": "--kv-memory", "num_threads": "--threads"}  # all others are spelled alike


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def run_command(
    parser: argparse.ArgumentParser, argv: list[str] | None, work: Callable[[argparse.Namespace], int]
) -> int:
    """Parse `argv` (None: the process's), do the work, return the exit code; a mistake or failure is one line."""
    try:
        try:
            args = parser.parse_args(argv)
        except SystemExit as ended:  # --help or a usage error, already printed
            code = ended.code if isinstance(ended.code, int) else EXIT_USAGE
        else:
            code = work(args)
        sys.stdout.flush()
        return code
    except CastironError as error:
        return _failed(parser.prog, with_flags(str(error)), error.exit_code)
    except KeyboardInterrupt:
        return _failed(parser.prog, "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except MemoryError:
        return _failed(parser.prog, "out of memory: free some or ask for less", EXIT_FAILED)
    except OSError as error:
        return _failed(parser.prog, str(error), EXIT_FAILED)


def _failed(prog: str, message: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # a full disk, say
        _drop_output()
    print(f"{prog}: {one_line(message)}", file=sys.stderr)
    return code


def _drop_output() -> None:
    """Nothing more can be written, not even by the interpreter's own flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def with_flags(message: str) -> str:
    """An error's message with the settings in it, which stand in backquotes, spelled as flags.

    "`num_threads` is 9, expected 1 to 8" becomes "--threads is 9, expected 1 to 8".
    """
    return re.sub(r"`([a-z_]+)`", lambda name: _FLAGS.get(name[1], f"--{name[1].replace('_', '-')}"), message)


def memory_bytes(text: str) -> int:
    """Bytes of "512M", "1.5G", "2GiB" or a plain number (binary units)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, expected for example 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def positive_int(text: str) -> int:
    """A whole number from 1 on."""
    if not re.fullmatch(r"\d{1,18}", text.strip()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positive_int_list(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, of "1,8,16"."""
    return tuple(positive_int(part) for part in text.split(","))


def token_id_list(text: str) -> tuple[int, ...]:
    """Token ids of "1,2,3"."""
    if not re.fullmatch(r"\s*-?\d{1,18}\s*(,\s*-?\d{1,18}\s*)*", text):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a list of token ids, expected for example 1,2,3"
        )
    return tuple(int(part) for part in text.split(","))


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options of EngineOptions, shared by the commands that load an engine."""
    group = parser.add_argument_group("engine options (they may only lower what the engine was built for)")
    group.add_argument(
        "--kv-memory", type=memory_bytes, metavar="SIZE", help="memory of the KV cache, e.g. 512M"
    )
    group.add_argument(
        "--threads", type=positive_int, metavar="N", help="compute threads (default: all cores)"
    )
    group.add_argument("--max-seqs", type=positive_int, metavar="N", help="sequences running at once")
    group.add_argument("--max-seq-len", type=positive_int, metavar="N", help="tokens a sequence may have")
