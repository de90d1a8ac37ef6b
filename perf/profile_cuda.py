"""Where a step's time goes on the GPU: each kernel of a plan timed by itself, against the whole graph.

    python -m castiron.perf.profile_cuda ENGINE [--batch 1,64] [--context 192] [--prefill 2048]

For every kernel of the plan, a graph of just its launches in their order (so that weights come from memory, not
from a cache) is timed; bytes are what the records' weights hold. A step's inputs are those of a real step.
"""

import argparse
import sys
from collections import defaultdict

import numpy as np

from castiron.runtime.command_line import (
    OneLineParser,
    engine_path,
    positive_int,
    positive_int_list,
    run_command,
)
from castiron.runtime.devices.cuda import CudaDevice
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.errors import InputError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.plan_format import MemoryClass
from castiron.runtime.step_builder import StepInput, fill_step

_NONE = np.empty(0, np.int32)
_REPEATS = 10


def profile_step(engine: LLMEngine, num_seqs: int, context: int, tokens_each: int) -> list[str]:
    """Lines of the profile of a step in which each sequence runs its last `tokens_each` of `context` tokens."""
    device = engine.device
    if not isinstance(device, CudaDevice):
        raise InputError("the engine runs on the CPU: perf/kernels_cpu.py times its kernels")
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num_seqs):
        row = engine.rows.acquire(tuple(rng.integers(0, engine.info.vocab_size, context).tolist()))
        if not engine.blocks.grow(row, context):
            raise InputError(f"the cache is too small for {num_seqs} sequences of {context} tokens")
        rows.append(row)
    counts = np.full(num_seqs, tokens_each, np.int32)
    ends = np.cumsum(counts) - 1
    starts = np.full(num_seqs, context - tokens_each, np.int32)
    step = StepInput(np.array(rows, np.int32), starts, counts, ends.astype(np.int32), _NONE)
    forward = engine.plans.choose_forward(int(counts.sum()), num_seqs, num_seqs, tokens_each)
    fill_step(device.step_views(forward), step, engine.rows, engine.blocks, 0)
    device.launch(forward, None)
    device.wait()
    lines = _profile_plan(device, forward)
    for row in rows:
        engine.blocks.release(row)
        engine.rows.release(row)
    return lines


def _profile_plan(device: CudaDevice, index: int) -> list[str]:
    header, arrays = device.header, device.plan_arrays
    plan = header.plans[index]
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position in range(plan.records_count):
        record = arrays.records[plan.records_start + position]
        start = int(record["relocations_start"])
        relocations = arrays.relocations[start : start + int(record["relocations_count"])]
        weights = int(relocations["extent_bytes"][relocations["memory_class"] == MemoryClass.WEIGHTS].sum())
        groups[header.kernels[int(record["kernel"])].name, weights].append(position)
    whole = device.time_graph(device.plan_graph(index), _REPEATS)
    lines = [
        f"{plan.name}: {plan.records_count} kernels, {whole:.3f} ms",
        f"{'kernel':44}{'weights MB':>11}{'n':>5}{'us each':>9}{'ms':>8}{'TB/s':>7}",
    ]
    total = 0.0
    for (name, weights), positions in sorted(groups.items()):
        milliseconds = device.time_graph(device.plan_graph(index, positions), _REPEATS)
        total += milliseconds
        each = milliseconds / len(positions)
        rate = weights / each / 1e9
        lines.append(
            f"{name:44}{weights / 1e6:11.1f}{len(positions):5}{each * 1e3:9.2f}{milliseconds:8.3f}{rate:7.2f}"
        )
    lines.append(f"{'sum of the kernels alone':44}{'':25}{total:8.3f}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="profile_cuda", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("engine", type=engine_path, metavar="ENGINE")
    add("--batch", type=positive_int_list, default=(1, 64), metavar="N,…", help="sequences of a decode step")
    add("--context", type=positive_int, default=192, metavar="N", help="tokens a sequence has")
    add(
        "--prefill",
        type=positive_int_list,
        default=(),
        metavar="N,…",
        help="tokens of a prompt, one sequence",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    with LLMEngine.load(args.engine, EngineOptions()) as engine:
        for batch in args.batch:
            print("\n".join(profile_step(engine, batch, args.context, 1)))
        for tokens in args.prefill:
            print("\n".join(profile_step(engine, 1, tokens, tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(_parser(), None, _run))
