"""Errors a user can act on. Each message is one line: what was got, what was expected, what to do.

A setting the user may have made (a field of EngineOptions or SamplingParams) stands in backquotes by its Python
name; commands show the flag instead (command_line.with_flags).
"""

EXIT_FAILED = 1  # a check or the work itself failed (disk full, device lost)
EXIT_USAGE = 2  # usage or input
EXIT_CANNOT_RUN_HERE = 3  # this engine can't run on this machine


class CastironError(Exception):
    """Base of every error raised for a user's mistake or a failed piece of work; `exit_code` is the command's."""

    exit_code = EXIT_FAILED


class WorkFailedError(CastironError):
    """The work could not be done: disk full, no compiler, device lost, a check that failed."""


class InputError(CastironError):
    """Wrong usage or input: a flag, a checkpoint, a request."""

    exit_code = EXIT_USAGE


class CheckpointError(InputError):
    """A checkpoint that is damaged, incomplete, contradictory or of an unsupported kind."""


class RequestError(InputError):
    """A request that can't be admitted; `param` names the field (HTTP 400)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineFormatError(InputError):
    """A file that is not a sound engine file: damaged, truncated, hostile."""


class EngineTargetError(CastironError):
    """A sound engine that can't run on this machine or with this runtime version."""

    exit_code = EXIT_CANNOT_RUN_HERE
