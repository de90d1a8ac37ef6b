"""Times linear_few's splits: python bench_linear_few.py [--scheme q4_1] [--tokens 1 8 64].

Every measurement is one graph of launches joined by programmatic edges, replayed between two events; weights and
activations rotate over more memory than the L2 cache holds. µs per launch, TB/s of weights in brackets; * is the
split the planner would choose.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

import torch
from bench_linear_many import LAUNCHES, ROTATED_BYTES, launch, microseconds
from cuda.bindings import driver
from cuda_kernel_caller import NUM_TOKENS, TARGET, check, function_of, pack_params

from castiron.plugins_cuda.compile import compile_cubin
from castiron.plugins_cuda.layouts import packed_bytes
from castiron.plugins_cuda.linear_few_specs import SPECS, TOKENS
from castiron.runtime.step_abi import HEADER_WORDS

# (n, k) of linears of Llama 3.1 8B, and of SmolLM2 135M's largest
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1536, 576))


def measure(scheme: str, n: int, k: int, tokens: int) -> None:
    """Print the row of one shape."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = {"n": n, "k": k, "rows": tokens, "num_sms": num_sms}
    num_bytes = packed_bytes(scheme, n, k)
    copies = min(LAUNCHES, max(2, -(-ROTATED_BYTES // num_bytes)))
    xs = [torch.randn(tokens, k, device="cuda").bfloat16() for _ in range(copies)]
    ys = [torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    # any bits whose f16 scales are finite
    packed = [torch.full((num_bytes,), 0x22, dtype=torch.uint8, device="cuda") for _ in range(copies)]
    header = torch.full((HEADER_WORDS,), tokens, dtype=torch.int32, device="cuda")
    able = [
        spec
        for spec in SPECS
        if spec.op == "linear"
        and spec.scheme == scheme
        and spec.operands["out0"] == "bf16"
        and dict(spec.defines)["TOKENS"] == str(min(t for t in TOKENS if t >= tokens))
        and not spec.why_not(sizes)
    ]
    chosen = min(able, key=lambda spec: spec.cost(sizes))
    columns = [f"[{n}, {k}] x {tokens}".ljust(20), f"{num_bytes / 1e6:6.1f} MB"]
    for spec in able:
        blocks = [
            pack_params(spec, {
                "x": xs[i], "weight": packed[i], "bias": None, "y": ys[i], "x_stride": k, "y_stride": n,
                "header": header, "count": NUM_TOKENS, "n": n, "k": k,
            })
            for i in range(copies)
        ]  # fmt: skip
        maximum = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function_of(spec), maximum, spec.shared_bytes(sizes)))
        time = microseconds(
            lambda i, stream, spec=spec, blocks=blocks: launch(spec, blocks[i], spec.grid(sizes), stream),
            copies,
        )
        star = "*" if spec is chosen else ""
        columns.append(f"s{spec.cluster[0]}{star} {time:6.2f} ({num_bytes / time / 1e6:.2f})")
    print(" | ".join(columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheme", default="bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    arguments = parser.parse_args()
    with ThreadPoolExecutor(16) as pool:
        for spec in SPECS:
            if spec.op == "linear" and spec.scheme == arguments.scheme and spec.operands["out0"] == "bf16":
                pool.submit(compile_cubin, spec.source, spec.defines, TARGET)
    for tokens in arguments.tokens:
        for n, k in SHAPES:
            measure(arguments.scheme, n, k, tokens)


if __name__ == "__main__":
    main()
