"""What the engine loop itself costs a step: scheduling, the step block, appending tokens, the report to the front.

    python -m castiron.perf.scheduler_overhead [--seqs 64,128,256,512,1024] [--steps 200] [--json FILE]

The loop is the real one, on a device that takes no time (timed_device.py), so a step's time is that of the one thread
that runs it. Two cases a number of sequences:

    decode   all of them decode
    mixed    requests of random lengths end and others start in their place: prefills, admission, prefix cache
"""

import argparse
import gc
import sys
import time
from typing import Any

import numpy as np

from castiron.perf.snapshot import take_snapshot, write_snapshot
from castiron.perf.timed_device import BLOCK_SIZE, EOS_TOKEN_ID, VOCAB_SIZE, timed_engine, timed_manifest
from castiron.perf.timing import summarize
from castiron.runtime.command_line import OneLineParser, positive_int, positive_int_list, run_command
from castiron.runtime.engine_protocol import StepReport, encode_frame
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.manifest import Profile
from castiron.runtime.messages import AddRequest
from castiron.runtime.output_file import check_output_file, output_file
from castiron.runtime.sampling_params import SamplingParams

PROMPT_LENS = (20, 600)
OUTPUT_LENS = (20, 400)


def request(name: str, rng: np.random.Generator, max_tokens: int, prompt_len: int = 128) -> AddRequest:
    """A prompt of its own; no ids below 1, which end a request."""
    prompt = tuple(rng.integers(EOS_TOKEN_ID + 1, VOCAB_SIZE, prompt_len).tolist())
    return AddRequest(name, prompt, SamplingParams(max_tokens=max_tokens))


def decode_step_ms(num_seqs: int, num_steps: int) -> list[float]:
    """Time of each of `num_steps` steps in which all sequences decode."""
    engine = timed_engine(num_seqs, num_seqs * 20)
    rng = np.random.default_rng(0)
    for index in range(num_seqs):
        engine.add_request(request(f"r{index}", rng, max_tokens=num_steps + 64))
    while engine.stats().num_generated_tokens < 8 * num_seqs:
        engine.step()
    return _timed(engine, num_steps)


def mixed_step_ms(num_seqs: int, num_steps: int) -> list[float]:
    """The same with requests that come and go, as many as run at once waiting."""
    engine = timed_engine(num_seqs, num_seqs * (sum(PROMPT_LENS) + sum(OUTPUT_LENS)) // (2 * BLOCK_SIZE))
    rng = np.random.default_rng(1)
    count = 0

    def refill() -> None:
        nonlocal count
        while engine.scheduler.num_running + engine.scheduler.num_waiting < 2 * num_seqs:
            lengths = [int(rng.integers(*bounds)) for bounds in (OUTPUT_LENS, PROMPT_LENS)]
            engine.add_request(request(f"m{count}", rng, *lengths))
            count += 1

    refill()
    for _ in range(100):
        engine.step()
        refill()
    return _timed(engine, num_steps, refill)


def _timed(engine: LLMEngine, num_steps: int, between: Any = lambda: None) -> list[float]:
    gc.collect()
    gc.freeze()  # as the engine process does
    times = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        outputs = engine.step()
        encode_frame(StepReport(tuple(outputs), engine.stats()))
        times.append((time.perf_counter() - start_s) * 1e3)
        between()
    gc.unfreeze()
    return times


def measure(seqs: tuple[int, ...], num_steps: int) -> dict[str, Any]:
    """{"host_step_ms": {"decode.b64": {"p50", "p99"}, …}, "steps_per_s": {"mixed.b1024": …}}."""
    host: dict[str, Any] = {}
    rate: dict[str, float] = {}
    for num_seqs in seqs:
        for name, run in (("decode", decode_step_ms), ("mixed", mixed_step_ms)):
            times = run(num_seqs, num_steps)
            host[f"{name}.b{num_seqs}"] = summarize(times)
            rate[f"{name}.b{num_seqs}"] = 1e3 / float(np.mean(times))
    return {"host_step_ms": host, "steps_per_s": rate}


def table(metrics: dict[str, Any]) -> str:
    lines = [f"{'case':16}{'host ms a step, median':>24}{'p99':>8}{'steps/s of the mean':>22}"]
    for case, host in metrics["host_step_ms"].items():
        lines.append(f"{case:16}{host['p50']:24.3f}{host['p99']:8.3f}{metrics['steps_per_s'][case]:22.0f}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="scheduler_overhead", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--seqs", type=positive_int_list, default=(64, 128, 256, 512, 1024), metavar="N,…")
    add("--steps", type=positive_int, default=200, metavar="N", help="measured a case (default 200)")
    add("--json", type=output_file, metavar="FILE", help="write a snapshot of the measurement")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.json is not None:
        check_output_file(args.json, ".json")
    metrics = measure(tuple(args.seqs), args.steps)
    print(table(metrics))
    if args.json is not None:
        profile = Profile(max(args.seqs), 1, max(args.seqs))
        snapshot = take_snapshot(timed_manifest(profile), ["scheduler", *sys.argv[1:]], metrics)
        write_snapshot(args.json, snapshot)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(_parser(), None, _run))
