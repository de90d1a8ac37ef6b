"""Early checks of a path that a command shall write: a wrong one is told before minutes of work."""

import os
from pathlib import Path

from castiron.runtime.errors import InputError


def output_file(text: str) -> Path:
    """`text` as the path of a file to write. Raises InputError if it names a folder ("out/", "..") or nothing."""
    if not text or "\0" in text:
        raise InputError(f"output {text!r} is no file name: give one")
    if text.rpartition("/")[2] in ("", ".", ".."):
        raise InputError(f"output {text!r} names a folder, expected a file name")
    return Path(text)


def check_output_file(output: Path, ending: str, source: str | os.PathLike[str] | None = None) -> None:
    """Raise InputError if a file can't be written there, or would replace the `source` it is made from.

    `ending` is what such a file's name commonly ends in, for the message.
    """
    folder = output.parent
    if not folder.is_dir():
        raise InputError(f"output folder {folder} does not exist: create it first")
    if output.is_dir():
        raise InputError(f"output {output} is a folder, expected a file name ending in {ending}")
    if output.exists() and not output.is_file():  # the new file would be renamed over it
        raise InputError(
            f"output {output} is a device, pipe or socket, expected a file name ending in {ending}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"cannot write in {folder}: no permission; choose another output")
    if source is not None and output.exists() and Path(source).exists() and output.samefile(source):
        raise InputError(f"output {output} is the file it is made from: choose another output")
