"""Command-line arguments as the records of the runtime."""

import argparse
from collections.abc import Mapping

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.sampling_params import SamplingParams
from castiron.server.sampling_defaults import sampling_params


def engine_options(args: argparse.Namespace, default_max_seqs: int | None = None) -> EngineOptions:
    """What command_line.add_engine_options parsed."""
    return EngineOptions(
        kv_memory_bytes=args.kv_memory,
        num_threads=args.threads,
        max_seqs=args.max_seqs if args.max_seqs is not None else default_max_seqs,
        max_seq_len=args.max_seq_len,
        record=args.record,
        prefix_cache=not args.no_prefix_cache,
    )


def sampling_of(
    args: argparse.Namespace, generation_defaults: Mapping[str, float], max_tokens: int
) -> SamplingParams:
    """The answering flags of run-engine. Raises RequestError for values out of range."""
    return sampling_params(
        generation_defaults,
        max_tokens=max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        logprobs=args.logprobs,
    )
