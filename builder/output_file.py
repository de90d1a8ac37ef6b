"""Early checks of the output path: a wrong one is told before minutes of work."""

import os
from pathlib import Path

from castiron.runtime.errors import InputError


def check_output(output: Path, model: str) -> None:
    """Raise InputError if an engine can't be written there, or would replace the model it is made from."""
    folder = output.parent
    if not folder.is_dir():
        raise InputError(f"output folder {folder} does not exist: create it first")
    if output.is_dir():
        raise InputError(f"output {output} is a folder, expected a file name ending in .engine")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"cannot write in {folder}: no permission; choose another output")
    if output.exists() and Path(model).exists() and output.samefile(model):
        raise InputError(f"output {output} is the model itself: choose another output")
