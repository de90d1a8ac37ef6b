"""The CUDA device: memory classes on the GPU, one explicit graph a plan, step blocks through pinned slots.

A launch copies a step slot to the device, then starts the forward graph and the sampling graph on one stream
and copies what was sampled into pinned memory: the host waits for that last copy alone. Load ends with a
replay of every graph on an empty step, after which nothing is allocated.
"""

import os
import time
from collections import deque

import numpy as np

from castiron.runtime.devices.cuda_driver import check, driver, initialize
from castiron.runtime.devices.cuda_dummy import make_up_weights
from castiron.runtime.devices.cuda_memory import GpuMemory, PinnedMemory, aligned
from castiron.runtime.devices.cuda_plan import LinkedPlans
from castiron.runtime.devices.cuda_target import check_gpu, check_gpu_memory, gpu_properties, memory_table
from castiron.runtime.devices.cuda_timer import GraphTimer
from castiron.runtime.devices.cuda_weights import upload_weights
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineTargetError
from castiron.runtime.plan_check import step_bytes
from castiron.runtime.plan_format import MemoryClass, PlanHeader
from castiron.runtime.printable import printable
from castiron.runtime.step_abi import (
    HEADER_FIELDS,
    HEADER_WORDS,
    LIVE_COUNTS,
    bucket_capacities,
    layout,
    live_bytes,
    output_fields,
    row_fields,
    step_fields,
    views,
)

STEP_SLOTS = 4  # step blocks the host may have filled while the device still works on earlier ones
OUTPUT_SLOTS = 3  # outputs of steps: two launches that weren't waited for, and the one being read
POISON = 0xFF  # a float32 or bf16 of these bytes is NaN, an int -1
_MAX_LOADERS = 8  # threads that read weights
# The first field that only some steps use: what comes before it is copied for every step.
_COUNTED_FIELDS_START = "bias_token_ids"  # from here on a step copies what its counts say


class GpuContext:
    """The device's primary context, current in this thread from construction on."""

    def __init__(self, ordinal: int = 0) -> None:
        """Raises EngineTargetError if there is no driver or no such GPU."""
        started = time.perf_counter()
        initialize()
        error, self.device = driver.cuDeviceGet(ordinal)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise EngineTargetError(f"there is no GPU {ordinal}: check nvidia-smi and CUDA_VISIBLE_DEVICES")
        error, self.handle = driver.cuDevicePrimaryCtxRetain(self.device)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise EngineTargetError(
                f"GPU {ordinal} refuses a context ({error.name}): stop what else uses it exclusively"
            )
        self.make_current()
        self.created_s = time.perf_counter() - started

    def make_current(self) -> None:
        """Driver calls of this thread go to this device from now on."""
        check(driver.cuCtxSetCurrent(self.handle), "making the context current")

    def release(self) -> None:
        """Let the context go."""
        driver.cuDevicePrimaryCtxRelease(self.device)


