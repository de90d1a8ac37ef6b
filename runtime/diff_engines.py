"""What differs between two engine files: manifest fields, members by hash, memory, plans and kernels."""

from typing import Any

import msgspec

from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_summary import kernel_counts, memory_plan, plan_entries

ABSENT = "(absent)"


class Difference(msgspec.Struct, frozen=True):
    """One thing that isn't the same; values are JSON-ready."""

    what: str  # "model.vocab_size", "member weights/model-00001.safetensors", "plan forward.decode.records"
    left: Any
    right: Any


def diff_engines(left: EngineFile, right: EngineFile) -> list[Difference]:
    """All differences, none for engines that hold the same. Paths and file times don't count."""
    differences = []
    for what, value, other in _pairs(_facts(left), _facts(right)):
        if value != other:
            differences.append(Difference(what, value, other))
    return differences


def _facts(engine_file: EngineFile) -> dict[str, Any]:
    """Everything compared, flat: name -> value."""
    manifest = msgspec.to_builtins(engine_file.manifest)
    members = manifest.pop("members")
    header, arrays = engine_file.plan()
    facts = _flatten(manifest, "")
    facts |= {f"memory {name}": value for name, value in memory_plan(header).items()}
    facts |= {f"cache group {group.name}": msgspec.to_builtins(group) for group in header.cache_groups}
    facts |= {f"cache tensor {tensor.name}": msgspec.to_builtins(tensor) for tensor in header.cache_tensors}
    for entry in plan_entries(header, arrays):
        facts |= _flatten(entry, f"plan {entry['name']}.")
    facts |= {f"kernel {name}": count for name, count in kernel_counts(header, arrays).items()}
    for member in members:
        facts[f"member {member['name']}"] = f"{member['size']} bytes, sha256 {member['sha256'][:16]}"
    return facts


def _flatten(value: Any, prefix: str) -> dict[str, Any]:
    """Nested objects as dotted names; lists are values."""
    if not isinstance(value, dict) or not value:
        return {prefix.removesuffix("."): value}
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flatten(item, f"{prefix}{name}.")
    return flat


def _pairs(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    names = [*left, *(name for name in right if name not in left)]
    return [(name, left.get(name, ABSENT), right.get(name, ABSENT)) for name in names]
