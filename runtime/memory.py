"""How much memory an engine takes on this machine, and how much there is."""

from pathlib import Path

from castiron.runtime.errors import EngineTargetError, InputError
from castiron.runtime.manifest import Manifest
from castiron.runtime.plan_check import step_bytes
from castiron.runtime.plan_format import PlanHeader

MAX_BLOCKS = 1 << 30  # block ids are int32


def block_bytes(header: PlanHeader, group: str) -> int:
    """Bytes one block of a cache group takes over all its cache tensors."""
    return sum(tensor.block_bytes for tensor in header.cache_tensors if tensor.group == group)


def memory_needed(manifest: Manifest, header: PlanHeader, num_blocks: dict[str, int]) -> int:
    """Bytes the engine takes with that many blocks a cache group once everything has been used."""
    classes = header.weights_bytes + header.arena_bytes + header.rows_bytes + header.counters_bytes
    staging = header.exchange_bytes + header.staging_bytes
    step = max(step_bytes(header, plan) for plan in header.plans)
    params = sum(member.size for member in manifest.members if member.name.startswith("plan."))
    caches = sum(count * block_bytes(header, group) for group, count in num_blocks.items())
    return classes + staging + step + 2 * params + caches


def check_memory(manifest: Manifest, header: PlanHeader, num_blocks: dict[str, int]) -> None:
    """Raise EngineTargetError if more is needed than available, InputError for wrong block counts."""
    groups = {group.name for group in header.cache_groups}
    if set(num_blocks) != groups:
        raise InputError(f"num_blocks names groups {sorted(num_blocks)}, the engine has {sorted(groups)}")
    for group, count in num_blocks.items():
        if not 1 <= count <= MAX_BLOCKS:
            raise InputError(f"num_blocks of group {group} is {count}, expected 1 to {MAX_BLOCKS}")
    needed = memory_needed(manifest, header, num_blocks)
    available = available_memory()
    if available is not None and needed > available:
        raise EngineTargetError(
            f"the engine needs {needed} bytes of memory, {available} are available: free some, "
            "lower `kv_memory_bytes` or use a smaller engine"
        )


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes this process may still take: what the system has, within its cgroup's limit; None if unknown.

    Page cache counted to a cgroup can be taken back, so it counts as available.
    """
    candidates = []
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            candidates.append(int(line.split()[1]) * 1024)
    for folder, limit_name, used_name in (
        (cgroup, "memory.max", "memory.current"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
        if limit.isdigit() and used.isdigit():
            candidates.append(max(0, int(limit) - int(used) + _reclaimable(folder / "memory.stat")))
    return min(candidates) if candidates else None


def _reclaimable(stat: Path) -> int:
    """Bytes of file pages a cgroup holds that nothing has to keep."""
    names = ("inactive_file", "active_file")
    values = dict(line.split(" ", 1) for line in _read(stat).splitlines() if " " in line)
    return sum(int(values[name]) for name in names if values.get(name, "").strip().isdigit())


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
