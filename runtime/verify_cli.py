"""verify-engine: check an engine's hashes, then its golden values on this machine."""

import argparse
import sys

import msgspec

from castiron.runtime.command_line import OneLineParser, engine_path, positive_int, run_command, with_flags
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EXIT_FAILED, CastironError
from castiron.runtime.printable import one_line
from castiron.runtime.verify import Check, verify_engine


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 all checks passed, 1 one failed, 2 not an engine, 3 it can't run here."""
    return run_command(_parser(), argv, _verify)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="verify-engine", description=__doc__, allow_abbrev=False)
    parser.add_argument("engine", type=engine_path, metavar="ENGINE", help="engine file made by build-engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="compute threads (default: all cores)"
    )
    return parser


def _verify(args: argparse.Namespace) -> int:
    checks: list[Check] = []

    def report(check: Check) -> None:
        checks.append(check)
        if not args.json:
            mark = "ok" if check.passed else "skip" if check.skipped else "FAIL"
            print(f"{mark:4}  {check.name}: {check.detail}", flush=True)

    error: CastironError | None = None
    try:
        with EngineFile.open(args.engine) as engine_file:
            verify_engine(engine_file, args.threads, report)
    except CastironError as raised:
        error = raised
    num_passed = sum(check.passed for check in checks)
    has_passed = error is None and num_passed == len(checks)
    if args.json:
        result = {"engine": one_line(args.engine), "passed": has_passed, "checks": checks}
        if error is not None:
            result["error"] = one_line(with_flags(str(error)))
        print(msgspec.json.encode(result).decode())
    if error is not None:
        raise error  # its line goes to stderr
    if not args.json:
        failed = [check.name for check in checks if not check.passed and not check.skipped]
        skipped = [check.name for check in checks if check.skipped]
        summary = f"{args.engine}: {num_passed} of {len(checks)} checks passed"
        print(
            summary
            + (f", failed: {', '.join(failed)}" if failed else "")
            + (f", skipped: {', '.join(skipped)}" if skipped else "")
        )
    return 0 if has_passed else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
