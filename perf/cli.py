"""bench-engine: how fast an engine decodes and prefills (offline) and starts (startup); times kernels (tune)."""

import argparse
import sys
from typing import TYPE_CHECKING

from castiron.runtime.command_line import (
    OneLineParser,
    add_engine_options,
    engine_path,
    positive_int,
    positive_int_list,
    run_command,
    unicode_text,
    whole_number,
)
from castiron.runtime.errors import EXIT_USAGE, InputError
from castiron.runtime.output_file import check_output_file, output_file

if TYPE_CHECKING:  # imported by the command that needs them
    from castiron.perf.launch_timer import CudaTimer
    from castiron.runtime.engine_file import EngineFile
    from castiron.runtime.tuning_format import TuningInfo

_DEFAULT_BATCHES = (1, 8, 16)
_LATER = ("serving", "check")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="bench-engine", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)

    offline = commands.add_parser(
        "offline", help="decode and prefill speed, whole batches", allow_abbrev=False
    )
    offline.add_argument("engine", type=engine_path, metavar="ENGINE")
    offline.add_argument(
        "--batch",
        type=positive_int_list,
        metavar="N,…",
        help="default 1,8,16, as far as the engine runs so many",
    )
    offline.add_argument(
        "--prompt-len", type=positive_int, default=128, metavar="N", help="tokens (default 128)"
    )
    offline.add_argument(
        "--output-len", type=positive_int, default=64, metavar="N", help="tokens (default 64)"
    )
    offline.add_argument("--seed", type=whole_number, default=0, help="of the random prompts (default 0)")

    startup = commands.add_parser(
        "startup", help="process start to first token, peak memory", allow_abbrev=False
    )
    startup.add_argument("engine", type=engine_path, metavar="ENGINE")
    prompt = startup.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt-len", type=positive_int, default=16, metavar="N", help="start from N token ids (default 16)"
    )
    prompt.add_argument(
        "--prompt",
        type=unicode_text,
        metavar="TEXT",
        help="start from text, in the chat template if there is one",
    )

    for command in (offline, startup):
        command.add_argument("--repeats", type=positive_int, default=5, metavar="N", help="default 5")
        command.add_argument(
            "--json", type=output_file, metavar="FILE", help="write a snapshot of the measurement"
        )
        add_engine_options(command)

    tune = commands.add_parser(
        "tune", help="time the candidate kernels of a tuning engine on this GPU", allow_abbrev=False
    )
    tune.add_argument(
        "engine", type=engine_path, metavar="ENGINE", help="made by build-engine with its flag for tuning"
    )
    tune.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="write the times, for a build's --tactics; what the file has stays, but for equal keys",
    )
    return parser


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    if args.json is not None:  # told now rather than after minutes of measuring
        check_output_file(args.json, ".json", args.engine)
    if args.command != "tune":
        _check_serves(args.engine)
    run = {"offline": _run_offline, "startup": _run_startup, "tune": _run_tune}[args.command]
    return run(args, argv)


def _check_serves(path: str) -> None:
    from castiron.runtime.engine_file import EngineFile
    from castiron.runtime.engine_purpose import check_serves

    with EngineFile.open(path) as engine:
        check_serves(engine)


def _run_offline(args: argparse.Namespace, argv: list[str]) -> int:
    from castiron.perf.offline import OfflineCase, measure_offline, offline_table
    from castiron.runtime.llm_engine import LLMEngine
    from castiron.server.engine_arguments import engine_options

    if args.seed < 0:
        raise InputError(f"--seed is {args.seed}, expected 0 or more")
    with LLMEngine.load(args.engine, engine_options(args)) as engine:
        batches = args.batch or tuple(b for b in _DEFAULT_BATCHES if b <= engine.info.max_seqs)
        case = OfflineCase(batches, args.prompt_len, args.output_len, args.repeats, args.seed)
        metrics = measure_offline(engine, case)
    print(offline_table(metrics))
    _write(args, argv, metrics)
    return 0


def _run_startup(args: argparse.Namespace, argv: list[str]) -> int:
    from castiron.perf.startup import measure_startup, startup_table
    from castiron.runtime.engine_file import EngineFile
    from castiron.runtime.engine_options import resolve_limits
    from castiron.server.engine_arguments import engine_options

    prompt: str | list[int] = args.prompt
    if args.prompt is None:
        with EngineFile.open(args.engine) as engine:
            vocab_size = engine.manifest.model.vocab_size
            limits = resolve_limits(engine_options(args), engine.manifest.profile)
        if args.prompt_len >= limits.max_seq_len:  # told before anything starts
            raise InputError(
                f"--prompt-len is {args.prompt_len}, a sequence may have {limits.max_seq_len} tokens with at "
                f"least 1 new one: lower --prompt-len to {limits.max_seq_len - 1}"
            )
        prompt = [(7 * index + 5) % vocab_size for index in range(args.prompt_len)]
    flags = []
    for flag, value in (
        ("--kv-memory", args.kv_memory),
        ("--threads", args.threads),
        ("--max-seqs", args.max_seqs),
        ("--max-seq-len", args.max_seq_len),
    ):
        if value is not None:
            flags += [flag, str(value)]
    flags += ["--no-prefix-cache"] if args.no_prefix_cache else []
    metrics = measure_startup(args.engine, args.repeats, prompt, flags)
    print(startup_table(metrics))
    _write(args, argv, metrics)
    return 0


def _run_tune(args: argparse.Namespace, argv: list[str]) -> int:
    from castiron.configs.tuning_results import check_mergeable, merge_results, read_results, write_results
    from castiron.perf.tune import measure
    from castiron.runtime.engine_file import EngineFile
    from castiron.runtime.tuning_format import read_tuning

    with EngineFile.open(args.engine) as engine:
        info = read_tuning(engine)
        old = read_results(args.json) if args.json is not None and args.json.exists() else None
        with open_timer(engine, info) as timer:
            if old is not None:  # told now rather than after minutes of measuring
                check_mergeable(old, info.target, timer.gpu, str(args.json))
            results = measure(info, timer, argv, lambda line: print(line, flush=True))
    if args.json is not None:
        write_results(args.json, merge_results(old, results, str(args.json)))
    return 0


def open_timer(engine: "EngineFile", info: "TuningInfo") -> "CudaTimer":
    """The GPU's timer. Raises EngineTargetError where there is no GPU that can run the engine."""
    from castiron.perf.launch_timer import CudaTimer

    return CudaTimer(engine, info)


def _write(args: argparse.Namespace, argv: list[str], metrics: dict[str, object]) -> None:
    if args.json is None:
        return
    from castiron.perf.snapshot import take_snapshot, write_snapshot
    from castiron.runtime.engine_file import EngineFile

    with EngineFile.open(args.engine) as engine:
        manifest = engine.manifest
    write_snapshot(args.json, take_snapshot(manifest, argv, metrics))


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(
            "bench-engine: no command, expected offline, startup or tune (see bench-engine --help)",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if argv[0] in _LATER:
        print(
            f"bench-engine: {argv[0]} is not there yet in this version, expected offline, startup or tune",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return run_command(_parser(), argv, lambda args: _run(args, argv))


if __name__ == "__main__":
    sys.exit(main())
