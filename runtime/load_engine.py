"""From an engine file to a loaded device."""

import os
import time
from dataclasses import dataclass

from castiron.runtime.devices.base import Device
from castiron.runtime.engine_file import TOKENIZER_FOLDER, EngineFile
from castiron.runtime.engine_options import EngineOptions, ServingLimits, resolve_limits
from castiron.runtime.engine_purpose import check_serves
from castiron.runtime.errors import InputError
from castiron.runtime.grammar_compiler import GrammarCompiler
from castiron.runtime.kv_memory import GPU_FREE_MEMORY_SHARE, choose_num_blocks
from castiron.runtime.manifest import Manifest
from castiron.runtime.memory import available_memory, memory_needed
from castiron.runtime.plan_format import PlanHeader


@dataclass(frozen=True)
class LoadedEngine:
    """A device with an engine in place, and what it may serve."""

    manifest: Manifest
    device: Device
    limits: ServingLimits
    num_threads: int
    load_plan_s: float
    prefix_cache: bool
    grammars: GrammarCompiler | None  # for the file's tokenizer, if it has one


def load_engine(path: str | os.PathLike[str], options: EngineOptions) -> LoadedEngine:
    """Open the file, choose the cache's size, load the device. Raises as LLMEngine.load says."""
    start_s = time.perf_counter()
    with EngineFile.open(path) as engine_file:
        check_serves(engine_file)
        manifest = engine_file.manifest
        limits = resolve_limits(options, manifest.profile)
        header, _ = engine_file.plan()
        load_plan_s = time.perf_counter() - start_s
        load = _load_on_gpu if manifest.target.kind == "cuda" else _load_on_cpu
        device = load(engine_file, header, limits, options)
    grammars = _grammar_compiler(path, manifest)
    return LoadedEngine(
        manifest, device, limits, device.num_threads, load_plan_s, options.prefix_cache, grammars
    )


def _grammar_compiler(path: str | os.PathLike[str], manifest: Manifest) -> GrammarCompiler | None:
    name = f"{TOKENIZER_FOLDER}tokenizer.json"
    if all(member.name != name for member in manifest.members):
        return None

    def read_tokenizer() -> bytes:
        with EngineFile.open(path) as engine_file:
            return engine_file.member(name)

    return GrammarCompiler(read_tokenizer, manifest.model.vocab_size, manifest.model.eos_token_ids)


def open_device(
    engine_file: EngineFile, num_blocks: dict[str, int], num_threads: int | None = None
) -> Device:
    """The engine on the device it was built for, with that many blocks of each cache group."""
    if engine_file.manifest.target.kind == "cuda":
        from castiron.runtime.devices.cuda import CudaDevice

        return CudaDevice(engine_file, num_blocks)
    from castiron.runtime.devices.cpu import CpuDevice

    return CpuDevice(engine_file, num_blocks, num_threads)


def _load_on_cpu(
    engine_file: EngineFile, header: PlanHeader, limits: ServingLimits, options: EngineOptions
) -> Device:
    free_bytes = available_memory()
    if free_bytes is not None:
        no_blocks = {group.name: 0 for group in header.cache_groups}
        free_bytes -= memory_needed(engine_file.manifest, header, no_blocks)
    num_blocks = choose_num_blocks(header, limits, options.kv_memory_bytes, free_bytes)
    return open_device(engine_file, num_blocks, options.num_threads)


def _load_on_gpu(
    engine_file: EngineFile, header: PlanHeader, limits: ServingLimits, options: EngineOptions
) -> Device:
    from castiron.runtime.devices.cuda import CudaDevice, GpuContext, free_gpu_memory

    if options.num_threads is not None:
        raise InputError("num_threads is for engines on the CPU, this one runs on a GPU: leave it out")
    context = GpuContext()
    num_blocks = choose_num_blocks(
        header, limits, options.kv_memory_bytes, free_gpu_memory(context, header), GPU_FREE_MEMORY_SHARE
    )
    return CudaDevice(engine_file, num_blocks, context)
