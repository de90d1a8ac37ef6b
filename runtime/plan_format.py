"""Plan records: what a step launches, as flat arrays a device can walk without per-launch Python objects.

An engine's plans share four arrays, stored as raw little-endian members of the engine file:
  plan.records      RECORD_DTYPE, all plans' records one after another
  plan.params       uint8, the raw parameter blocks, 8-byte aligned
  plan.relocations  RELOCATION_DTYPE, sorted by record
  plan.dependencies uint32, record indices (of the same plan) a record waits for
and one msgpack member `plan.header` holding a PlanHeader.
"""

import enum
from dataclasses import dataclass

import msgspec
import numpy as np

from castiron.runtime.step_abi import Bucket, CacheGroup


class MemoryClass(enum.IntEnum):
    """Where an address lives; the order is part of the file format."""

    WEIGHTS = 0  # loaded once, read only
    ARENA = 1  # dead between steps, shared by all plans, planned by liveness
    CACHE = 2  # `target_index` names a cache tensor; its base is known at load
    ROWS = 3  # a running request owns a row
    STEP = 4  # the packed block uploaded for this step
    COUNTERS = 5  # locks and flags, left zero
    EXCHANGE = 6  # peer memory of several GPUs
    STAGING = 7  # read back by the host


class RecordKind(enum.IntEnum):
    KERNEL = 0
    COPY = 1  # params: source address, destination address, num_bytes (3 x 8 bytes)
    FILL = 2  # params: destination address, num_bytes, byte value (3 x 8 bytes)
    CALL = 3  # issued by the host between graph segments (collectives)


class RelocationKind(enum.IntEnum):
    ADDRESS = 0  # 8 bytes at `param_offset` become base(memory_class, target_index) + target_offset
    TENSOR_MAP = 1  # 128 bytes become an encoded tensor map, tensor_maps[tensor_map_index]
    SCRATCH = 2  # 8 bytes become the launch's scratch allocation


class RecordFlag(enum.IntFlag):
    BARRIER = 1  # all earlier records of the plan must be finished first
    COOPERATIVE = 2
    PDL_IN_EDGE = 4  # programmatic dependent launch


RECORD_DTYPE = np.dtype(
    [
        ("kind", "<u1"),
        ("flags", "<u1"),
        ("kernel", "<u2"),  # index into PlanHeader.kernels
        ("shared_bytes", "<u4"),
        ("grid", "<u4", 3),
        ("block", "<u4", 3),
        ("cluster", "<u4", 3),
        ("params_bytes", "<u4"),
        ("params_offset", "<u8"),
        ("relocations_start", "<u4"),
        ("relocations_count", "<u4"),
        ("dependencies_start", "<u4"),
        ("dependencies_count", "<u4"),
    ]
)

RELOCATION_DTYPE = np.dtype(
    [
        ("param_offset", "<u4"),  # byte offset inside the record's parameter block
        ("kind", "<u1"),
        ("memory_class", "<u1"),
        ("target_index", "<u2"),  # cache tensor for CACHE, else 0
        ("target_offset", "<u8"),  # bytes
        ("extent_bytes", "<u8"),  # bytes the kernel may touch from there (CACHE: of one block)
        ("tensor_map_index", "<u4"),
        ("reserved", "<u4"),
    ]
)


class TensorMap(msgspec.Struct, frozen=True):
    """A TMA descriptor encoded at load (CUDA only)."""

    element_type: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str


class Kernel(msgspec.Struct, frozen=True):
    """A kernel the records name; CPU kernels live in the library of a level, CUDA ones in `kernels/`."""

    name: str
    params_bytes: int
    member: str = ""  # engine member holding the cubin; "" = the CPU kernel library
    entry: str = ""  # function in the cubin


class CacheTensor(msgspec.Struct, frozen=True):
    """One layer's cache; its base address is base(group) + what earlier tensors of the group need."""

    name: str
    group: str
    block_bytes: int
    dtype: str
    block_shape: tuple[int, ...]  # paged: (2, kv_heads, block_size, head_dim)


class Plan(msgspec.Struct, frozen=True):
    """One launch list: a forward of one bucket, or one sampling variant."""

    name: str  # "forward.decode", "forward.mixed", "sample.greedy.decode", "sample.random.mixed"
    kind: str  # "forward" or "sample"
    ladder: str  # "decode" or "mixed"; a sampling plan serves the forward plan of the same bucket
    bucket: Bucket  # fixes the step block's layout
    records_start: int
    records_count: int


class PlanHeader(msgspec.Struct, frozen=True):
    """Everything about the plans that isn't a flat array."""

    kernels: tuple[Kernel, ...]
    plans: tuple[Plan, ...]
    cache_groups: tuple[CacheGroup, ...]
    cache_tensors: tuple[CacheTensor, ...]
    tensor_maps: tuple[TensorMap, ...]
    vocab_size: int
    max_rows: int
    arena_bytes: int
    weights_bytes: int
    rows_bytes: int
    counters_bytes: int
    exchange_bytes: int
    staging_bytes: int
    logits_offset: int  # in the arena: float32 [max_logits, vocab_size]; the last read of a step


@dataclass(frozen=True)
class PlanArrays:
    """The flat arrays beside a PlanHeader."""

    records: np.ndarray
    params: np.ndarray
    relocations: np.ndarray
    dependencies: np.ndarray


def encode_plan(header: PlanHeader, arrays: PlanArrays) -> dict[str, bytes]:
    """The engine-file members of a plan."""
    return {
        "plan.header": msgspec.msgpack.encode(header),
        "plan.records": arrays.records.astype(RECORD_DTYPE, copy=False).tobytes(),
        "plan.params": arrays.params.astype(np.uint8, copy=False).tobytes(),
        "plan.relocations": arrays.relocations.astype(RELOCATION_DTYPE, copy=False).tobytes(),
        "plan.dependencies": arrays.dependencies.astype(np.uint32, copy=False).tobytes(),
    }
