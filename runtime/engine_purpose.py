"""What an engine file is for: serving requests, or timing kernels (tuning_format.py)."""

from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import InputError
from castiron.runtime.manifest import PURPOSE_TUNING


def is_tuning(engine_file: EngineFile) -> bool:
    """Whether it is a tuning engine."""
    return engine_file.manifest.purpose == PURPOSE_TUNING


def check_serves(engine_file: EngineFile) -> None:
    """Raise InputError if it is a tuning engine."""
    if is_tuning(engine_file):
        raise InputError(
            f"{engine_file.path} is a tuning engine, made for `bench-engine tune` alone: build one without "
            "--tune to serve the model"
        )
