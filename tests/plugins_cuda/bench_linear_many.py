"""Times kernels of linear beside torch's: python bench_linear_many.py [--schemes q4_1 fp8] [--tokens 128 2048].

Every measurement is one graph of launches joined by programmatic edges (torch's: plain ones), replayed between two
events; weights and activations rotate over more memory than the L2 cache holds. Of linear_few's and linear_many's
kernels the --most whose predicted cost is least are measured: µs per launch, the prediction in brackets; * is the
one the planner would choose. bf16 is timed beside torch.matmul, fp8 beside torch._scaled_mm with a scale per tensor:
"fast" sums in the tensor cores alone, as our kernels do, the other one moves sums to other registers on the way. At
the end of a row the best time and its TB/s of weights and TFLOP/s, and what was measured before (linear_times.py).
"""

import argparse
import ctypes
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from cuda.bindings import driver
from cuda_kernel_caller import NUM_TOKENS, TARGET, check, function_of, pack_params
from dense_tiles import pack_dense
from linear_times import CUBLAS_BF16, FEW_BEFORE, MANY_BF16

from castiron.plugins_cuda import linear_few_specs, linear_many_specs
from castiron.plugins_cuda.compile import compile_cubin
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Sizes
from castiron.plugins_cuda.layouts import packed_bytes, tiles_bytes
from castiron.plugins_cuda.linear_inputs import linear_inputs
from castiron.runtime.step_abi import HEADER_WORDS

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # (n, k) of Llama 3.1 8B's linears
ROTATED_BYTES = 256 << 20  # L2: 50 MB
LAUNCHES = 24  # of a graph
REPLAYS = 5


def launch(spec: CudaKernelSpec, params: bytes, grid: tuple[int, int, int], stream: int) -> None:
    """Launch on a stream that is being captured."""
    block = ctypes.create_string_buffer(params, len(params))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    function = function_of(spec)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = spec.threads, 1, 1
    config.sharedMemBytes = spec.shared_bytes({})
    config.hStream = stream
    serial = driver.CUlaunchAttribute()
    serial.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    serial.value.programmaticStreamSerializationAllowed = 1
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dims = cluster.value.clusterDim
    dims.x, dims.y, dims.z = spec.cluster
    config.attrs, config.numAttrs = [serial, cluster], 2
    check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


def microseconds(run: Callable[[int, int], object], copies: int) -> float:
    """Median time of run(copy of the buffers, stream), replayed in a graph of LAUNCHES."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(LAUNCHES):
            run(i % copies, stream.cuda_stream)
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times[2:])


def candidates(scheme: str, sizes: Sizes, most: int) -> list[CudaKernelSpec]:
    """The kernels the planner expects most of, best first."""
    able = [
        spec
        for spec in (*linear_few_specs.SPECS, *linear_many_specs.SPECS)
        if spec.op == linear_inputs(scheme).op
        and spec.scheme == scheme
        and spec.operands["out0"] == "bf16"
        and not spec.why_not(sizes)
        and not (
            spec.source == "linear_few.cu" and dict(spec.defines)["TOKENS"] == "16" and sizes["rows"] <= 8
        )
    ]
    return sorted(able, key=lambda spec: spec.cost(sizes))[:most]


def random_codes(num_bytes: int) -> torch.Tensor:
    """Finite e4m3 of normal values, uint8 [num_bytes]: the tensor cores' power, so their clock, follows the data."""
    return torch.randn(num_bytes, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)


