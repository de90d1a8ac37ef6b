"""Time to first token behind a shared prefix: computed cold, and found in the prefix cache.

    python -m castiron.perf.prefix_cache ENGINE [--prefix-len 1000] [--tail-len 20] [--repeats 5] [--json FILE]

Each round draws a new prefix. Its first request is cold; the second has the same prefix and another tail. The
ratio is taken round by round: a shared machine's speed drifts.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from castiron.perf.snapshot import take_snapshot, write_snapshot
from castiron.perf.timing import summarize, summarize_rates
from castiron.runtime.command_line import OneLineParser, add_engine_options, positive_int, run_command
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import InputError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest
from castiron.runtime.output_file import check_output_file, output_file
from castiron.runtime.sampling_params import SamplingParams
from castiron.server.engine_arguments import engine_options


def measure_shared_prefix(
    engine: LLMEngine, prefix_len: int, tail_len: int, repeats: int, seed: int = 0
) -> dict[str, Any]:
    """{"ttft_ms": {"p1020.cold": {"p50", "p99"}, "p1020.cached": …}, "ttft_ratio": …, "num_cached_tokens": n}.

    Raises InputError if a sequence can't be so long, or nothing of the prefix is cached.
    """
    length = prefix_len + tail_len
    if length + 1 > engine.info.max_seq_len:
        raise InputError(
            f"--prefix-len {prefix_len} and --tail-len {tail_len} and a new token are {length + 1} tokens, the "
            f"engine allows {engine.info.max_seq_len} a sequence: lower --prefix-len"
        )
    random = np.random.default_rng(seed)
    _first_token(engine, _draw(engine, random, length))  # warm: pages, caches, clocks
    cold_ms, cached_ms, num_cached = [], [], 0
    for _ in range(repeats):
        prefix = _draw(engine, random, prefix_len)
        seconds, num_found = _first_token(engine, prefix + _draw(engine, random, tail_len))
        cold_ms.append(seconds * 1e3)
        assert num_found < engine.info.block_size, "a new prefix isn't cached"
        seconds, num_cached = _first_token(engine, prefix + _draw(engine, random, tail_len))
        cached_ms.append(seconds * 1e3)
    if num_cached == 0:
        raise InputError(
            f"nothing of {prefix_len} tokens was cached: leave out --no-prefix-cache, or raise --prefix-len or "
            f"--kv-memory"
        )
    return {
        "ttft_ms": {f"p{length}.cold": summarize(cold_ms), f"p{length}.cached": summarize(cached_ms)},
        "ttft_ratio": summarize_rates([a / b for a, b in zip(cold_ms, cached_ms, strict=True)]),
        "num_cached_tokens": num_cached,
    }


def _draw(engine: LLMEngine, random: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(random.integers(0, engine.info.vocab_size, length).tolist())


def _first_token(engine: LLMEngine, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the only token of an answer, and how much of the prompt was cached."""
    request = AddRequest("bench", tuple(prompt), SamplingParams(max_tokens=1, ignore_eos=True))
    start_s = time.perf_counter()
    (output,) = engine.generate([request])
    return time.perf_counter() - start_s, output.num_cached_tokens


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="prefix_cache", description="first token behind a shared prefix, cold and cached"
    )
    parser.add_argument("engine", type=Path, metavar="ENGINE")
    parser.add_argument("--prefix-len", type=positive_int, default=1000, metavar="N", help="shared tokens")
    parser.add_argument("--tail-len", type=positive_int, default=20, metavar="N", help="tokens behind them")
    parser.add_argument("--repeats", type=positive_int, default=5, metavar="N", help="rounds")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write a snapshot")
    add_engine_options(parser)
    return parser


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    if args.json is not None:
        check_output_file(args.json, ".json", args.engine)
    with LLMEngine.load(args.engine, engine_options(args)) as engine:
        metrics = measure_shared_prefix(engine, args.prefix_len, args.tail_len, args.repeats)
    for name, ttft in metrics["ttft_ms"].items():
        print(f"{name:>14}  {ttft['p50']:9.1f} ms to the first token (p99 {ttft['p99']:.1f})")
    ratio = metrics["ttft_ratio"]
    print(
        f"{'ratio':>14}  {ratio['p50']:9.1f} ({ratio['p99']:.1f}), {metrics['num_cached_tokens']} tokens cached"
    )
    if args.json is not None:
        with EngineFile.open(args.engine) as file:
            snapshot = take_snapshot(file.manifest, argv, metrics)
        command = " ".join(["python -m castiron.perf.prefix_cache ENGINE", *argv[1:]])
        write_snapshot(args.json, msgspec.structs.replace(snapshot, command=command))
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return run_command(_parser(), argv, lambda args: _run(args, argv))


if __name__ == "__main__":
    sys.exit(main())
