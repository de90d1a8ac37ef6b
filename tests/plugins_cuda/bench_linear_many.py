"""Times linear_many's tilings beside torch.matmul: python bench_linear_many.py [--scheme q4_1] [--tokens 128 2048].

Every measurement is one graph of launches joined by programmatic edges (torch's: plain ones), replayed between two
events; weights and activations rotate over more memory than the L2 cache holds. µs per launch, TFLOP/s in brackets;
* is the tiling the planner would choose.
"""

import argparse
import ctypes
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from cuda.bindings import driver
from cuda_kernel_caller import NUM_TOKENS, TARGET, check, function_of, pack_params
from dense_tiles import pack_dense

from castiron.plugins_cuda.compile import compile_cubin
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.plugins_cuda.layouts import packed_bytes
from castiron.plugins_cuda.linear_many_specs import SPECS
from castiron.runtime.step_abi import HEADER_WORDS

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # (n, k) of Llama 3.1 8B's linears
ROTATED_BYTES = 256 << 20  # L2: 50 MB
LAUNCHES = 24  # of a graph
REPLAYS = 7


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


def measure(scheme: str, n: int, k: int, tokens: int) -> None:
    """Print the row of one shape."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = {"n": n, "k": k, "rows": tokens, "num_sms": num_sms}
    copies = max(2, -(-ROTATED_BYTES // (packed_bytes(scheme, n, k) + 2 * tokens * (n + k))))
    copies = min(copies, LAUNCHES)
    xs = [torch.randn(tokens, k, device="cuda").bfloat16() for _ in range(copies)]
    ys = [torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    weights = [torch.randn(n, k, device="cuda").bfloat16() / 64 for _ in range(copies)]
    torch.matmul(xs[0], weights[0].T, out=ys[0])  # cuBLAS sets up outside of the capture
    plain = microseconds(lambda i, _: torch.matmul(xs[i], weights[i].T, out=ys[i]), copies)
    if scheme == "bf16":
        packed = [pack_dense(weight) for weight in weights]
    else:  # any bits whose f16 scales are finite
        size = packed_bytes(scheme, n, k)
        packed = [torch.full((size,), 0x22, dtype=torch.uint8, device="cuda") for _ in range(copies)]
    header = torch.full((HEADER_WORDS,), tokens, dtype=torch.int32, device="cuda")

    def brief(time: float) -> str:
        return f"{time:7.1f} ({2e-6 * tokens * n * k / time:4.0f})"

    able = [s for s in SPECS if s.scheme == scheme and s.operands["out0"] == "bf16" and not s.why_not(sizes)]
    chosen = min(able, key=lambda spec: spec.cost(sizes))
    columns = [f"[{n}, {k}] x {tokens}".ljust(22), f"torch {brief(plain)}"]
    for spec in sorted(able, key=lambda spec: spec.cost(sizes))[:4]:
        blocks = [
            pack_params(spec, {
                "x": xs[i], "weight": packed[i], "bias": None, "y": ys[i], "y_stride": n, "header": header,
                "count": NUM_TOKENS, "n": n, "k": k,
            })
            for i in range(copies)
        ]  # fmt: skip
        function_of(spec)
        grid = spec.grid(sizes)

        def run(i: int, stream: int, spec: CudaKernelSpec = spec, blocks: list[bytes] = blocks) -> None:
            launch(spec, blocks[i], grid, stream)  # noqa: B023

        maximum = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function_of(spec), maximum, spec.shared_bytes({})))
        name = spec.name.removeprefix(f"linear_many.{scheme}.") + ("*" if spec is chosen else "")
        columns.append(f"{name} {brief(microseconds(run, copies))}")
    megabytes = packed_bytes(scheme, n, k) / 1e6
    print(" | ".join(columns), f"| weights {megabytes:.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheme", default="bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256, 512, 2048])
    arguments = parser.parse_args()
    with ThreadPoolExecutor(12) as pool:
        for spec in SPECS:
            if spec.scheme == arguments.scheme and spec.operands["out0"] == "bf16":
                pool.submit(compile_cubin, spec.source, spec.defines, TARGET)
    for n, k in SHAPES:
        for tokens in arguments.tokens:
            measure(arguments.scheme, n, k, tokens)


if __name__ == "__main__":
    main()
