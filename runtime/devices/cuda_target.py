"""Whether a GPU can run an engine: compute capability, driver, multiprocessors, memory."""

from dataclasses import dataclass
from typing import Any

from castiron.runtime.devices.cuda_driver import check, driver
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineTargetError
from castiron.runtime.memory import block_bytes
from castiron.runtime.plan_check import step_bytes
from castiron.runtime.plan_format import PlanHeader
from castiron.runtime.printable import printable

CONTEXT_BYTES = 1 << 30  # kept free for graphs, loaded kernels and the driver


@dataclass(frozen=True)
class GpuProperties:
    """What an engine's requirements are compared with."""

    name: str
    compute_capability: tuple[int, int]
    driver_version: int  # 13000 = CUDA 13.0
    num_sms: int
    shared_bytes_per_block: int
    free_bytes: int
    total_bytes: int


def gpu_properties(device: Any) -> GpuProperties:
    """Of the device whose context is current."""
    names = driver.CUdevice_attribute

    def attribute(name: Any) -> int:
        return int(check(driver.cuDeviceGetAttribute(name, device), "reading device attributes"))

    free_bytes, total_bytes = check(driver.cuMemGetInfo(), "reading the free memory")
    return GpuProperties(
        name=check(driver.cuDeviceGetName(256, device), "reading the device's name").split(b"\0")[0].decode(),
        compute_capability=(
            attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        ),
        driver_version=int(check(driver.cuDriverGetVersion(), "reading the driver's version")),
        num_sms=attribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        shared_bytes_per_block=attribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        free_bytes=int(free_bytes),
        total_bytes=int(total_bytes),
    )


def check_gpu(engine_file: EngineFile, gpu: GpuProperties) -> None:
    """Raise EngineTargetError unless this GPU has what engine.json's requirements name."""
    target = engine_file.manifest.target
    needs = target.requirements
    label = f"{engine_file.path} is built for {printable(target.level, 40)}"
    wanted = tuple(needs.get("compute_capability", ()))
    if gpu.compute_capability != wanted:
        got = ".".join(map(str, gpu.compute_capability))
        raise EngineTargetError(
            f"{label} (compute capability {'.'.join(map(str, wanted))}), this GPU is {gpu.name} ({got}): "
            f"build an engine for it, or run on the GPU it was built for"
        )
    if gpu.driver_version < int(needs.get("min_driver", 0)):
        raise EngineTargetError(
            f"{label} and needs a driver for CUDA {_version(int(needs['min_driver']))}, this machine's is for "
            f"CUDA {_version(gpu.driver_version)}: update the NVIDIA driver"
        )
    for name, what in (
        ("num_sms", "multiprocessors"),
        ("shared_bytes_per_block", "bytes of shared memory a block"),
    ):
        got_number, least = getattr(gpu, name), int(needs.get(name, 0))
        if got_number < least:
            raise EngineTargetError(
                f"{label} and needs {least} {what}, this GPU ({gpu.name}) has {got_number}: "
                "build an engine for it, or use a whole GPU instead of a slice"
            )


def check_gpu_memory(header: PlanHeader, num_blocks: dict[str, int], free_bytes: int) -> None:
    """Raise EngineTargetError, with what needs how much, before anything is allocated."""
    needs = memory_table(header, num_blocks)
    total = sum(needs.values())
    if total > free_bytes:
        table = ", ".join(f"{name} {num_bytes / 2**20:.0f}" for name, num_bytes in needs.items())
        raise EngineTargetError(
            f"the engine needs {total / 2**20:.0f} MiB of GPU memory ({table}), {free_bytes / 2**20:.0f} MiB "
            "are free: lower --kv-memory, stop what else uses the GPU, or use a smaller engine"
        )


def memory_table(header: PlanHeader, num_blocks: dict[str, int]) -> dict[str, int]:
    """Bytes of GPU memory by what takes them."""
    caches = sum(count * block_bytes(header, group) for group, count in num_blocks.items())
    step = max(step_bytes(header, plan) for plan in header.plans)
    small = header.rows_bytes + header.counters_bytes + header.exchange_bytes + header.staging_bytes + step
    return {
        "weights": header.weights_bytes,
        "KV cache": caches,
        "arena": header.arena_bytes,
        "step": small,
        "driver": CONTEXT_BYTES,
    }


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
