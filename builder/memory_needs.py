"""How much memory an engine will take, computed from its plan, against what this machine has."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from castiron.runtime.errors import InputError
from castiron.runtime.manifest import Profile
from castiron.runtime.plan_check import step_bytes
from castiron.runtime.plan_format import PlanHeader


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of an engine at run time."""

    weights: int
    arena: int
    other: int  # step block, rows, staging
    sequence_cache: int  # cache blocks of one sequence of max_seq_len
    block: int  # one cache block over all layers

    @property
    def minimum(self) -> int:
        """What it takes to serve one sequence of max_seq_len."""
        return self.weights + self.arena + self.other + self.sequence_cache


def memory_needs(header: PlanHeader, profile: Profile) -> MemoryNeeds:
    """Computed from the plan alone."""
    block = sum(tensor.block_bytes for tensor in header.cache_tensors)
    blocks = max((-(-profile.max_seq_len // group.block_size) for group in header.cache_groups), default=0)
    step = max(step_bytes(header, plan) for plan in header.plans)
    return MemoryNeeds(
        weights=header.weights_bytes,
        arena=header.arena_bytes,
        other=step + header.rows_bytes + header.staging_bytes + header.counters_bytes,
        sequence_cache=blocks * block,
        block=block,
    )


def check_fits(needs: MemoryNeeds, machine_bytes: int | None) -> None:
    """Raise InputError with the sum if the machine can't hold the engine and one sequence."""
    if machine_bytes is not None and needs.minimum > machine_bytes:
        raise InputError(
            f"the engine needs {needs.minimum} bytes (weights {needs.weights}, arena {needs.arena}, other "
            f"{needs.other}, one sequence's cache {needs.sequence_cache}), this machine has {machine_bytes}: "
            "lower --max-seq-len or --max-batched-tokens, use a smaller checkpoint, or name the --target "
            "of another machine"
        )


def machine_memory_bytes() -> int | None:
    """Memory of this machine, or of the container it runs in if that is less; None if unknown."""
    sizes = []
    with contextlib.suppress(ValueError, OSError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            sizes.append(int(text))
    return min(sizes) if sizes else None
