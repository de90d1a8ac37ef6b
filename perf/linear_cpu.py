"""Speed of the CPU's linear kernels, each weight read from memory: GB/s at one row, GMAC/s at many.

    python -m castiron.perf.linear_cpu [--level LEVEL] [--threads N] [--kernel linear_q8] [--schemes q4_1]
                                       [--rows 1,16,512] [--shapes 576x1536] [--seconds S] [--json FILE]

A shape is KxN. For one row the floor is the weights' bytes at the read bandwidth measured here, with as many
threads; the weights of a measurement are copies that together exceed the last-level cache.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import statistics
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from castiron.models.kernel_spec import TYPE_CODES
from castiron.models.schemes import SCHEMES, schemes_for
from castiron.plugins_cpu import layouts
from castiron.plugins_cpu.compile import build_library
from castiron.plugins_cpu.specs import SPECS
from castiron.runtime.devices import kernel_library
from castiron.runtime.devices.cpu_library import CI_RECORD_DTYPE, CpuLibrary
from castiron.runtime.errors import CastironError, InputError
from castiron.runtime.plan_format import RecordFlag
from castiron.runtime.step_abi import HEADER_FIELDS, HEADER_WORDS

SHAPES = ((576, 1536), (1536, 576), (576, 49152))  # k, n
ROWS = (1, 16, 512)
WORKING_SET_BYTES = 256 << 20  # beyond any last-level cache this runs on


class KernelRunner:
    """A level's library with a pool of threads, running lists of records."""

    def __init__(self, level: str, threads: int) -> None:
        self._library = CpuLibrary(build_library(level), level)
        self._pool = self._library.create_pool(sorted(os.sched_getaffinity(0))[:threads])
        self._header = np.zeros(HEADER_WORDS, np.int32)

    def median_seconds(self, kernel: str, params: list[bytes], num_rows: int, seconds: float) -> float:
        """Median seconds of a run over all parameter blocks in order, repeated for `seconds`."""
        blocks = [np.frombuffer(block, np.uint8).copy() for block in params]
        records = np.zeros(len(blocks), CI_RECORD_DTYPE)
        records["fn"] = self._library.kernels[kernel][0]
        records["params"] = [block.ctypes.data for block in blocks]
        records["flags"] = RecordFlag.BARRIER
        self._header[HEADER_FIELDS.index("num_tokens")] = num_rows  # Count 0, what pack_call leaves
        times: list[float] = []
        stop = time.perf_counter() + seconds
        while len(times) < 4 or time.perf_counter() < stop:
            start = time.perf_counter()
            self._library.run(self._pool, records.ctypes.data, len(records), self._header.ctypes.data)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def close(self) -> None:
        """Stop the threads."""
        self._library.destroy_pool(self._pool)


@dataclass(frozen=True)
class Measurement:
    """One kernel on one shape and number of activation rows."""

    kernel: str
    k: int
    n: int
    rows: int
    us: float  # a call
    weight_gb_s: float  # bytes of the weight over the time
    gmac_s: float


def read_bandwidth(threads: int, seconds: float = 1.0) -> float:
    """Bytes a second that `threads` threads read from memory, best of several passes."""
    parts = [np.ones(WORKING_SET_BYTES // 8 // threads, np.int64) for _ in range(threads)]
    best = 0.0
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            start = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - start))
    return best


def pack_call(kernel: str, **fields: object) -> bytes:
    """A kernel's parameter block; arrays stand for their addresses."""
    values = [fields.get(p.name, 0) for p in SPECS[kernel].parameters]
    numbers = [value.ctypes.data if isinstance(value, np.ndarray) else value for value in values]
    return struct.pack("<" + "".join(TYPE_CODES[p.type] for p in SPECS[kernel].parameters), *numbers)


def measure(
    runner: KernelRunner, op: str, scheme: str, k: int, n: int, rows: int, seconds: float
) -> Measurement:
    """One scheme, shape and number of rows: seconds a call, weight GB/s, GMAC/s."""
    rng = np.random.default_rng(0)
    weight_bytes = layouts.packed_bytes(scheme, n, k)
    num_copies = max(2, WORKING_SET_BYTES // weight_bytes) if rows == 1 else 2
    weights = rng.integers(0, 64, (num_copies, weight_bytes), np.uint8)  # as f16 scales: small and finite
    y = np.empty((rows, n), np.float32)
    if op == "linear_q8":
        q = rng.integers(-127, 128, (rows, 2, k), np.int8)
        scale = np.full((rows, k // 32), 1e-4, np.float32)
        inputs: dict[str, object] = {"q": q, "scale": scale, "sum": np.zeros((rows, k // 16), np.float32)}
    else:
        inputs = {"x": rng.standard_normal((rows, k), np.float32), "x_stride": k}
    kernel = f"{op}.{scheme}"
    calls = [pack_call(kernel, weight=w, y=y, y_stride=n, n=n, k=k, **inputs) for w in weights]
    per_call = runner.median_seconds(kernel, calls, rows, seconds) / num_copies
    gb_s, gmac_s = weight_bytes / per_call / 1e9, rows * n * k / per_call / 1e9
    return Measurement(kernel, k, n, rows, per_call * 1e6, gb_s, gmac_s)


def _parse_shapes(text: str) -> list[tuple[int, int]]:
    try:
        return [(int(k), int(n)) for k, n in (shape.split("x") for shape in text.split(","))]
    except ValueError:
        raise InputError(f"got --shapes {text}, expected KxN,KxN,… such as 576x1536") from None


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m castiron.perf.linear_cpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--level", default=kernel_library.best_level(), help="CPU level (default: this machine's best)"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kernel", default="linear_q8", choices=("linear", "linear_q8"))
    parser.add_argument("--schemes", default="", help="comma separated (default: all the kernel has)")
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=0.5, help="to measure each for")
    parser.add_argument("--json", type=Path)
    options: argparse.Namespace = parser.parse_args(arguments)
    try:
        _run(options)
    except CastironError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace) -> None:
    schemes = options.schemes.split(",") if options.schemes else schemes_for("cpu", quantized=True)
    for scheme in schemes:
        if f"{options.kernel}.{scheme}" not in SPECS:
            known = ", ".join(schemes_for("cpu"))
            raise InputError(f"there is no kernel {options.kernel}.{scheme}: schemes are {known}")
    bandwidth = read_bandwidth(options.threads)
    runner = KernelRunner(options.level, options.threads)
    print(f"{options.level}, {options.threads} threads, memory reads {bandwidth / 1e9:.1f} GB/s")
    results = []
    for scheme in schemes:
        for k, n in _parse_shapes(options.shapes):
            if k % SCHEMES[scheme].block_size:
                continue  # 576 isn't a multiple of the 256-element blocks
            for rows in map(int, options.rows.split(",")):
                result = measure(runner, options.kernel, scheme, k, n, rows, options.seconds)
                results.append(result)
                line = f"{result.kernel:16} {k:5} x {n:5}  {rows:4} rows  {result.us:9.1f} us"
                if rows == 1:
                    share = result.weight_gb_s / (bandwidth / 1e9)
                    print(f"{line}  {result.weight_gb_s:7.2f} GB/s  {share:5.2f} of the floor")
                else:
                    print(f"{line}  {result.gmac_s:7.1f} GMAC/s")
    runner.close()
    if options.json:
        document = {
            "machine": platform.processor() or platform.machine(),
            "date": time.strftime("%Y-%m-%d"),
            "level": options.level,
            "threads": options.threads,
            "read_bandwidth_gb_s": bandwidth / 1e9,
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
