"""A device that takes time and computes nothing, under the real engine loop: what scheduling costs and how it behaves.

A step takes `step_s` and each of its tokens `token_s`; with both 0 only the host's own time is left. It runs ahead as
a GPU does: launch returns at once, wait sleeps until the step would be done. Ids are made up, never EOS.
"""

import time
from collections import deque

import numpy as np

import castiron
from castiron.runtime.engine_options import EngineOptions, resolve_limits
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    STEP_ABI_VERSION,
    Manifest,
    ModelInfo,
    Profile,
    Provenance,
    QuantizationInfo,
    TargetInfo,
)
from castiron.runtime.plan_format import CacheTensor, Plan, PlanHeader
from castiron.runtime.step_abi import (
    Bucket,
    CacheGroup,
    bucket_capacities,
    layout,
    output_fields,
    resolve_dims,
    step_fields,
    views,
)

VOCAB_SIZE = 32_000
EOS_TOKEN_ID = 0
BLOCK_SIZE = 64  # as on CUDA
MAX_SEQ_LEN = 4096
_SLOTS = 3


def timed_header(profile: Profile) -> PlanHeader:
    """A decode and a mixed bucket with all sampling variants, and one paged cache group."""
    group = CacheGroup("kv", "paged", BLOCK_SIZE, -(-profile.max_seq_len // BLOCK_SIZE))
    tokens, seqs = profile.max_batched_tokens, profile.max_seqs
    buckets = {"decode": Bucket(seqs, seqs, seqs, 1), "mixed": Bucket(tokens, seqs, seqs, tokens)}
    plans = [Plan(f"forward.{name}", "forward", name, bucket, 0, 0) for name, bucket in buckets.items()]
    for variant in ("greedy", "random", "full"):
        plans += [Plan(f"sample.{variant}.{n}", "sample", n, bucket, 0, 0) for n, bucket in buckets.items()]
    return PlanHeader(
        kernels=(),
        plans=tuple(plans),
        cache_groups=(group,),
        cache_tensors=(CacheTensor("cache.0", "kv", BLOCK_SIZE * 16, "bf16", (2, 1, BLOCK_SIZE, 4)),),
        tensor_maps=(),
        vocab_size=VOCAB_SIZE,
        max_rows=2 * seqs,
        arena_bytes=0,
        weights_bytes=0,
        rows_bytes=0,
        counters_bytes=0,
        exchange_bytes=0,
        staging_bytes=0,
        logits_offset=0,
    )


class TimedDevice:
    """Implements castiron.runtime.devices.base.Device."""

    num_threads = 1
    runs_ahead = True

    def __init__(
        self, header: PlanHeader, num_blocks: int, step_s: float = 0.0, token_s: float = 0.0
    ) -> None:
        self.header = header
        self.num_blocks = {"kv": num_blocks}
        self.timings = {"device_init_s": 0.0, "load_weights_s": 0.0, "build_graphs_s": 0.0}
        self.num_launches = 0
        self._step_s, self._token_s = step_s, token_s
        self._free_at_s = 0.0  # when the last launched step is done
        self._due: deque[tuple[float, dict[str, np.ndarray]]] = deque()
        fields = step_fields(header.cache_groups, header.vocab_size)
        capacities = [bucket_capacities(plan.bucket) for plan in header.plans]
        num_bytes = max(layout(fields, c)[1] for c in capacities)
        blocks = [np.zeros(num_bytes, np.uint8) for _ in range(_SLOTS)]
        self._views = [[views(block, fields, c) for c in capacities] for block in blocks]
        rows = header.max_rows
        ids = np.random.default_rng(0).integers(1, header.vocab_size, (64, rows), np.int32)
        outputs = [
            (field.name, resolve_dims(field, {"max_logits": rows}), field.dtype) for field in output_fields()
        ]
        self._outputs = [{name: np.zeros(shape, dtype) for name, shape, dtype in outputs} for _ in ids]
        for output, row in zip(self._outputs, ids, strict=True):
            output["sampled_token_ids"] = row

    def step_views(self, forward_index: int) -> dict[str, np.ndarray]:
        return self._views[self.num_launches % _SLOTS][forward_index]

    def write_row(self, field: str, row: int, values: np.ndarray) -> None:
        """Nothing reads it."""

    def launch(self, forward_index: int, sample_index: int | None) -> None:
        num_tokens = int(self.step_views(forward_index)["header"][0])
        start_s = max(time.perf_counter(), self._free_at_s)
        self._free_at_s = start_s + self._step_s + num_tokens * self._token_s
        outputs = self._outputs[self.num_launches % len(self._outputs)] if sample_index is not None else {}
        self._due.append((self._free_at_s, outputs))
        self.num_launches += 1

    def wait(self) -> dict[str, np.ndarray]:
        due_s, outputs = self._due.popleft()
        left_s = due_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return outputs

    def read_logits(self, num_logits: int) -> np.ndarray:
        raise AssertionError("a timed device has no logits")

    def close(self) -> None:
        """There is nothing to free."""


def timed_manifest(profile: Profile) -> Manifest:
    """Of an engine that is only time."""
    return Manifest(
        format_major=FORMAT_MAJOR,
        format_minor=FORMAT_MINOR,
        step_abi_version=STEP_ABI_VERSION,
        model=ModelInfo("timed", "llama", {}, VOCAB_SIZE, profile.max_seq_len, 0, None, (EOS_TOKEN_ID,), {}),
        target=TargetInfo("simulated", "time only", ""),
        profile=profile,
        quantization=QuantizationInfo("none", "bf16", "bf16", {}),
        weights=(),
        weights_source="dummy",
        row_stable=True,
        features=(),
        provenance=Provenance(castiron.__version__, "none", {}, {}),
        members=(),
    )


def timed_engine(
    max_seqs: int,
    num_blocks: int,
    max_batched_tokens: int = 8192,
    options: EngineOptions | None = None,
    step_s: float = 0.0,
    token_s: float = 0.0,
) -> LLMEngine:
    """The real engine loop on a TimedDevice."""
    profile = Profile(max_seqs, MAX_SEQ_LEN, max_batched_tokens)
    options = options or EngineOptions()
    device = TimedDevice(timed_header(profile), num_blocks, step_s, token_s)
    limits = resolve_limits(options, profile)
    return LLMEngine(timed_manifest(profile), device, limits, prefix_cache=options.prefix_cache)
