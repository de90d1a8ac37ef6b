"""The compiled kernels of an engine: a library in the cache for the CPU, cubins inside the engine for CUDA."""

import concurrent.futures
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from castiron.builder.plan.emit import cubin_member
from castiron.builder.plan.planner import PlannedEngine
from castiron.builder.targets import Target
from castiron.plugins_cpu.compile import build_library
from castiron.plugins_cuda.compile import compile_cubin
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.runtime.dummy_weights import KERNEL_MEMBER as FILL_DUMMY_MEMBER


@dataclass(frozen=True)
class KernelFiles:
    """What was compiled."""

    note: str  # for the progress line
    members: dict[str, bytes] = field(default_factory=dict)  # of the engine file


def compile_for_cpu(target: Target) -> KernelFiles:
    """Build the level's library into the cache; independent of the model. Raises WorkFailedError."""
    return KernelFiles(build_library(target.level).name)


def compile_for_cuda(
    target: Target, planned: PlannedEngine, keep_going: Callable[[], None], with_fill_dummy: bool = False
) -> KernelFiles:
    """Compile the cubins of all kernels the plans launch, as many at once as there are processors.

    `with_fill_dummy`: also the one that makes up weights at load. `keep_going` may raise to stop. Raises
    WorkFailedError if there is no compiler or it fails.
    """

    specs = [spec for spec in planned.kernel_specs.values() if isinstance(spec, CudaKernelSpec)]
    sources = {cubin_member(spec): (spec.source, spec.defines) for spec in specs}
    if with_fill_dummy:
        sources[FILL_DUMMY_MEMBER] = ("fill_dummy.cu", ())

    def compile_one(source: tuple[str, tuple[tuple[str, str], ...]]) -> bytes:
        keep_going()
        return compile_cubin(*source, target.level)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        cubins = list(pool.map(compile_one, sources.values()))
    members = dict(zip(sources, cubins, strict=True))
    return KernelFiles(f"{len(members)} kernels, {sum(map(len, cubins)) >> 10} KiB", members)
