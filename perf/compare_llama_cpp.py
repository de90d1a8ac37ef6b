"""castiron and llama.cpp on the same model and machine, in turn, several rounds; the median ratio is what counts.

Shared machines drift by 1.5x within an hour, so absolute numbers mean little: each round runs both within the same
minute, and every metric's ratio is taken round by round.

    python -m castiron.perf.compare_llama_cpp build/smollm2-135m.engine --gguf MODEL.gguf --llama-cpp BIN_FOLDER

BIN_FOLDER holds llama-bench and llama-batched-bench. Decode: 32 prompt tokens, then 64 tokens for all sequences at
once. Prefill: 512 tokens of one sequence, on castiron's side including the first sampled token.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from castiron.perf.snapshot import take_snapshot, write_snapshot
from castiron.runtime.command_line import OneLineParser, positive_int, run_command
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import InputError, WorkFailedError
from castiron.runtime.output_file import check_output_file, output_file

BATCHES = (1, 8, 16)
PROMPT_LEN, OUTPUT_LEN, PREFILL_LEN = 32, 64, 512


def _run(command: list[str]) -> str:
    """Standard output of a command; WorkFailedError with its last line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise InputError(f"can't run {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise WorkFailedError(f"{Path(command[0]).name} exited with {done.returncode}: {lines[-1]}")
    return done.stdout


def measure_llama_cpp(folder: Path, model: Path, threads: int) -> dict[str, float]:
    """Tokens/s of llama.cpp: decode_b1, decode_b8, decode_b16, prefill_512."""
    rates: dict[str, float] = {}
    common = ["-m", str(model), "-t", str(threads)]
    command = [str(folder / "llama-batched-bench"), *common, "-c", "4096", "-b", "2048", "-ub", "512"]
    command += ["-npp", str(PROMPT_LEN), "-ntg", str(OUTPUT_LEN), "-npl", ",".join(map(str, BATCHES))]
    table = _run([*command, "--output-format", "jsonl"])
    for line in table.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rates[f"decode_b{row['pl']}"] = row["speed_tg"]
    prefill = _run(
        [str(folder / "llama-bench"), *common, "-p", str(PREFILL_LEN), "-n", "0", "-r", "2", "-o", "json"]
    )
    rates[f"prefill_{PREFILL_LEN}"] = json.loads(prefill)[0]["avg_ts"]
    return rates


def measure_castiron(engine: Path, threads: int) -> dict[str, float]:
    """The same metrics of castiron, through bench-engine."""

    def offline(batches: tuple[int, ...], prompt_len: int, output_len: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "offline.json"
            command = [sys.executable, "-m", "castiron.perf.cli", "offline", str(engine), "--json", str(path)]
            command += ["--batch", ",".join(map(str, batches)), "--prompt-len", str(prompt_len)]
            command += ["--output-len", str(output_len), "--repeats", "2", "--threads", str(threads)]
            _run(command)
            metrics: dict[str, Any] = json.loads(path.read_bytes())["metrics"]
        return metrics

    decode = offline(BATCHES, PROMPT_LEN, OUTPUT_LEN)["throughput_tok_s"]
    prefill = offline((1,), PREFILL_LEN, 1)["prefill_tok_s"]
    rates = {f"decode_b{batch}": decode[f"b{batch}"]["p50"] for batch in BATCHES}
    rates[f"prefill_{PREFILL_LEN}"] = prefill["b1"]["p50"]
    return rates


def compare(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Per metric: median tokens/s of both, and the median, lowest and highest ratio castiron / llama.cpp."""
    result = {}
    for name in rounds[0][0]:
        ours = np.array([r[0][name] for r in rounds])
        theirs = np.array([r[1][name] for r in rounds])
        ratios = ours / theirs
        result[name] = {
            "castiron_tok_s": float(np.median(ours)),
            "llama_cpp_tok_s": float(np.median(theirs)),
            "ratio": float(np.median(ratios)),
            "ratio_low": float(ratios.min()),
            "ratio_high": float(ratios.max()),
        }
    return result


def main(argv: list[str] | None = None) -> int:
    """Command line; prints a table and writes a snapshot with --json."""
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(prog="compare_llama_cpp", description="castiron beside llama.cpp, in turn")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="BIN_FOLDER")
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--threads", type=positive_int, default=2)
    parser.add_argument("--json", type=output_file)
    return run_command(parser, argv, lambda arguments: _compare(arguments, argv))


def _compare(arguments: argparse.Namespace, argv: list[str]) -> int:
    if arguments.json is not None:
        check_output_file(arguments.json, ".json", arguments.engine)
    rounds = []
    for index in range(arguments.rounds):
        ours = measure_castiron(arguments.engine, arguments.threads)
        theirs = measure_llama_cpp(arguments.llama_cpp, arguments.gguf, arguments.threads)
        rounds.append((ours, theirs))
        print(f"round {index + 1}/{arguments.rounds}", file=sys.stderr)
    table = compare(rounds)
    for name, row in table.items():
        print(
            f"{name:>12}  castiron {row['castiron_tok_s']:8.1f}  llama.cpp {row['llama_cpp_tok_s']:8.1f}  "
            f"ratio {row['ratio']:.2f} [{row['ratio_low']:.2f}..{row['ratio_high']:.2f}]"
        )
    if arguments.json is not None:
        with EngineFile.open(arguments.engine) as engine:
            snapshot = take_snapshot(engine.manifest, argv, {"side_by_side": table})
        command = "python -m castiron.perf.compare_llama_cpp"
        command += (
            f" ENGINE --gguf GGUF --llama-cpp BIN --rounds {arguments.rounds} --threads {arguments.threads}"
        )
        write_snapshot(arguments.json, msgspec.structs.replace(snapshot, command=command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
