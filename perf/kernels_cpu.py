"""Times single CPU kernels and what a record costs.

    python -m castiron.perf.kernels_cpu [--level LEVEL] [--threads N] [--ghz CLOCK]

Each line gives the median of several runs and, for a kernel bound by multiply-adds, its share of two vector
multiply-adds a cycle at --ghz.
"""

import argparse
import ctypes
import os
import statistics
import struct
import time
from collections.abc import Callable

import numpy as np

from castiron.models.kernel_spec import TYPE_CODES
from castiron.plugins_cpu.compile import build_library
from castiron.plugins_cpu.specs import SPECS
from castiron.runtime.devices import kernel_library
from castiron.runtime.plan_format import RecordFlag
from castiron.runtime.step_abi import HEADER_WORDS

NUM_TOKENS, NUM_LOGITS = 0, 2  # Count in plugins_cpu/abi.h
LANES = {"generic": 4, "x86-64-v3": 8, "avx512-vnni": 16, "amx": 16}


class _KernelInfo(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("fn", ctypes.c_void_p), ("params_bytes", ctypes.c_uint32))


class _Record(ctypes.Structure):
    _fields_ = (
        ("fn", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class KernelTimer:
    """One level's library with a pool of pinned threads."""

    def __init__(self, level: str, threads: int) -> None:
        self.library = ctypes.CDLL(str(build_library(level)))
        self.library.ci_kernels.restype = ctypes.POINTER(_KernelInfo)
        self.library.ci_pool_create.restype = ctypes.c_void_p
        infos = [self.library.ci_kernels()[i] for i in range(self.library.ci_num_kernels())]
        self.entry_points = {info.name.decode(): info.fn for info in infos}
        cores = sorted(os.sched_getaffinity(0))[:threads]
        self.threads = len(cores)
        self.pool = ctypes.c_void_p(
            self.library.ci_pool_create(self.threads, (ctypes.c_int32 * self.threads)(*cores))
        )

    def seconds(
        self,
        name: str,
        counts: tuple[int, int, int],
        fields: dict[str, object],
        copies: int = 1,
        runs: int = 15,
    ) -> float:
        """Median seconds of one record of `name`, run `copies` times in a row with barriers between."""
        parameters = SPECS[name].parameters
        values = [fields.get(p.name, 0) for p in parameters]
        packed = struct.pack(
            "<" + "".join(TYPE_CODES[p.type] for p in parameters),
            *(v.ctypes.data if isinstance(v, np.ndarray) else v for v in values),
        )
        buffer = ctypes.create_string_buffer(packed, len(packed) + 8)
        records = (_Record * copies)()
        for record in records:
            record.fn, record.params = self.entry_points[name], ctypes.addressof(buffer)
            record.flags = int(RecordFlag.BARRIER)
        header = (ctypes.c_int32 * HEADER_WORDS)(*counts)
        return _median(lambda: self.library.ci_run(self.pool, records, copies, header), runs) / copies


def _median(function: Callable[[], object], runs: int) -> float:
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_dispatch(timer: KernelTimer) -> str:
    """What a record with a barrier costs when it has nothing to do."""
    x = np.zeros((1, 64), np.float32)
    fields = {"a": x, "b": x, "y": x, "a_stride": 64, "b_stride": 64, "y_stride": 64, "dim": 64}
    seconds = timer.seconds("add", (0, 0, 0), {**fields, "count": NUM_TOKENS}, copies=2000)
    return f"record + barrier: {seconds * 1e6:.2f} us"


def time_attention(
    timer: KernelTimer, dtype: str, context: int, queries: int, peak: float, num_seqs: int = 1
) -> str:
    """`queries` new tokens at the end of each sequence of `context`; 9 heads, 3 key heads, head_dim 64."""
    heads, kv_heads, dim, size = 9, 3, 64, 16
    rng = np.random.default_rng(0)
    width = -(-context // size)
    shape = (width * num_seqs, 2, kv_heads, size, dim)
    cache = rng.standard_normal(shape).astype(np.float32).astype(np.float16 if dtype == "f16" else np.float32)
    tables = rng.permutation(width * num_seqs).astype(np.int32).reshape(num_seqs, width)
    num_tokens = queries * num_seqs
    q = rng.standard_normal((num_tokens, heads * dim)).astype(np.float32)
    y = np.empty_like(q)
    starts = np.arange(num_seqs + 1, dtype=np.int32) * queries
    fields: dict[str, object] = {
        "q": q, "cache": cache, "block_tables": tables, "seq_lens": np.full(num_seqs, context, np.int32),
        "query_starts": starts, "y": y, "q_stride": heads * dim, "y_stride": heads * dim, "num_heads": heads,
        "kv_heads": kv_heads, "head_dim": dim, "block_size": size, "table_width": width, "scale": dim**-0.5,
    }  # fmt: skip
    seconds = timer.seconds(f"paged_attention.{dtype}", (num_tokens, num_seqs, 0), fields)
    pairs = sum(context - queries + i + 1 for i in range(queries)) * num_seqs
    flops = 4.0 * pairs * heads * dim
    return (
        f"attention.{dtype} {num_seqs} x {queries} queries at context {context}: {seconds * 1e6:.0f} us, "
        f"{flops / seconds / 1e9:.1f} GFLOP/s, {100 * flops / seconds / (peak * timer.threads):.0f} % of peak"
    )


def time_sampling(timer: KernelTimer, rows: int, vocab: int, label: str, **sampling: float) -> str:
    """Greedy if no sampling parameters are given."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    fields: dict[str, object] = {
        "logits": logits, "logits_stride": vocab, "vocab": vocab, "count": NUM_LOGITS,
        "sample_rows": np.arange(rows, dtype=np.int32), "last_token": np.zeros(rows, np.int32),
        "num_logprobs": np.full(rows, int(sampling.pop("num_logprobs", -1)), np.int32),
        "sampled_token_ids": np.zeros(rows, np.int32), "sampled_logprobs": np.zeros(rows, np.float32),
        "top_token_ids": np.zeros((rows, 20), np.int32), "top_logprobs": np.zeros((rows, 20), np.float32),
    }  # fmt: skip
    name = "sample_greedy"
    if sampling:
        name = "sample_random"
        fields |= {
            "temperature": np.full(rows, sampling["temperature"], np.float32),
            "top_k": np.full(rows, int(sampling.get("top_k", 0)), np.int32),
            "top_p": np.full(rows, sampling.get("top_p", 1.0), np.float32),
            "min_p": np.full(rows, sampling.get("min_p", 0.0), np.float32),
            "seed": np.arange(rows, dtype=np.uint64), "output_position": np.zeros(rows, np.int32),
        }  # fmt: skip
    seconds = timer.seconds(name, (0, 0, rows), fields)
    return f"sample {label}: {rows} x {vocab}: {seconds * 1e6:.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times single CPU kernels.")
    parser.add_argument("--level", default=kernel_library.best_level(), choices=kernel_library.LEVELS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--ghz", type=float, default=3.5, help="clock for the share of peak: two FMAs a cycle"
    )
    options = parser.parse_args()
    timer = KernelTimer(options.level, options.threads)
    peak = options.ghz * 1e9 * 2 * 2 * LANES[options.level]
    print(f"level {options.level}, {timer.threads} threads")
    print(time_dispatch(timer))
    for dtype in ("f32", "f16"):
        print(time_attention(timer, dtype, 512, 512, peak))
        print(time_attention(timer, dtype, 2048, 256, peak))
        print(time_attention(timer, dtype, 1024, 1, peak))
        print(time_attention(timer, dtype, 512, 1, peak, num_seqs=16))
    for rows in (1, 16):
        print(time_sampling(timer, rows, 49152, "greedy"))
        print(time_sampling(timer, rows, 49152, "greedy, 5 logprobs", num_logprobs=5, temperature=0.0))
        print(time_sampling(timer, rows, 49152, "temperature", temperature=0.8))
        print(time_sampling(timer, rows, 49152, "top_p", temperature=0.8, top_p=0.95))
        print(time_sampling(timer, rows, 49152, "top_k + top_p", temperature=0.8, top_k=50, top_p=0.95))
        print(time_sampling(timer, rows, 49152, "min_p", temperature=0.8, min_p=0.05))


if __name__ == "__main__":
    main()
