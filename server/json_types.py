"""The type of a decoded JSON value."""

from typing import TypeAlias, Union

Json: TypeAlias = Union[bool, int, float, str, list["Json"], dict[str, "Json"], None]  # noqa: UP007 (recursive)
JsonObject: TypeAlias = dict[str, Json]