class CudaDevice:
    """One engine loaded on an NVIDIA GPU; see devices/base.py for the methods' contract.

    `num_blocks` gives the blocks of each cache group. With `poison_arena` the arena is filled with NaN patterns
    before every launch, so that a kernel reading what nobody wrote is seen; with `use_graphs` False kernels are
    launched one by one, for comparison. The engine file may be closed once this is constructed. Raises
    EngineTargetError if the engine can't run here, WorkFailedError if the GPU fails.
    """

    num_threads = 1
    runs_ahead = True

    def __init__(
        self,
        engine_file: EngineFile,
        num_blocks: dict[str, int],
        context: GpuContext | None = None,
        *,
        poison_arena: bool = False,
        use_graphs: bool = True,
    ) -> None:
        check_kind(engine_file)
        self.num_blocks = dict(num_blocks)
        self.header, self.plan_arrays = engine_file.plan()
        self._context = context or GpuContext()
        started = time.perf_counter()
        self._memory: dict[MemoryClass, GpuMemory] = {}
        self._pinned: list[PinnedMemory] = []
        self._plans: LinkedPlans | None = None
        self._poison = poison_arena
        self._is_closed = False
        self._slot = 0
        self._step_views: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._output_views: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._output_slot = 0  # of the newest launch
        self._launched: deque[tuple[int, int | None]] = deque()  # output slot, sampling plan; oldest first
        self._timer: GraphTimer | None = None  # made by the first start_timing
        self._is_timing = False
        try:
            gpu = gpu_properties(self._context.device)
            check_gpu(engine_file, gpu)
            check_gpu_memory(self.header, self.num_blocks, gpu.free_bytes)
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = check(driver.cuStreamCreate(flags), "creating a stream")
            untimed = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._done = [
                check(driver.cuEventCreate(untimed), "creating an event") for _ in range(OUTPUT_SLOTS)
            ]
            self._allocate()
            allocated = time.perf_counter()
            weights = self._memory[MemoryClass.WEIGHTS]
            num_loaders = min(_MAX_LOADERS, os.cpu_count() or 1)
            upload_weights(engine_file, weights.address, self._context.handle, num_loaders)
            make_up_weights(engine_file, weights.address, weights.num_bytes)
            loaded = time.perf_counter()
            bases = {memory_class: memory.address for memory_class, memory in self._memory.items()}
            self._plans = LinkedPlans(engine_file, self.header, self.plan_arrays, bases, self._cache_bases)
            plans = self.header.plans
            self._graphs = [self._plans.build_graph(plan) for plan in plans] if use_graphs else []
            self._replay_empty()
            built = time.perf_counter()
        except BaseException:
            self.close()
            raise
        self.timings = {
            "device_init_s": self._context.created_s + allocated - started,
            "load_weights_s": loaded - allocated,
            "build_graphs_s": built - loaded,
        }

    def step_views(self, forward_index: int) -> dict[str, np.ndarray]:
        """Views of the next step slot, laid out for this plan."""
        self._slot = (self._slot + 1) % STEP_SLOTS
        key = (self._slot, forward_index)
        if key not in self._step_views:
            start = self._slot * self._step_bytes
            block = self._step_slots.array[start : start + self._step_bytes]
            fields = step_fields(self.header.cache_groups, self.header.vocab_size)
            self._step_views[key] = views(block, fields, self._capacities(forward_index))
        if self._poison:
            start = self._slot * self._step_bytes
            self._step_slots.array[start : start + self._step_bytes] = POISON
        return self._step_views[key]

    def write_row(self, field: str, row: int, values: np.ndarray) -> None:
        """Set one row of a step_abi.row_fields array, on the stream."""
        fields = row_fields(self.header.vocab_size)
        offsets, _ = layout(fields, {"max_rows": self.header.max_rows})
        found = next(f for f in fields if f.name == field)
        data = np.ascontiguousarray(values, found.dtype)
        assert 0 <= row < self.header.max_rows and data.shape == found.dims[1:], (field, row, data.shape)
        target = self._memory[MemoryClass.ROWS].address + offsets[field] + row * data.nbytes
        self._context.make_current()
        # from memory that isn't pinned: the driver has taken the values when the call returns
        check(driver.cuMemcpyHtoDAsync(target, data.ctypes.data, data.nbytes, self._stream), "writing a row")

    def launch(self, forward_index: int, sample_index: int | None) -> None:
        """Enqueue the copy of the step, the forward graph, the sampling graph and the copy of its outputs."""
        self._check_counts(forward_index)
        if sample_index is not None:
            forward, sample = self.header.plans[forward_index], self.header.plans[sample_index]
            assert sample.kind == "sample" and sample.bucket == forward.bucket, (forward.name, sample.name)
        self._context.make_current()
        self._enqueue(forward_index, sample_index)

    def wait(self) -> dict[str, np.ndarray]:
        """Views of what the oldest launch that wasn't waited for sampled; empty if it had no sampling plan."""
        slot, sample_index = self._launched.popleft()
        check(driver.cuEventSynchronize(self._done[slot]), "running a step")
        if self._is_timing:
            assert self._timer is not None
            self._timer.add(slot)
        if sample_index is None:
            return {}
        key = (slot, sample_index)
        if key not in self._output_views:
            outputs = self._outputs.array[slot * self._output_slot_bytes :]
            self._output_views[key] = views(outputs, output_fields(), self._capacities(sample_index))
        return self._output_views[key]

    def read_logits(self, num_logits: int) -> np.ndarray:
        """Copy of the last forward's logits, float32 [num_logits, vocab_size]."""
        logits = np.empty((num_logits, self.header.vocab_size), np.float32)
        start = self._memory[MemoryClass.ARENA].address + self.header.logits_offset
        check(driver.cuMemcpyDtoH(logits.ctypes.data, start, logits.nbytes), "reading logits")
        return logits

    def start_timing(self) -> None:
        """Time the graphs of every launch from now on, until stop_timing."""
        self._context.make_current()
        if self._timer is None:
            self._timer = GraphTimer(OUTPUT_SLOTS)
        self._timer.reset()
        self._is_timing = True

    def stop_timing(self) -> float:
        """Seconds the GPU worked on the graphs (forward and sampling) of the launches that were waited for.

        Copies of steps and outputs aren't in it. A graph that the host launches while the GPU is idle counts
        from the moment its launch began.
        """
        assert self._timer is not None and self._is_timing, "start_timing wasn't called"
        self._is_timing = False
        return self._timer.seconds()

    def time_graph(self, graph: object, repeats: int) -> float:
        """Median milliseconds of a graph on the device, over `repeats` launches, by events."""
        timed = driver.CUevent_flags.CU_EVENT_DEFAULT
        events = [check(driver.cuEventCreate(timed), "creating an event") for _ in range(2)]
        milliseconds = []
        for _ in range(repeats + 1):  # the first one warms
            check(driver.cuEventRecord(events[0], self._stream), "recording an event")
            check(driver.cuGraphLaunch(graph, self._stream), "launching a graph")
            check(driver.cuEventRecord(events[1], self._stream), "recording an event")
            check(driver.cuEventSynchronize(events[1]), "running a graph")
            milliseconds.append(float(check(driver.cuEventElapsedTime(*events), "reading events")))
        for event in events:
            driver.cuEventDestroy(event)
        return float(np.median(milliseconds[1:]))

    def plan_graph(self, index: int, records: list[int] | None = None) -> object:
        """The graph of a plan, or a new one of some of its records (positions in the plan), for profiles."""
        assert self._plans is not None
        if records is None:
            return self._graphs[index]
        start = self.header.plans[index].records_start
        return self._plans.build_chain([start + record for record in records])

    def fill_memory(self, memory_class: MemoryClass, pattern: np.ndarray) -> None:
        """Repeat these bytes (uint8) over all of a memory class, for timings on ordinary values."""
        memory = self._memory[memory_class]
        done = min(pattern.nbytes, memory.num_bytes)
        if done:
            check(driver.cuMemcpyHtoD(memory.address, pattern.ctypes.data, done), "filling memory")
        while done < memory.num_bytes:
            count = min(done, memory.num_bytes - done)
            check(driver.cuMemcpyDtoD(memory.address + done, memory.address, count), "filling memory")
            done += count

    def close(self) -> None:
        """Free everything. Calling it twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._context.make_current()
        driver.cuCtxSynchronize()
        if self._plans is not None:
            self._plans.close()
        if self._timer is not None:
            self._timer.close()
        for memory in self._memory.values():
            memory.free()
        for pinned in self._pinned:
            pinned.free()
        self._step_views, self._output_views = {}, {}
        self._context.release()

    def _allocate(self) -> None:
        header = self.header
        self._step_bytes = aligned(max(step_bytes(header, plan) for plan in header.plans))
        cache_bytes = [aligned(t.block_bytes * self.num_blocks[t.group]) for t in header.cache_tensors]
        poison = POISON if self._poison else 0
        for memory_class, num_bytes, what, fill in (
            (MemoryClass.WEIGHTS, header.weights_bytes, "weights", 0),
            (MemoryClass.ARENA, header.arena_bytes, "arena", poison),
            (MemoryClass.CACHE, sum(cache_bytes), "KV cache", poison),
            (MemoryClass.ROWS, header.rows_bytes, "rows", 0),
            (MemoryClass.STEP, self._step_bytes, "step block", 0),
            (MemoryClass.COUNTERS, header.counters_bytes, "counters", 0),
            (MemoryClass.STAGING, header.staging_bytes, "staging", 0),
        ):
            self._memory[memory_class] = GpuMemory(num_bytes, what, fill)
        check(driver.cuCtxSynchronize(), "clearing memory")  # other streams don't wait for the default one
        starts = np.concatenate([[0], np.cumsum(cache_bytes, dtype=np.int64)])[: len(cache_bytes)]
        self._cache_bases = [self._memory[MemoryClass.CACHE].address + int(start) for start in starts]
        self._step_slots = PinnedMemory(STEP_SLOTS * self._step_bytes)
        self._pinned.append(self._step_slots)
        self._output_slot_bytes = aligned(max(1, header.staging_bytes))
        self._outputs = PinnedMemory(OUTPUT_SLOTS * self._output_slot_bytes)
        self._pinned.append(self._outputs)
        fields = step_fields(header.cache_groups, header.vocab_size)
        capacities = [self._capacities(index) for index in range(len(header.plans))]
        self._copied_bytes = [layout(fields, c)[0][_COUNTED_FIELDS_START] for c in capacities]
        self._output_bytes = [layout(output_fields(), c)[1] for c in capacities]

    def _replay_empty(self) -> None:
        """Every graph once with live counts of 0: what the driver loads lazily is loaded now."""
        self._step_slots.array.fill(0)
        for index, plan in enumerate(self.header.plans):
            if plan.kind == "forward":
                for sample_index, sample in enumerate(self.header.plans):
                    if (
                        sample.kind == "sample"
                        and sample.bucket == plan.bucket
                        and sample.ladder == plan.ladder
                    ):
                        self._enqueue(index, sample_index)
                        self._launched.clear()
        check(driver.cuStreamSynchronize(self._stream), "running an empty step")

    def _enqueue(self, forward_index: int, sample_index: int | None) -> None:
        assert len(self._launched) < OUTPUT_SLOTS - 1, "too many launches that weren't waited for"
        stream = self._stream
        self._output_slot = (self._output_slot + 1) % OUTPUT_SLOTS
        if self._poison:
            arena = self._memory[MemoryClass.ARENA]
            check(
                driver.cuMemsetD8Async(arena.address, POISON, arena.num_bytes, stream), "poisoning the arena"
            )
        slot = self._step_slots.array.ctypes.data + self._slot * self._step_bytes
        step = self._memory[MemoryClass.STEP].address
        check(
            driver.cuMemcpyHtoDAsync(step, slot, self._copied_bytes[forward_index], stream), "copying a step"
        )
        for offset, num_bytes in self._counted_parts(forward_index):
            check(driver.cuMemcpyHtoDAsync(step + offset, slot + offset, num_bytes, stream), "copying a step")
        timer = self._timer if self._is_timing else None
        if timer is not None:
            timer.begin(self._output_slot, stream)
        self._run(forward_index)
        if sample_index is not None:
            self._run(sample_index)
        if timer is not None:
            timer.end(self._output_slot, stream)
        if sample_index is not None:
            staging = self._memory[MemoryClass.STAGING].address
            target = self._outputs.array.ctypes.data + self._output_slot * self._output_slot_bytes
            num_bytes = self._output_bytes[sample_index]
            check(driver.cuMemcpyDtoHAsync(target, staging, num_bytes, stream), "copying outputs")
        check(driver.cuEventRecord(self._done[self._output_slot], stream), "recording an event")
        self._launched.append((self._output_slot, sample_index))

    def _counted_parts(self, index: int) -> list[tuple[int, int]]:
        """Offset and bytes of the large fields of the current step that are in use: rarely any."""
        key = self._slot, index
        counts = (
            self._step_views[key]["header"] if key in self._step_views else np.zeros(HEADER_WORDS, np.int32)
        )
        live = {name: int(counts[HEADER_FIELDS.index(name)]) for name in set(LIVE_COUNTS.values())}
        if not any(live.values()):
            return []
        capacities = self._capacities(index)
        fields = step_fields(self.header.cache_groups, self.header.vocab_size)
        offsets, _ = layout(fields, capacities)
        return [
            (offsets[field.name], live_bytes(field, capacities, live[LIVE_COUNTS[field.name]]))
            for field in fields
            if live.get(LIVE_COUNTS.get(field.name, ""), 0)
        ]

    def _run(self, index: int) -> None:
        if self._graphs:
            check(driver.cuGraphLaunch(self._graphs[index], self._stream), "launching a graph")
        else:
            assert self._plans is not None
            self._plans.launch_directly(self.header.plans[index], self._stream)

    def _check_counts(self, index: int) -> None:
        """Live counts beyond the bucket would make kernels leave their memory: never a request's mistake."""
        bucket = self.header.plans[index].bucket
        counts = self._step_views[self._slot, index]["header"][:3].tolist()
        limits = (bucket.max_tokens, bucket.max_seqs, bucket.max_logits)
        for name, count, limit in zip(HEADER_FIELDS, counts, limits, strict=False):
            assert 1 <= count <= limit, f"{name} is {count}, the bucket holds 1 to {limit}"

    def _capacities(self, index: int) -> dict[str, int]:
        return bucket_capacities(self.header.plans[index].bucket)


def free_gpu_memory(context: GpuContext, header: PlanHeader) -> int:
    """Bytes left for the KV cache once the engine is loaded."""
    without_cache = sum(memory_table(header, {group.name: 0 for group in header.cache_groups}).values())
    return gpu_properties(context.device).free_bytes - without_cache


def check_kind(engine_file: EngineFile) -> None:
    """Raise EngineTargetError unless the engine is for CUDA."""
    target = engine_file.manifest.target
    if target.kind != "cuda":
        raise EngineTargetError(
            f"{engine_file.path} is built for {target.kind} {printable(target.level, 40)}, this is the CUDA "
            "device: rebuild it with `build-engine MODEL --target sm_90`"
        )
