"""What all commands share: one-line errors, exit codes, argument types, the options of an engine that is loaded."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO, TypeVar, cast

from castiron.runtime.errors import EXIT_FAILED, EXIT_USAGE, CastironError, WorkFailedError
from castiron.runtime.printable import one_line

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader of our output went away

Result = TypeVar("Result")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_FLAGS = {"kv_memory_bytes": "--kv-memory", "num_threads": "--threads"}  # all others are spelled alike


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


class _Output:
    """Standard output whose failures say whose they are: other files' are OSErrors too."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._told(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._told(self._stream.flush)

    @staticmethod
    def _told(work: Callable[[], Result]) -> Result:
        try:
            return work()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise WorkFailedError(f"can't write standard output: {error.strerror or error}") from error


def run_command(
    parser: argparse.ArgumentParser, argv: list[str] | None, work: Callable[[argparse.Namespace], int]
) -> int:
    """Parse `argv` (None: the process's), do the work, return the exit code; a mistake or failure is one line."""
    stdout = sys.stdout
    sys.stdout = cast(TextIO, _Output(stdout))
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
    finally:
        sys.stdout = stdout


def _failed(prog: str, message: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except (OSError, WorkFailedError):  # a full disk, say
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
    digits = text.strip()
    if not re.fullmatch(r"[0-9]+", digits) or not digits.strip("0"):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a positive whole number")
    if len(digits) > 18:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is too large, expected at most 18 digits")
    return int(digits)


def whole_number(text: str) -> int:
    """A whole number, negative ones too; its range is checked where it is used."""
    if not re.fullmatch(r"[+-]?[0-9]{1,40}", text.strip()):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a whole number")
    return int(text)


def number(text: str) -> float:
    """A number, as float() reads it; its range is checked where it is used."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not a number, expected for example 0.7"
        ) from None


def named(text: str) -> str:
    """A name or address that can't be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty: give one, or leave the flag out")
    return text


def engine_path(text: str) -> str:
    """The path of an engine file."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no file name: give an engine file made by build-engine"
        )
    return text


def unicode_text(text: str) -> str:
    """Text of the command line, whose bytes must be UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"the text is not valid UTF-8 (character {error.start + 1}): give Unicode text"
        ) from None
    return text


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}…"


def positive_int_list(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, of "1,8,16"."""
    return tuple(positive_int(part) for part in text.split(","))


def token_id_list(text: str) -> tuple[int, ...]:
    """Token ids of "1,2,3"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"-?[0-9]+", part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not a list of token ids, expected for example 1,2,3"
        )
    for part in parts:
        if len(part) > 18:
            raise argparse.ArgumentTypeError(f"token id {_shown(part)} is out of range")
    return tuple(int(part) for part in parts)


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
    group.add_argument(
        "--record", metavar="FILE", help="write every request (prompts too) and step there, to be replayed"
    )
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt whole, shared prefixes too"
    )
