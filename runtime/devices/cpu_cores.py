"""Which processors the CPU device's threads run on: affinity, cgroup quota and physical cores."""

import math
import os
from pathlib import Path

from castiron.runtime.errors import InputError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CPU_FOLDER = Path("/sys/devices/system/cpu")


def choose_cores(num_threads: int | None) -> list[int]:
    """Processor numbers for the threads, one each.

    None takes one per physical core this process may use, no more than the cgroup's quota pays for: threads
    that spin under a quota take time from those that work. Raises InputError for a number below 1 or above
    the processors this process may use.
    """
    usable = usable_processors()
    ordered = _first_of_each_core_first(usable)
    if num_threads is None:
        num_cores = len({_core_of(processor) for processor in usable})
        quota = cgroup_quota()
        num_threads = num_cores if quota is None else max(1, min(num_cores, math.floor(quota)))
    if not 1 <= num_threads <= len(usable):
        raise InputError(
            f"`num_threads` is {num_threads}, expected 1 to {len(usable)} (processors this process may use)"
        )
    return ordered[:num_threads]


def usable_processors() -> list[int]:
    """Processor numbers this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cgroup_quota(proc_file: Path = Path("/proc/self/cgroup"), root: Path = _CGROUP_ROOT) -> float | None:
    """Processors' worth of time the cgroups allow (the least along the way up); None if unlimited."""
    quotas = []
    for line in _read(proc_file).splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if not controllers:  # version 2
            quotas += [_quota(folder / "cpu.max") for folder in _upwards(root, path)]
        elif "cpu" in controllers.split(","):  # version 1
            base = root / "cpu" if (root / "cpu").is_dir() else root / controllers
            for folder in _upwards(base, path):
                quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
                quotas.append(_ratio(quota.strip(), period.strip()))
    limits = [quota for quota in quotas if quota is not None]
    return min(limits) if limits else None


def _upwards(root: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it, up to `root` (in a container it may lie outside)."""
    folder = root / path.strip("/")
    return [folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)]


def _quota(file: Path) -> float | None:
    quota, _, period = _read(file).strip().partition(" ")
    return _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    """quota / period, None for "max", -1 or a file that isn't there."""
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _core_of(processor: int) -> tuple[int, ...]:
    """Processors sharing the physical core, the same tuple for each of them."""
    text = _read(_CPU_FOLDER / f"cpu{processor}" / "topology" / "thread_siblings_list").strip()
    siblings: list[int] = []
    for item in filter(None, text.split(",")):
        first, _, last = item.partition("-")
        siblings += range(int(first), int(last or first) + 1)
    return tuple(siblings) or (processor,)


def _first_of_each_core_first(processors: list[int]) -> list[int]:
    firsts: list[int] = []
    others: list[int] = []
    seen = set()
    for processor in processors:
        core = _core_of(processor)
        (others if core in seen else firsts).append(processor)
        seen.add(core)
    return firsts + others


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