def packed_fp8(n: int, k: int) -> torch.Tensor:
    """A packed weight [n, k] of random codes, all its rows' scales 1 / 64."""
    tiles = tiles_bytes("fp8", n, k)
    scales = torch.full(((packed_bytes("fp8", n, k) - tiles) // 4,), 1 / 64, device="cuda")
    return torch.cat([random_codes(tiles), scales.view(torch.uint8)])


def time_scaled_mm(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor], n: int, fast: bool) -> float:
    """µs of torch._scaled_mm on codes xs [tokens, k], into ys [tokens, n]."""
    k = xs[0].shape[1]
    weights = [random_codes(n * k).view(n, k).view(torch.float8_e4m3fn) for _ in xs]
    codes = [x.view(torch.float8_e4m3fn) for x in xs]
    scale = torch.full((), 1 / 64, device="cuda")

    def run(i: int, _: int) -> None:
        torch._scaled_mm(
            codes[i], weights[i].T, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast, out=ys[i]
        )

    run(0, 0)  # cuBLAS sets up outside of the capture
    return microseconds(run, len(xs))


def measure(scheme: str, n: int, k: int, tokens: int, most: int, num_sms: int) -> None:
    """Print the row of one shape."""
    sizes = {"n": n, "k": k, "rows": tokens, "num_sms": num_sms}
    num_bytes = packed_bytes(scheme, n, k)
    x_bytes = linear_inputs(scheme).x_bytes
    copies = max(2, min(LAUNCHES, -(-ROTATED_BYTES // (num_bytes + tokens * (2 * n + x_bytes * k)))))
    ys = [torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    columns = [f"{scheme} [{n}, {k}] x {tokens}".ljust(28)]
    inputs: dict[str, torch.Tensor] = {}
    if scheme == "fp8":
        xs = [random_codes(tokens * k).view(tokens, k) for _ in range(copies)]
        inputs["x_scale"] = torch.ones(tokens, device="cuda")
        packed = [packed_fp8(n, k) for _ in range(copies)]
        fast, moved = (time_scaled_mm(xs, ys, n, fast) for fast in (True, False))
        columns.append(f"torch fast {fast:6.1f}, not fast {moved:6.1f}")
    elif scheme == "bf16":
        xs = [torch.randn(tokens, k, device="cuda").bfloat16() for _ in range(copies)]
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(copies)]
        torch.matmul(xs[0], weights[0].T, out=ys[0])  # cuBLAS sets up outside of the capture
        plain = microseconds(lambda i, _: torch.matmul(xs[i], weights[i].T, out=ys[i]), copies)
        columns.append(f"torch {plain:6.1f}")
        packed = [pack_dense(weight) for weight in weights]
    else:  # any bits whose scales are finite
        xs = [torch.randn(tokens, k, device="cuda").bfloat16() for _ in range(copies)]
        packed = [torch.full((num_bytes,), 0x22, dtype=torch.uint8, device="cuda") for _ in range(copies)]
    header = torch.full((HEADER_WORDS,), tokens, dtype=torch.int32, device="cuda")
    best = float("inf")
    for index, spec in enumerate(candidates(scheme, sizes, most)):
        fields = inputs | ({"x_stride": k} if spec.source == "linear_few.cu" else {})
        blocks = [
            pack_params(spec, {
                "x": xs[i], "weight": packed[i], "bias": None, "y": ys[i], "y_stride": n, "header": header,
                "count": NUM_TOKENS, "n": n, "k": k, **fields,
            })
            for i in range(copies)
        ]  # fmt: skip
        grid = spec.grid(sizes)
        maximum = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function_of(spec), maximum, spec.shared_bytes({})))

        def run(i: int, stream: int, spec: CudaKernelSpec = spec, blocks: list[bytes] = blocks) -> None:
            launch(spec, blocks[i], grid, stream)  # noqa: B023

        time = microseconds(run, copies)
        best = min(best, time)
        name = spec.name.removeprefix("linear_").replace(f".{scheme}", "") + ("*" if index == 0 else "")
        columns.append(f"{name} {time:.1f} ({spec.cost(sizes):.1f})")
    rate = f"best {best:.1f}: {num_bytes / best / 1e6:.2f} TB/s, {2e-6 * tokens * n * k / best:.0f} TFLOP/s"
    before = [*MANY_BF16.get((n, k, tokens), {}).values()] if scheme == "bf16" else []
    before += [FEW_BEFORE[key] for key in ((scheme, n, k, tokens),) if key in FEW_BEFORE]
    columns.append(rate + (f"; before {min(before):.1f}" if before else ""))
    if scheme == "bf16" and (n, k, tokens) in CUBLAS_BF16:
        columns[-1] += f", cuBLAS {CUBLAS_BF16[n, k, tokens]:.1f}"
    print(" | ".join(columns), flush=True)


def measure_all(
    schemes: Sequence[str], shapes: Iterable[tuple[int, int]], tokens: Sequence[int], most: int
) -> None:
    """Compile what will be measured, 16 at a time, then print a row per scheme, number of tokens and shape."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    cases = [(scheme, n, k, count) for scheme in schemes for count in tokens for n, k in shapes]
    used = {
        (spec.source, spec.defines)
        for scheme, n, k, count in cases
        for spec in candidates(scheme, {"n": n, "k": k, "rows": count, "num_sms": num_sms}, most)
    }
    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(compile_cubin, source, defines, TARGET) for source, defines in used]:
            done.result()
    for scheme, n, k, count in cases:
        measure(scheme, n, k, count, most, num_sms)


def arguments_of(description: str, tokens: list[int]) -> argparse.Namespace:
    """Command line of both benches."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", nargs="+", default=["bf16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens)
    parser.add_argument("--most", type=int, default=5, help="kernels that are measured for a shape")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments_of(__doc__ or "", [64, 128, 256, 512, 2048])
    measure_all(given.schemes, SHAPES, given.tokens, given.most)
