"""verify-engine: check an engine's hashes, then its golden values on this machine."""

import argparse
import sys

import msgspec

from castiron.runtime.command_line import OneLineParser, run_command
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EXIT_FAILED
from castiron.runtime.verify import Check, verify_engine


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 all checks passed, 1 one failed, 2 not an engine, 3 it can't run here."""
    return run_command(_parser(), argv, _verify)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="verify-engine", description=__doc__, allow_abbrev=False)
    parser.add_argument("engine", metavar="ENGINE", help="engine file made by build-engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: all cores)")
    return parser


def _verify(args: argparse.Namespace) -> int:
    def report(check: Check) -> None:
        if not args.json:
            print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.detail}", flush=True)

    with EngineFile.open(args.engine) as engine_file:
        checks = verify_engine(engine_file, args.threads, report)
        failed = [check.name for check in checks if not check.passed]
        summary = f"{engine_file.path}: {len(checks) - len(failed)} of {len(checks)} checks passed"
        if args.json:
            result = {"engine": str(engine_file.path), "passed": not failed, "checks": checks}
            print(msgspec.json.encode(result).decode())
        else:
            print(f"{summary}, failed: {', '.join(failed)}" if failed else summary)
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
