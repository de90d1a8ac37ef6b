"""Times the plans of a tuning engine on the GPU: a full step of ordinary values, graphs of programmatic edges."""

from types import TracebackType

import numpy as np

from castiron.perf.snapshot import this_machine
from castiron.perf.tune import blocks_needed, tokens_of_sequences
from castiron.runtime.block_manager import BlockManager
from castiron.runtime.devices.cuda import CudaDevice, GpuContext
from castiron.runtime.devices.cuda_target import gpu_properties
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import InputError
from castiron.runtime.plan_format import MemoryClass
from castiron.runtime.row_table import RowTable
from castiron.runtime.step_builder import StepInput, fill_step
from castiron.runtime.tuning_format import LiveCounts, TuningCase, TuningInfo

_NONE = np.empty(0, np.int32)
_FILL_WORDS = 1 << 20
_LONG_US = 5_000.0  # a chain of such a time is launched once a round, a shorter one more often
_REPEATS = 3


class CudaTimer:
    """A LaunchTimer (tune.py) on the first GPU, with the tuning engine loaded. Also a context manager."""

    def __init__(self, engine_file: EngineFile, info: TuningInfo) -> None:
        """Raises EngineTargetError if the engine can't run here, InputError for a cache that isn't paged."""
        header, _ = engine_file.plan()
        if len(header.cache_groups) != 1 or header.cache_groups[0].kind != "paged":
            raise InputError(f"{engine_file.path} has no single paged cache: its kernels can't be timed here")
        block_size = header.cache_groups[0].block_size
        num_blocks = {header.cache_groups[0].name: blocks_needed(info, block_size)}
        most_seqs = max(case.live.num_seqs for case in info.cases)
        longest = max(case.live.context for case in info.cases)
        context = GpuContext()
        gpu = gpu_properties(context.device)
        self.gpu = gpu.name
        self.driver = this_machine(with_gpu=True).driver or f"for CUDA {gpu.driver_version / 1000:.1f}"
        self._vocab_size = header.vocab_size
        self._rows = RowTable(most_seqs, longest, header.vocab_size)
        self._blocks = BlockManager(header.cache_groups, num_blocks, most_seqs)
        self._device = CudaDevice(engine_file, num_blocks, context, use_graphs=False)
        self._graphs: dict[int, object] = {}
        self._repeats: dict[int, int] = {}
        for memory_class in (MemoryClass.ARENA, MemoryClass.CACHE):
            self._device.fill_memory(memory_class, ordinary_values(_FILL_WORDS))

    def __enter__(self) -> "CudaTimer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._device.close()

    def prepare(self, case: TuningCase) -> None:
        """Upload the case's step, which its plans share, and build and warm their graphs."""
        self._graphs, self._repeats = {}, {}
        first = case.candidates[0].plan
        views = self._device.step_views(first)
        fill_full_step(views, case.live, self._rows, self._blocks, self._vocab_size)
        self._device.launch(first, None)
        self._device.wait()
        for candidate in case.candidates:
            graph = self._device.plan_graph(candidate.plan, list(range(case.copies)))
            self._graphs[candidate.plan] = graph
            is_long = self._device.time_graph(graph, 1) * 1e3 > _LONG_US
            self._repeats[candidate.plan] = 1 if is_long else _REPEATS

    def chain_us(self, plan: int) -> float:
        """The median of a few launches of the plan's graph."""
        return self._device.time_graph(self._graphs[plan], self._repeats[plan]) * 1e3


def ordinary_values(num_words: int) -> np.ndarray:
    """uint8 [2 * num_words]: as bf16 or f32 values from 0.1 to 0.75 with either sign, as fp8 up to 2, never NaN."""
    rng = np.random.default_rng(0)
    signs = rng.integers(0, 2, num_words, np.uint16) << 15
    values = (np.uint16(0x3E) + rng.integers(0, 2, num_words, np.uint16)) << 8
    fractions = rng.integers(0, 0x40, num_words, np.uint16)
    words: np.ndarray = (signs | values | fractions).astype("<u2")
    return words.view(np.uint8)


def fill_full_step(
    views: dict[str, np.ndarray], live: LiveCounts, rows: RowTable, blocks: BlockManager, vocab_size: int
) -> None:
    """Write the step of `live`: every sequence's tokens are the last ones of its context."""
    counts = tokens_of_sequences(live)
    ids = tuple(np.random.default_rng(0).integers(0, vocab_size, live.context).tolist())
    own = [rows.acquire(ids) for _ in range(live.num_seqs)]
    try:
        for row in own:
            assert blocks.grow(row, live.context), "the cache is too small for its own cases"
        logit_tokens = np.arange(live.num_logits, dtype=np.int32) % live.num_tokens
        step = StepInput(np.array(own, np.int32), live.context - counts, counts, logit_tokens, _NONE)
        fill_step(views, step, rows, blocks, 0)
    finally:
        for row in own:
            blocks.release(row)
            rows.release(row)
