"""Build targets: what hardware an engine is for, and the defaults that go with it (configs/targets.json)."""

import importlib.resources
import json
from collections.abc import Callable
from dataclasses import dataclass

from castiron.builder.plan.buckets import ladder_buckets, top_buckets
from castiron.runtime.devices import kernel_library
from castiron.runtime.errors import InputError
from castiron.runtime.manifest import Profile
from castiron.runtime.step_abi import Bucket

_LADDERS: dict[str, Callable[[Profile], list[tuple[str, Bucket]]]] = {
    "top": top_buckets,
    "full": ladder_buckets,
}


@dataclass(frozen=True)
class Target:
    """One kind of hardware."""

    kind: str  # "cpu"
    level: str  # one of kernel_library.LEVELS
    is_local: bool  # this machine can run it
    block_size: int  # tokens a KV block holds
    max_seqs: int  # defaults of the profile
    max_seq_len: int
    max_batched_tokens: int
    bucket_ladder: str

    def buckets(self, profile: Profile) -> list[tuple[str, Bucket]]:
        """The (ladder, bucket) pairs plans are made for."""
        return _LADDERS[self.bucket_ladder](profile)


def resolve_target(name: str) -> Target:
    """The target called "cpu" (this machine's best level) or "cpu:LEVEL".

    Raises InputError for a name that isn't known or has no kernels yet.
    """
    kind, _, level = name.partition(":")
    if kind.startswith("sm_") or kind == "cuda":
        raise InputError(f"target {name}: there are no CUDA kernels yet, expected cpu or cpu:LEVEL")
    if kind != "cpu":
        levels = ", ".join(kernel_library.LEVELS)
        raise InputError(f"unknown target {name!r}, expected cpu or cpu:LEVEL with one of {levels}")
    best = kernel_library.best_level()
    if ":" in name:
        kernel_library.check_level(level)
    else:
        level = best
    defaults = json.loads(importlib.resources.files("castiron.configs").joinpath("targets.json").read_text())
    return Target(kind=kind, level=level, is_local=kernel_library.supports(level), **defaults[kind])
