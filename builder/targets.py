"""Build targets: what hardware an engine is for, and the defaults that go with it (configs/targets.json)."""

import importlib.resources
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from castiron.builder.plan.buckets import ladder_buckets, top_buckets
from castiron.builder.plan.kernel_choice import KernelChooser
from castiron.builder.plan.tactics import StoredTactics
from castiron.models.kernel_spec import KernelSpec
from castiron.plugins_cpu.specs import SPECS as CPU_SPECS
from castiron.plugins_cuda.compile import ARCHITECTURES
from castiron.plugins_cuda.kernel_spec import Gpu
from castiron.plugins_cuda.specs import SPECS as CUDA_SPECS
from castiron.runtime.devices import kernel_library
from castiron.runtime.errors import InputError
from castiron.runtime.manifest import RUN, Profile
from castiron.runtime.step_abi import Bucket

_LADDERS: dict[str, Callable[[Profile], list[tuple[str, Bucket]]]] = {
    "top": top_buckets,
    "full": ladder_buckets,
}
_SPECS: dict[str, Mapping[str, KernelSpec]] = {"cpu": CPU_SPECS, "cuda": CUDA_SPECS}
# cache dtype of each compute mode
_CACHE_DTYPES = {"cpu": {"f32": "f32", "bf16": "f16", "int8": "f16"}, "cuda": {"bf16": "bf16"}}


@dataclass(frozen=True)
class Target:
    """One kind of hardware."""

    name: str  # "cpu:amx", "sm_90"
    kind: str  # "cpu" or "cuda"
    level: str  # cpu: one of kernel_library.LEVELS; cuda: "sm_90"
    gpu: str  # one that the sizes below are of, "H200"; "" on the CPU
    status: str  # manifest.RUN, or what has been done instead of running its engines
    is_local: bool  # this machine can run it, and is what was asked for
    layout: str  # of packed weights
    compute: tuple[str, ...]  # modes it has kernels for
    block_size: int  # tokens a KV block holds
    max_seqs: int  # defaults of the profile
    max_seq_len: int
    max_batched_tokens: int
    bucket_ladder: str
    num_sms: int  # multiprocessors kernels are launched for; 0 on the CPU
    requirements: dict[str, Any]  # what the device must have, checked at load

    def buckets(self, profile: Profile) -> list[tuple[str, Bucket]]:
        """The (ladder, bucket) pairs plans are made for."""
        return _LADDERS[self.bucket_ladder](profile)

    def cache_dtype(self, compute: str) -> str:
        """What keys and values are stored as."""
        return _CACHE_DTYPES[self.kind][compute]

    def kernel_chooser(self, stored: StoredTactics | None = None) -> KernelChooser:
        """Chooses among the target's kernels, by measured times where `stored` has them."""
        gpu = None
        if self.kind == "cuda":
            gpu = Gpu(ARCHITECTURES[self.level], self.num_sms, self.requirements["shared_bytes_per_block"])
        return KernelChooser(_SPECS[self.kind].values(), gpu, self.name, stored)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before an engine for it is relied upon."""
        if self.status == RUN:
            return ()
        return (
            f"engines for {self.name} are {self.status}: none has been tried on such a GPU "
            f"(its sizes here: {self.gpu})",
        )

    @property
    def is_row_stable(self) -> bool:
        """Whether a token's result never depends on batch, bucket or chunking, whatever the build asks for."""
        return self.kind == "cpu"


def resolve_target(name: str) -> Target:
    """The target called "cpu" (this machine's best level), "cpu:LEVEL", "sm_90", "sm_80", ...

    Raises InputError for a name that isn't known or has no kernels.
    """
    defaults = _defaults()
    kind, _, level = name.partition(":")
    if kind == "cpu":
        if ":" in name:
            kernel_library.check_level(level)
        level = level or kernel_library.best_level()
        is_local = name == "cpu"
        name = f"cpu:{level}"
    elif name in defaults:
        level, is_local = name, False
    else:
        known = ", ".join(target for target in defaults if target != "cpu")
        levels = ", ".join(kernel_library.LEVELS)
        raise InputError(f"unknown target {name!r}, expected cpu, cpu:LEVEL with one of {levels}, or {known}")
    values = defaults[kind]
    return Target(
        name=name, level=level, is_local=is_local, **{**values, "compute": tuple(values["compute"])}
    )


def target_names(kinds: Collection[str]) -> list[str]:
    """Names of the targets of these kinds of hardware, or so named."""
    return [name for name, values in _defaults().items() if name in kinds or values["kind"] in kinds]


def _defaults() -> dict[str, Any]:
    file = importlib.resources.files("castiron.configs").joinpath("targets.json")
    targets: dict[str, Any] = json.loads(file.read_text())
    return targets
