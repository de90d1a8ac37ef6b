"""The CPU device: memory classes in anonymous memory, plans as arrays that one C call walks.

There is one step slot, and a launch returns when its kernels are done (the call releases the GIL): a second
slot would have nothing to overlap with, since the kernels use every core the host has. Addresses are
written into one private copy of the parameter blocks at load; nothing is allocated afterwards.
"""

import time

import numpy as np

from castiron.runtime.devices import kernel_library
from castiron.runtime.devices.anonymous_memory import allocate
from castiron.runtime.devices.cpu_cores import choose_cores
from castiron.runtime.devices.cpu_library import CI_RECORD_DTYPE, CpuLibrary
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineTargetError
from castiron.runtime.memory import check_memory
from castiron.runtime.plan_check import step_bytes
from castiron.runtime.plan_format import MemoryClass, PlanArrays, PlanHeader
from castiron.runtime.printable import printable
from castiron.runtime.step_abi import (
    HEADER_FIELDS,
    bucket_capacities,
    output_fields,
    row_fields,
    step_fields,
    views,
)
from castiron.runtime.weights_loader import load_weights

POISON = 0xFF  # a float32 of these bytes is NaN, an int -1


class CpuDevice:
    """One engine loaded on the CPU; see devices/base.py for the methods' contract.

    `num_blocks` gives the blocks of each cache group; `num_threads` None chooses by cores, affinity and
    quota. With `poison_arena` arena and step slot are filled with NaN patterns before use, so that a kernel
    reading what nobody wrote is seen. The engine file may be closed once this is constructed. Raises
    EngineTargetError if the engine can't run here: another target, level, kernel ABI, too little memory.
    """

    runs_ahead = False

    def __init__(
        self,
        engine_file: EngineFile,
        num_blocks: dict[str, int],
        num_threads: int | None = None,
        *,
        poison_arena: bool = False,
    ) -> None:
        started = time.perf_counter()
        self.num_blocks = dict(num_blocks)
        self._library = load_library(engine_file)
        self.header, arrays = engine_file.plan()
        check_memory(engine_file.manifest, self.header, self.num_blocks)
        cores = choose_cores(num_threads)
        self.num_threads = len(cores)
        self._poison = poison_arena
        self._memory = _allocate_classes(self.header)
        self._caches = _allocate_caches(self.header, self.num_blocks)
        allocated = time.perf_counter()
        load_weights(engine_file, self._memory[MemoryClass.WEIGHTS], self.num_threads)
        loaded = time.perf_counter()
        self._params, self._records = self._link(arrays)
        self._records_address = self._records.ctypes.data
        self._step_address = self._memory[MemoryClass.STEP].ctypes.data
        self._step_views = [self._views_of_step(index) for index in range(len(self.header.plans))]
        row_capacity = {"max_rows": self.header.max_rows}
        self._row_views = views(
            self._memory[MemoryClass.ROWS], row_fields(self.header.vocab_size), row_capacity
        )
        self._output_views = [self._views_of_staging(index) for index in range(len(self.header.plans))]
        self._last_sample: int | None = None
        linked = time.perf_counter()
        self._pool: int | None = self._library.create_pool(cores)
        pooled = time.perf_counter()
        self.timings = {
            "device_init_s": allocated - started + pooled - linked,
            "load_weights_s": loaded - allocated,
            "build_graphs_s": linked - loaded,
        }

    def step_views(self, forward_index: int) -> dict[str, np.ndarray]:
        """Views of the step slot, laid out for this plan; the same dict at every call."""
        if self._poison:
            self._memory[MemoryClass.STEP].fill(POISON)
        return self._step_views[forward_index]

    def write_row(self, field: str, row: int, values: np.ndarray) -> None:
        """Set one row of a step_abi.row_fields array."""
        self._row_views[field][row] = values

    def launch(self, forward_index: int, sample_index: int | None) -> None:
        """Run the forward plan, then the sampling plan; returns when they are done."""
        self._check_counts(forward_index)
        if self._poison:
            self._memory[MemoryClass.ARENA].fill(POISON)
        self._run(forward_index)
        if sample_index is not None:
            forward, sample = self.header.plans[forward_index], self.header.plans[sample_index]
            assert sample.kind == "sample" and sample.bucket == forward.bucket, (forward.name, sample.name)
            self._run(sample_index)
        self._last_sample = sample_index

    def wait(self) -> dict[str, np.ndarray]:
        """Views of what the last launch sampled; empty if it had no sampling plan."""
        return {} if self._last_sample is None else self._output_views[self._last_sample]

    def read_logits(self, num_logits: int) -> np.ndarray:
        """Copy of the last forward's logits, float32 [num_logits, vocab_size]."""
        vocab_size = self.header.vocab_size
        start = self.header.logits_offset
        data = self._memory[MemoryClass.ARENA][start : start + 4 * num_logits * vocab_size]
        return data.view(np.float32).reshape(num_logits, vocab_size).copy()

    def close(self) -> None:
        """Stop the threads and let the memory go (views still held keep theirs)."""
        if self._pool is not None:
            self._library.destroy_pool(self._pool)
            self._pool = None
            self._memory, self._caches = {}, []
            self._step_views, self._output_views, self._row_views = [], [], {}

    def _run(self, index: int) -> None:
        plan = self.header.plans[index]
        assert self._pool is not None, "the device is closed"
        start = self._records_address + plan.records_start * CI_RECORD_DTYPE.itemsize
        self._library.run(self._pool, start, plan.records_count, self._step_address)

    def _check_counts(self, index: int) -> None:
        """Live counts beyond the bucket would make kernels leave their memory: never a request's mistake."""
        bucket = self.header.plans[index].bucket
        counts = self._step_views[index]["header"][:3].tolist()
        limits = (bucket.max_tokens, bucket.max_seqs, bucket.max_logits)
        for name, count, limit in zip(HEADER_FIELDS, counts, limits, strict=False):
            assert 1 <= count <= limit, f"{name} is {count}, the bucket holds 1 to {limit}"

    def _link(self, arrays: PlanArrays) -> tuple[np.ndarray, np.ndarray]:
        """Parameter blocks with addresses in place, and the records that point at them."""
        params = np.zeros(-(-len(arrays.params) // 8), np.uint64)
        params.view(np.uint8)[: len(arrays.params)] = arrays.params
        relocations = arrays.relocations
        bases = np.zeros(len(MemoryClass), np.uint64)
        for memory_class, memory in self._memory.items():
            bases[memory_class] = memory.ctypes.data
        cache_bases = np.array([cache.ctypes.data for cache in self._caches] or [0], np.uint64)
        is_cache = relocations["memory_class"] == MemoryClass.CACHE
        base = np.where(
            is_cache, cache_bases[relocations["target_index"]], bases[relocations["memory_class"]]
        )
        blocks = np.repeat(arrays.records["params_offset"], arrays.records["relocations_count"])
        params[(blocks + relocations["param_offset"]) // 8] = base + relocations["target_offset"]

        records = np.zeros(len(arrays.records), CI_RECORD_DTYPE)
        records["fn"] = self._kernel_addresses()[arrays.records["kernel"]]
        records["params"] = np.uint64(params.ctypes.data) + arrays.records["params_offset"]
        records["flags"] = arrays.records["flags"]
        return params, records

    def _kernel_addresses(self) -> np.ndarray:
        addresses = []
        for kernel in self.header.kernels:
            address, params_bytes = self._library.kernels.get(kernel.name, (0, 0))
            if not address or -(-params_bytes // 8) * 8 != kernel.params_bytes:
                raise EngineTargetError(
                    f"the CPU kernel library has no kernel {printable(kernel.name)} of "
                    f"{kernel.params_bytes} bytes of parameters: rebuild the engine with this version"
                )
            addresses.append(address)
        return np.array(addresses, np.uint64)

    def _views_of_step(self, index: int) -> dict[str, np.ndarray]:
        fields = step_fields(self.header.cache_groups, self.header.vocab_size)
        capacities = bucket_capacities(self.header.plans[index].bucket)
        return views(self._memory[MemoryClass.STEP], fields, capacities)

    def _views_of_staging(self, index: int) -> dict[str, np.ndarray]:
        if self.header.plans[index].kind != "sample":
            return {}
        capacities = bucket_capacities(self.header.plans[index].bucket)
        return views(self._memory[MemoryClass.STAGING], output_fields(), capacities)


def load_library(engine_file: EngineFile) -> CpuLibrary:
    """The kernel library the engine was built for.

    Raises EngineTargetError if the engine is for another target or level than this machine's, or for other
    kernels.
    """
    target = engine_file.manifest.target
    label = f"{engine_file.path} is built for {target.kind} {printable(target.level, 40)}"
    if target.kind != "cpu":
        raise EngineTargetError(
            f"{label}, this is the CPU device: rebuild it with `build-engine MODEL --target cpu`"
        )
    best = kernel_library.best_level()
    rebuild = f"rebuild it with `build-engine MODEL --target cpu:{best}`"
    if target.level not in kernel_library.LEVELS or not kernel_library.supports(target.level):
        raise EngineTargetError(f"{label}, this machine runs levels up to {best}: {rebuild}")
    if target.kernel_abi_hash != kernel_library.abi_hash():
        builder = printable(engine_file.manifest.provenance.castiron_version, 40)
        raise EngineTargetError(
            f"{label} kernels of another version (castiron {builder}, kernel ABI "
            f"{printable(target.kernel_abi_hash, 12)}, expected {kernel_library.abi_hash()[:12]}): {rebuild}"
        )
    return CpuLibrary(kernel_library.find_library(target.level), target.level)


def _allocate_classes(header: PlanHeader) -> dict[MemoryClass, np.ndarray]:
    """One array a memory class; the step block is as large as the largest bucket's."""
    step = max(step_bytes(header, plan) for plan in header.plans)
    return {
        MemoryClass.WEIGHTS: allocate(header.weights_bytes, "weights", huge_pages=True),
        MemoryClass.ARENA: allocate(header.arena_bytes, "arena", huge_pages=True),
        MemoryClass.ROWS: allocate(header.rows_bytes, "rows", huge_pages=False),
        MemoryClass.STEP: allocate(step, "step block", huge_pages=False),
        MemoryClass.COUNTERS: allocate(header.counters_bytes, "counters", huge_pages=False),
        MemoryClass.STAGING: allocate(header.staging_bytes, "staging", huge_pages=False),
    }


def _allocate_caches(header: PlanHeader, num_blocks: dict[str, int]) -> list[np.ndarray]:
    """One array a cache tensor; blocks that are never written take no memory."""
    return [
        allocate(
            tensor.block_bytes * num_blocks[tensor.group], f"cache {printable(tensor.name)}", huge_pages=False
        )
        for tensor in header.cache_tensors
    ]
