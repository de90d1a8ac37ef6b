"""What the commands of this folder share: one-line errors and exit codes."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from castiron.runtime.errors import EXIT_USAGE, CastironError
from castiron.runtime.printable import one_line

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def run_command(
    parser: argparse.ArgumentParser, argv: list[str] | None, work: Callable[[argparse.Namespace], int]
) -> int:
    """Parse `argv` (None: the process's), do the work, return the exit code; a user's mistake is one line."""
    try:
        args = parser.parse_args(argv)
    except SystemExit as ended:  # --help or a usage error, already printed
        return ended.code if isinstance(ended.code, int) else EXIT_USAGE
    try:
        code = work(args)
        sys.stdout.flush()
        return code
    except CastironError as error:
        print(f"{parser.prog}: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output went away; keep Python from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
