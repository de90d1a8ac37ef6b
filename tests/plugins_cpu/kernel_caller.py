"""Calls single CPU kernels through the library's C interface, the way the runtime does: for kernel tests.

    call("rms_norm", x=x, weight=w, y=y, count=NUM_TOKENS, dim=64, eps=1e-5, x_stride=64, y_stride=64,
         num_tokens=3, threads=2)
Arguments are the fields of the kernel's parameter struct by the names specs.py gives them; arrays stand for
addresses, None for a null pointer; fields named pad are filled.
"""

import ctypes
import functools
import struct

import numpy as np

from castiron.models.kernel_spec import TYPE_CODES
from castiron.plugins_cpu.compile import build_library
from castiron.plugins_cpu.specs import SPECS
from castiron.runtime.devices import kernel_library
from castiron.runtime.step_abi import HEADER_WORDS

NUM_TOKENS, NUM_SEQS, NUM_LOGITS = 0, 1, 2  # Count in abi.h
BARRIER = 1  # RecordFlag.BARRIER
LEVELS = tuple(dict.fromkeys(("generic", kernel_library.best_level())))  # what kernel tests run on


class KernelInfo(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("fn", ctypes.c_void_p), ("params_bytes", ctypes.c_uint32))


class Record(ctypes.Structure):
    _fields_ = (
        ("fn", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class Library:
    """One level's library, with a pool for each thread count asked for."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.path = build_library(level)
        self.c = ctypes.CDLL(str(self.path))
        self.c.ci_source_hash.restype = ctypes.c_char_p
        self.c.ci_level.restype = ctypes.c_char_p
        self.c.ci_last_error.restype = ctypes.c_char_p
        self.c.ci_num_kernels.restype = ctypes.c_uint32
        self.c.ci_kernels.restype = ctypes.POINTER(KernelInfo)
        self.c.ci_pool_create.restype = ctypes.c_void_p
        self.c.ci_pool_create.argtypes = (ctypes.c_int32, ctypes.POINTER(ctypes.c_int32))
        self.c.ci_pool_destroy.argtypes = (ctypes.c_void_p,)
        self.c.ci_run.argtypes = (
            ctypes.c_void_p,
            ctypes.POINTER(Record),
            ctypes.c_uint32,
            ctypes.POINTER(ctypes.c_int32),
        )
        infos = [self.c.ci_kernels()[i] for i in range(self.c.ci_num_kernels())]
        self.names = [info.name.decode() for info in infos]  # with duplicates, if there were any
        self.kernels = {info.name.decode(): info for info in infos}
        self.pools: dict[int, int] = {}

    def pool(self, threads: int, cores: list[int] | None = None) -> int:
        """A pool of unpinned threads (kept), or a new one pinned to `cores` that the caller destroys."""
        if cores is not None:
            return self.create_pool(threads, cores)
        if threads not in self.pools:
            self.pools[threads] = self.create_pool(threads, None)
        return self.pools[threads]

    def create_pool(self, threads: int, cores: list[int] | None) -> int:
        pool = self.c.ci_pool_create(threads, None if cores is None else (ctypes.c_int32 * threads)(*cores))
        assert pool, self.c.ci_last_error().decode()
        return pool

    def run(self, pool: int, records: "ctypes.Array[Record]", header: np.ndarray) -> None:
        pointer = header.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        assert self.c.ci_run(pool, records, len(records), pointer) == 0


@functools.cache
def library(level: str) -> Library:
    """The loaded library of a level, compiled if it isn't in the cache."""
    return Library(level)


def pack_params(name: str, **fields: object) -> bytes:
    """The parameter struct of kernel `name`. Raises TypeError for missing or unknown fields."""
    parameters = SPECS[name].parameters
    wanted = [p.name for p in parameters if p.binding != "zero"]
    if set(wanted) != set(fields):
        raise TypeError(f"{name} takes {wanted}, got {sorted(fields)}")
    values = []
    for parameter in parameters:
        value = fields.get(parameter.name, 0)
        if isinstance(value, np.ndarray):
            assert parameter.type == "p", f"{parameter.name} is not an address"
            value = value.ctypes.data
        values.append(0 if value is None else value)
    packed = struct.pack("<" + "".join(TYPE_CODES[p.type] for p in parameters), *values)
    return packed + bytes(-len(packed) % 8)


def make_header(num_tokens: int = 0, num_seqs: int = 0, num_logits: int = 0) -> np.ndarray:
    """A step header with these live counts."""
    header = np.zeros(HEADER_WORDS, np.int32)
    header[:3] = num_tokens, num_seqs, num_logits
    return header


def make_records(
    lib: Library, calls: list[tuple[str, bytes]], flags: int = BARRIER
) -> "ctypes.Array[Record]":
    """Records of (kernel name, packed parameters); the array keeps the parameters alive."""
    records = (Record * len(calls))()
    records.buffers = []  # type: ignore[attr-defined]
    for record, (name, params) in zip(records, calls, strict=True):
        buffer = np.frombuffer(params, np.uint8).copy()
        records.buffers.append(buffer)  # type: ignore[attr-defined]
        record.fn, record.params, record.flags = lib.kernels[name].fn, buffer.ctypes.data, flags
    return records


def call(
    name: str,
    *,
    level: str = LEVELS[-1],
    threads: int = 1,
    num_tokens: int = 0,
    num_seqs: int = 0,
    num_logits: int = 0,
    **fields: object,
) -> None:
    """Run one kernel with these parameter fields and live counts."""
    lib = library(level)
    records = make_records(lib, [(name, pack_params(name, **fields))])
    lib.run(lib.pool(threads), records, make_header(num_tokens, num_seqs, num_logits))
