"""Reading a config.json's quantization_config strictly: every field is known, harmless, or refused by name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from castiron.runtime.errors import CheckpointError

# fields that don't change what the stored weights mean: bookkeeping, and how they were found
_HARMLESS = frozenset((
    "global_compression_ratio", "version", "quant_method", "config_groups", "ignore", "format", "targets", "weights",
    "num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "observer", "observer_kwargs",
    "scale_dtype", "zp_dtype",
))  # fmt: skip
_FIXED: dict[str, tuple[Any, ...]] = {  # fields with the values under which they change nothing
    "quantization_status": ("compressed", "frozen", None),
    "dynamic": (False, None),
}


class WeightGroup(Protocol):
    """How some linears are stored: PackedGroup or Float8Group."""

    @property
    def targets(self) -> tuple[str, ...]: ...  # names, "re:" and a regular expression, or "Linear" for all


@dataclass(frozen=True)
class Quantization:
    """What a quantization_config says."""

    groups: tuple[WeightGroup, ...]
    ignore: tuple[str, ...]  # as targets

    def group_of(self, module: str) -> WeightGroup | None:
        """The group of a linear; None: it isn't quantized. Names win over expressions, both over "Linear"."""
        if any(_matches(module, pattern) for pattern in self.ignore):
            return None
        candidates = [(target, group) for group in self.groups for target in group.targets]
        for wanted in (
            [group for target, group in candidates if target == module],
            [group for target, group in candidates if target.startswith("re:") and _matches(module, target)],
            [group for target, group in candidates if target == "Linear"],
        ):
            if wanted:
                return wanted[0]
        return None


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module


@dataclass(frozen=True)
class ConfigReader:
    """Checks of fields, whose errors name the file, the field, what it is and what was expected."""

    path: Path

    def error(self, field: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: the quantization has {field} = {repr(value)[:60]}, expected {expected}"
        )

    def expect(self, fields: Mapping[str, Any], name: str, *allowed: Any) -> None:
        """Raise CheckpointError unless the field has one of these values, of the same type."""
        value = fields.get(name)
        if type(value) not in map(type, allowed) or value not in allowed:
            raise self.error(name, value, " or ".join(str(item) for item in allowed))

    def check_unread(self, fields: Mapping[str, Any], *read: str) -> None:
        """Raise CheckpointError for a field that is neither known, nor empty, nor one of `read`."""
        for name, value in fields.items():
            if name in read or name in _HARMLESS or value is None or value == {} or value == []:
                continue
            if name == "sparsity_config" and isinstance(value, dict) and value.get("format") == "dense":
                continue
            if name in _FIXED:
                self.expect(fields, name, *_FIXED[name])
                continue
            raise CheckpointError(
                f"{self.path}: the quantization has {str(name)[:60]} = {repr(value)[:60]}, which may change the math"
                " and isn't supported"
            )

    def names(self, field: str, value: Any) -> tuple[str, ...]:
        """A list of names, those that begin with "re:" regular expressions."""
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, value, "a list of names")
        for name in value:
            try:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
            except re.error as error:
                raise self.error(field, name, f"a regular expression ({error})") from error
        return tuple(value)
