"""inspect-engine: show what an engine file holds, extract its graph, or compare it with another."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from castiron.runtime.command_line import OneLineParser, engine_path, run_command, with_flags
from castiron.runtime.diff_engines import Difference, diff_engines
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_summary import kernel_choices, summarize, tactic_choices
from castiron.runtime.errors import EXIT_FAILED, CastironError, WorkFailedError
from castiron.runtime.output_file import check_output_file, output_file
from castiron.runtime.printable import one_line
from castiron.runtime.summary_text import difference_lines, summary_lines, tactic_key_lines, tactic_lines

GRAPH_MEMBER = "graph.onnx"


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done (--diff: equal), 1 --diff found some, 2 usage or not an engine, 3 other version."""
    return run_command(_parser(), argv, _inspect)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="inspect-engine", description=__doc__, allow_abbrev=False)
    parser.add_argument("engine", type=engine_path, metavar="ENGINE", help="engine file made by build-engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object with everything")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--graph", type=output_file, metavar="OUT.onnx", help="write the ONNX graph to this file"
    )
    what.add_argument(
        "--diff",
        type=engine_path,
        metavar="OTHER",
        help="show what differs from this engine; exit 1 if anything does",
    )
    what.add_argument(
        "--tactics", action="store_true", help="show the kernels chosen and what else was possible"
    )
    return parser


def _inspect(args: argparse.Namespace) -> int:
    try:
        return _show(args)
    except CastironError as error:
        if args.json:  # beside the line on stderr
            _print({"error": one_line(with_flags(str(error)))})
        raise


def _show(args: argparse.Namespace) -> int:
    with EngineFile.open(args.engine) as engine_file:
        if args.graph is not None:
            return _write_graph(engine_file, args.graph, args.json)
        if args.diff is not None:
            with EngineFile.open(args.diff) as other:
                return _show_differences(diff_engines(engine_file, other), args.json)
        summary = summarize(engine_file)
        if args.tactics:
            tactics = kernel_choices(summary)
            keys = tactic_choices(summary)
            as_json = {"kernels": tactics, **({"tactics": keys} if keys else {})}
            _print(as_json if args.json else tactic_key_lines(keys) + tactic_lines(tactics))
        else:
            _print(summary if args.json else summary_lines(summary))
    return 0


def _show_differences(differences: list[Difference], as_json: bool) -> int:
    if as_json:
        _print({"equal": not differences, "differences": msgspec.to_builtins(differences)})
    else:
        _print(difference_lines(differences))
    return EXIT_FAILED if differences else 0


def _write_graph(engine_file: EngineFile, out: Path, as_json: bool) -> int:
    """Extract the graph, whole or not at all."""
    data = engine_file.member(GRAPH_MEMBER)
    check_output_file(out, ".onnx", engine_file.path)
    temporary = out.with_name(f".{out.name}.partial")
    try:
        temporary.write_bytes(data)
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WorkFailedError(f"cannot write {out} ({len(data)} bytes): {error.strerror}") from error
    _print({"graph": str(out), "bytes": len(data)} if as_json else [f"{out}: {len(data)} bytes"])
    return 0


def _print(result: dict[str, Any] | list[str]) -> None:
    if isinstance(result, dict):
        print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
    else:
        print("\n".join(result))


if __name__ == "__main__":
    sys.exit(main())
