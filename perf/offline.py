"""bench-engine offline: an engine in this process, a whole batch at once, no text."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from castiron.perf.timing import summarize, summarize_rates
from castiron.runtime.devices.base import TimesGraphs
from castiron.runtime.errors import InputError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams

_TIMED_REPEATS = 3  # of the runs that measure gpu_busy


@dataclass(frozen=True)
class OfflineCase:
    batches: tuple[int, ...]  # sequences at once, one measurement each
    prompt_len: int  # tokens
    output_len: int  # N: decode is measured over N tokens after the first
    repeats: int
    seed: int = 0


def check_case(engine: LLMEngine, case: OfflineCase) -> None:
    """Raise InputError if the engine can't hold a whole batch of this case at once."""
    info = engine.info
    num_tokens = case.prompt_len + case.output_len + 1
    if num_tokens > info.max_seq_len:
        raise InputError(
            f"--prompt-len {case.prompt_len} and --output-len {case.output_len} + 1 are {num_tokens} tokens, "
            f"the engine allows {info.max_seq_len} a sequence"
        )
    largest = max(case.batches)
    if largest > info.max_seqs:
        raise InputError(f"--batch {largest} is above the {info.max_seqs} sequences the engine runs at once")
    num_blocks = largest * -(-num_tokens // info.block_size)
    if num_blocks > info.num_blocks:
        raise InputError(
            f"a batch of {largest} sequences of {num_tokens} tokens needs {num_blocks} cache blocks, "
            f"there are {info.num_blocks}: raise --kv-memory or lower --batch"
        )


def measure_offline(engine: LLMEngine, case: OfflineCase) -> dict[str, Any]:
    """Metrics of every batch size: {"decode_tpot_ms": {"b1": {"p50", "p99"}, …}, …}.

    decode_tpot_ms      (time of N + 1 tokens - time of 1) / N, for the whole batch
    throughput_tok_s    decoded tokens/s of the whole batch
    prefill_tok_s       prompt tokens/s of the whole batch, first tokens included
    ttft_ms             time until the whole batch has its first token
    gpu_busy            share of decode's wall time in which the GPU worked on a step's graphs, by events, in
                        runs of their own; on a GPU only
    Raises InputError as check_case.
    """
    check_case(engine, case)
    random = np.random.default_rng(case.seed)
    metrics: dict[str, dict[str, dict[str, float]]] = {
        "decode_tpot_ms": {},
        "throughput_tok_s": {},
        "prefill_tok_s": {},
        "ttft_ms": {},
    }
    for batch in case.batches:
        _generate(
            engine, random, batch, case.prompt_len, min(2, case.output_len)
        )  # warm: pages, caches, clocks
        first_s = []
        tpot_ms = []
        for _ in range(case.repeats):
            one_s = _generate(engine, random, batch, case.prompt_len, 1)
            all_s = _generate(engine, random, batch, case.prompt_len, case.output_len + 1)
            first_s.append(one_s)
            tpot_ms.append((all_s - one_s) * 1e3 / case.output_len)
        name = f"b{batch}"
        metrics["decode_tpot_ms"][name] = summarize(tpot_ms)
        metrics["throughput_tok_s"][name] = summarize_rates([batch * 1e3 / max(t, 1e-6) for t in tpot_ms])
        metrics["prefill_tok_s"][name] = summarize_rates([batch * case.prompt_len / s for s in first_s])
        metrics["ttft_ms"][f"p{case.prompt_len}" if batch == 1 else f"p{case.prompt_len}.{name}"] = summarize(
            [s * 1e3 for s in first_s]
        )
        if isinstance(engine.device, TimesGraphs):
            shares = [
                _busy_share(engine, engine.device, random, batch, case)
                for _ in range(min(case.repeats, _TIMED_REPEATS))
            ]
            metrics.setdefault("gpu_busy", {})[name] = summarize_rates(shares)
    return metrics


def _busy_share(
    engine: LLMEngine, device: TimesGraphs, random: np.random.Generator, batch: int, case: OfflineCase
) -> float:
    """Device time over wall time of decode: of the tokens after the first, as decode_tpot_ms."""
    wall_s, busy_s = [], []
    for num_tokens in (1, case.output_len + 1):
        device.start_timing()
        wall_s.append(_generate(engine, random, batch, case.prompt_len, num_tokens))
        busy_s.append(device.stop_timing())
    return (busy_s[1] - busy_s[0]) / max(wall_s[1] - wall_s[0], 1e-9)


def _generate(
    engine: LLMEngine, random: np.random.Generator, batch: int, prompt_len: int, num_tokens: int
) -> float:
    """Seconds to give each of `batch` new random prompts exactly `num_tokens` greedy tokens."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = []
    for index in range(batch):
        vocab_size = engine.info.vocab_size
        ids = random.choice(vocab_size, prompt_len, replace=prompt_len > vocab_size)
        requests.append(AddRequest(f"bench-{index}", tuple(ids.tolist()), sampling))
    start_s = time.perf_counter()
    for _ in engine.generate(requests):
        pass
    return time.perf_counter() - start_s


def offline_table(metrics: dict[str, Any]) -> str:
    """The metrics for people: a line a batch size, medians and in brackets p99."""
    busy = metrics.get("gpu_busy", {})
    head = f"{'batch':>5}  {'decode ms/token':>20}  {'decode tokens/s':>20}  {'prefill tokens/s':>20}"
    lines = [head + (f"  {'GPU busy':>18}" if busy else "")]
    for name, tpot in metrics["decode_tpot_ms"].items():
        cells = [tpot, metrics["throughput_tok_s"][name], metrics["prefill_tok_s"][name]]
        columns = [f"{cell['p50']:>9.2f} ({cell['p99']:>8.2f})" for cell in cells]
        if busy:
            columns.append(f"{busy[name]['p50']:>8.1%} ({busy[name]['p99']:>7.1%})")
        lines.append("  ".join([f"{name.removeprefix('b'):>5}", *columns]))
    return "\n".join(lines)
