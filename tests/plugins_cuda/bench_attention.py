"""Times paged_attention at Llama 3.1 8B's shapes: python bench_attention.py [--decode-stages 3 5] [--prefill-stages 4].

Every measurement is one graph of launches joined by programmatic edges, replayed between two events; launches rotate
over distinct caches (more than the L2 cache holds, where a cache is large enough to matter). Stages are the ring's of
the decode kernel and the tiles' of the wgmma kernel: variants of one source, the specs' own first.
"""

import argparse
import dataclasses
from typing import Any

import torch
from bench_linear_many import LAUNCHES, microseconds
from cuda_kernel_caller import function_of, launch, pack_params, poisoned, sizes_of

from castiron.plugins_cuda.attention_specs import SPECS
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.runtime.step_abi import HEADER_WORDS

NUM_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 64
MOST_CACHE_BYTES = 24 << 30  # of all copies together
DECODE = [(b, context) for b in (1, 8, 32, 64, 128) for context in (192, 1024, 8192)]
PREFILL = (128, 2048, 8192)


def variant(name: str, define: str, stages: int | None) -> CudaKernelSpec:
    """The spec, with another number of stages and as much shared memory as these take."""
    spec = next(spec for spec in SPECS if spec.name == name)
    if stages is None:
        return spec
    own = int(dict(spec.defines)[define])
    warps = spec.threads // 32
    stage_bytes = warps * 2 * 16 * HEAD_DIM * 2 if define == "STAGES" else 2 * 64 * HEAD_DIM * 2
    defines = tuple((key, str(stages) if key == define else value) for key, value in spec.defines)
    grown = max(0, stages - own) * stage_bytes if define != "STAGES" else (stages - own) * stage_bytes
    return dataclasses.replace(
        spec, defines=defines, shared_bytes=lambda sizes: spec.shared_bytes(sizes) + grown
    )


def measure(spec: CudaKernelSpec, num_seqs: int, query_len: int, context: int) -> float:
    """µs a launch, for `num_seqs` sequences of `context` tokens of which the last `query_len` are this step's."""
    num_tokens, width = num_seqs * query_len, -(-context // BLOCK_SIZE)
    shape = (num_seqs * width, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    cache_bytes = num_seqs * width * 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2
    copies = max(1, min(LAUNCHES, MOST_CACHE_BYTES // cache_bytes))
    header = torch.zeros(HEADER_WORDS, dtype=torch.int32)
    header[:2] = torch.tensor((num_tokens, num_seqs))
    q = torch.randn(num_tokens, NUM_HEADS * HEAD_DIM, device="cuda").bfloat16()
    shared: dict[str, Any] = {
        "q": q,
        "block_tables": torch.randperm(num_seqs * width).int().reshape(num_seqs, width).cuda(),
        "seq_lens": torch.full((num_seqs,), context, dtype=torch.int32, device="cuda"),
        "query_starts": (torch.arange(num_seqs + 1) * query_len).int().cuda(),
        "y": torch.empty_like(q),
        "header": header.cuda(),
        "q_stride": q.stride(0),
        "y_stride": q.stride(0),
        "num_heads": NUM_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "block_size": BLOCK_SIZE,
        "table_width": width,
        "scale": HEAD_DIM**-0.5,
    }
    capacities = {
        "max_tokens": num_tokens, "max_seqs": num_seqs, "max_logits": num_seqs, "max_query_len": query_len,
    }  # fmt: skip
    sizes = sizes_of(spec, shared, capacities)
    assert not spec.why_not(sizes), spec.why_not(sizes)
    blocks, kept = [], []
    for _ in range(copies):
        fields = {
            **shared,
            "cache": torch.randn(shape, dtype=torch.bfloat16, device="cuda"),
            "scratch.ptr": poisoned(max(16, spec.scratch_bytes(sizes)), dtype=torch.uint8),
            "counters.ptr": torch.zeros(
                max(16, spec.counters_bytes(sizes)), dtype=torch.uint8, device="cuda"
            ),
        }
        kept.append(fields)
        blocks.append(pack_params(spec, fields))
    function = function_of(spec)

    def run(copy: int, stream: int) -> None:
        launch(
            function,
            blocks[copy],
            spec.grid(sizes),
            spec.threads,
            spec.shared_bytes(sizes),
            pdl=True,
            stream=stream,
        )

    return microseconds(run, copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decode-stages", type=int, nargs="*", default=[], help="beside the spec's")
    parser.add_argument("--prefill-stages", type=int, nargs="*", default=[], help="beside the spec's")
    arguments = parser.parse_args()
    for name in ("decode.d128", "decode.d128.w8", "mixed.d128"):
        for stages in (None, *arguments.decode_stages):
            spec = variant(f"paged_attention.bf16.{name}", "STAGES", stages)
            for num_seqs, context in DECODE:
                us = measure(spec, num_seqs, 1, context)
                read = num_seqs * context * KV_HEADS * HEAD_DIM * 4
                print(f"{name:15s} stages {dict(spec.defines)['STAGES']}  b{num_seqs:<4d} context {context:5d} "
                      f"{us:8.1f} us {read / us / 1e6:6.2f} TB/s", flush=True)  # fmt: skip
    for stages in (None, *arguments.prefill_stages):
        spec = variant("paged_attention.bf16.wgmma.d128", "PREFILL_STAGES", stages)
        for tokens in PREFILL:
            us = measure(spec, 1, tokens, tokens)
            flops = 4 * NUM_HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
            print(f"prefill stages {dict(spec.defines)['PREFILL_STAGES']} {tokens:6d} tokens "
                  f"{us:8.1f} us {flops / us / 1e6:6.0f} TFLOP/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
