"""Build recipes: the options of build-engine as a JSON or TOML file."""

import json
import tomllib
from pathlib import Path
from typing import Any

from castiron.builder.options import from_mapping
from castiron.runtime.errors import InputError


def read_recipe(path: Path) -> dict[str, Any]:
    """Options of a recipe file (keys are BuildOptions fields), as constructor arguments.

    Raises InputError if it can't be read or parsed, or has an unknown key or a value of the wrong type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"can't read recipe {path}: {reason}") from error
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise InputError(f"recipe {path} can't be parsed: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise InputError(f"recipe {path} holds a {type(values).__name__}, expected one object of options")
    return from_mapping(values, f"recipe {path}")
