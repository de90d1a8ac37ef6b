"""The demo behind `make demo`: fetch a small real model, build its engine for this CPU, let it answer.

Run again, it finds the model and the engine and needs neither network nor compiler.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from castiron.perf import demo_model
from castiron.runtime.devices import kernel_library
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import CastironError

PROMPT = "What is the capital of France? Answer in one sentence."


def is_current(engine: Path) -> bool:
    """Whether `engine` exists and runs with this machine's CPU and this version's kernels."""
    if not engine.exists():
        return False
    try:
        manifest = EngineFile.open(engine).manifest
        kernel_library.find_library(manifest.target.level)
    except CastironError as error:
        print(f"{engine} is built anew: {error}", file=sys.stderr)
        return False
    return (
        manifest.target.level == kernel_library.best_level()
        and manifest.target.kernel_abi_hash == kernel_library.abi_hash()
        and demo_model.SHA256 in manifest.provenance.source_files.values()
    )


def run_command(module: str, *arguments: str) -> int:
    """Run one of castiron's commands in a process of its own, as a user would; its exit code."""
    return subprocess.run([sys.executable, "-m", module, *arguments]).returncode


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code of the first command that failed, else 0."""
    parser = argparse.ArgumentParser(description="a real model answers on this machine")
    parser.add_argument("--folder", type=Path, default=Path("build"))
    parser.add_argument("--prompt", default=PROMPT)
    arguments = parser.parse_args(argv)
    engine = arguments.folder / "smollm2-135m.engine"
    try:
        if not is_current(engine):
            model = demo_model.fetch(arguments.folder / "models")
            code = run_command("castiron.builder.cli", str(model), "-o", str(engine))
            if code != 0:
                return code
    except CastironError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    print(f"> {arguments.prompt}")
    return run_command("castiron.server.cli", str(engine), "--prompt", arguments.prompt, "--max-tokens", "64")


if __name__ == "__main__":
    sys.exit(main())
