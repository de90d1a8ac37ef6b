"""build-engine: the command line. Only parses; builder/build.py works."""

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

from castiron.builder.collection_paused import collection_paused
from castiron.builder.options import (
    COMPUTE_MODES,
    FUTURE_QUANTIZE_MODES,
    QUANTIZE_MODES,
    WEIGHTS_MODES,
    BuildOptions,
)
from castiron.builder.recipe import read_recipe
from castiron.runtime.command_line import OneLineParser, number, positive_int, run_command
from castiron.runtime.errors import InputError
from castiron.runtime.output_file import output_file


def main(argv: list[str] | None = None) -> int:
    """Run build-engine with these arguments (default: the process's); returns the exit code."""
    return run_command(_parser(), argv, _build)


def _build(args: argparse.Namespace) -> int:
    options = _options(args)
    with collection_paused():
        from castiron.builder.build import build_engine  # heavy: torch, onnx_ir
    gc.freeze()  # what was imported stays: no search for cycles need look at it again
    build_engine(options)
    return 0


def parse_options(argv: list[str] | None) -> BuildOptions:
    """Options from the command line over those of --recipe. Raises InputError."""
    return _options(_parser().parse_args(argv))


def _options(args: argparse.Namespace) -> BuildOptions:
    given: dict[str, Any] = vars(args)
    recipe = given.pop("recipe", None)
    values = {**(read_recipe(recipe) if recipe is not None else {}), **given}
    if "model" not in values:
        raise InputError("no model: give a Hugging Face folder, a .gguf file, a hub id or an alias")
    return BuildOptions(**values)


def _parser() -> argparse.ArgumentParser:
    """Options without defaults of their own: those are BuildOptions' fields."""
    parser = OneLineParser(
        prog="build-engine",
        description="Compile a language model ahead of time into one engine file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face folder, .gguf file, hub id, or alias (public sizes)",
    )
    add("-o", "--output", type=output_file, metavar="OUT.engine", help="the engine file to write")
    add(
        "--target",
        metavar="TARGET",
        help="cpu (this machine's best level, the default), cpu:LEVEL, sm_90, or one of sm_80, sm_89, sm_100a, "
        "sm_120a, sm_121a, whose engines are compiled, not run",
    )
    modes = [*QUANTIZE_MODES, *FUTURE_QUANTIZE_MODES]
    add(
        "--quantize",
        metavar="|".join(modes),
        help="keep (default): as stored in the checkpoint; none: dense; int4: linears rounded to 4 bits; "
        "fp8: linears and their inputs rounded to float8 (both: CUDA targets)",
    )
    add(
        "--compute",
        metavar="|".join(COMPUTE_MODES),
        help="auto (default): f32 for f32 checkpoints, int8 for kept quantized weights, else bf16",
    )
    add("--max-seqs", type=positive_int, metavar="N", help="sequences running at once")
    add("--max-seq-len", type=positive_int, metavar="N", help="tokens a sequence may reach, prompt included")
    add("--max-batched-tokens", type=positive_int, metavar="N", help="tokens of one step")
    add(
        "--weights",
        metavar="|".join(WEIGHTS_MODES),
        help="file (default): the checkpoint's; random: made up and written; dummy: made up at load",
    )
    add(
        "--tune",
        action="store_true",
        help="write a tuning engine: made-up weights, all kernels for bench-engine tune to time (CUDA targets)",
    )
    add(
        "--tactics",
        metavar="FILE|none",
        help="choose kernels by these measured times, or by estimates (default: the times that ship with castiron)",
    )
    add(
        "--batch-invariant",
        action="store_true",
        help="the same bits for a request alone, in a batch, in chunks, from the cache: slower (always so on the CPU)",
    )
    add("--recipe", type=Path, metavar="FILE", help="these options as JSON or TOML; flags given here win")
    add(
        "--dry-run",
        action="store_true",
        help="print memory, buckets and kernels; write nothing but what --dump-passes asks for",
    )
    add("--dump-passes", type=Path, metavar="DIR", help="write the graph after every pass as .onnx")
    add(
        "--max-build-seconds",
        type=number,
        metavar="S",
        help="give up between phases once S seconds have passed",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
