"""From an engine file to a loaded device."""

import os
import time
from dataclasses import dataclass

from castiron.runtime.devices.base import Device
from castiron.runtime.devices.cpu import CpuDevice
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_options import EngineOptions, ServingLimits, resolve_limits
from castiron.runtime.errors import EngineTargetError
from castiron.runtime.kv_memory import choose_num_blocks
from castiron.runtime.manifest import Manifest
from castiron.runtime.memory import available_memory, memory_needed


@dataclass(frozen=True)
class LoadedEngine:
    """A device with an engine in place, and what it may serve."""

    manifest: Manifest
    device: Device
    limits: ServingLimits
    num_threads: int
    load_plan_s: float


def load_engine(path: str | os.PathLike[str], options: EngineOptions) -> LoadedEngine:
    """Open the file, choose the cache's size, load the device. Raises as LLMEngine.load says."""
    start_s = time.perf_counter()
    with EngineFile.open(path) as engine_file:
        manifest = engine_file.manifest
        limits = resolve_limits(options, manifest.profile)
        header, _ = engine_file.plan()
        load_plan_s = time.perf_counter() - start_s
        if manifest.target.kind != "cpu":
            raise EngineTargetError(
                f"{engine_file.path} was built for {manifest.target.kind} {manifest.target.level}, this "
                f"runtime runs cpu engines: rebuild it with build-engine --target cpu"
            )
        free_bytes = available_memory()
        if free_bytes is not None:
            free_bytes -= memory_needed(manifest, header, {group.name: 0 for group in header.cache_groups})
        num_blocks = choose_num_blocks(header, limits, options.kv_memory_bytes, free_bytes)
        device = CpuDevice(engine_file, num_blocks=num_blocks, num_threads=options.num_threads)
    return LoadedEngine(manifest, device, limits, device.num_threads, load_plan_s)
