"""Builds the CPU kernel library of a level with the C++ compiler of this machine.

    python -m castiron.plugins_cpu.compile LEVEL|--all [--out DIR]

The sources are read once, hashed and compiled from that snapshot, so the file's name always tells what is
in it. Object files are kept in the cache by the hash of what they depend on: after an edit only the changed
files are compiled. Concurrent builds need no lock: each writes temporary files and renames them into place.
"""

import argparse
import concurrent.futures
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from castiron.runtime.devices import kernel_library
from castiron.runtime.errors import CastironError, WorkFailedError

COMPILERS = ("g++", "clang++", "c++")  # tried in this order when CXX is not set
# No -ffast-math and no contraction: a result must not depend on how the compiler groups operations.
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",  # GCC 12 warns about its own AVX-512 headers
    "-Wno-maybe-uninitialized",
)
LINK_FLAGS = ("-shared", "-pthread")
# Left out where the linker or the static libraries lack them: the library then runs less widely.
PORTABLE_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
_MESSAGE_LINES = 3  # of a compiler's error that are shown


def build_library(
    level: str, jobs: int | None = None, verbose: bool = False, out: Path | None = None
) -> Path:
    """Path of the kernel library of `level`, built unless it is there already.

    `jobs` is how many compilers run at once (default: the processors this process may use); `out` is the
    folder to build into, by default the cache. Raises InputError for an unknown level, WorkFailedError if
    there is no compiler, it fails, or it doesn't know the level.
    """
    sources = kernel_library.read_sources()
    library_hash = kernel_library.hash_sources(level, sources)
    name = kernel_library.library_name(level, library_hash)
    folders = kernel_library.library_folders() if out is None else (out,)
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    if level != "generic" and platform.machine().lower() not in ("x86_64", "amd64"):
        raise WorkFailedError(
            f"CPU level {level} needs an x86-64 compiler, this machine is {platform.machine()}: "
            "build level generic"
        )
    start = time.perf_counter()
    build = _Build(level, library_hash, sources, find_compiler())
    try:
        folders[-1].mkdir(parents=True, exist_ok=True)
        build.compile_and_link(folders[-1] / name, jobs or _num_processors())
    except OSError as error:
        raise WorkFailedError(
            f"can't write the kernel library {folders[-1] / name}: {error.strerror}"
        ) from error
    if verbose:
        print(f"built {folders[-1] / name} in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return folders[-1] / name


def find_compiler() -> list[str]:
    """The C++ compiler's command line: $CXX, else the first of COMPILERS on PATH. Raises WorkFailedError."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for command in [configured] if configured else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    if configured:
        raise WorkFailedError(f"the compiler CXX={configured[0]} was not found: correct CXX, or unset it")
    raise WorkFailedError(
        f"no C++ compiler found (looked for {', '.join(COMPILERS)} on PATH): install one, "
        "for example with `apt-get install g++`, or name one in CXX"
    )


def _num_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Build:
    """One build: a snapshot of the sources, the compiler, and the object cache."""

    def __init__(self, level: str, library_hash: str, sources: dict[str, bytes], compiler: list[str]) -> None:
        self.level = level
        self.library_hash = library_hash
        self.sources = sources
        self.compiler = compiler
        self.flags = [*COMPILE_FLAGS, *kernel_library.LEVEL_FLAGS[level]]
        self.objects_folder = kernel_library.cache_folder() / "kernels" / "objects"

    def compile_and_link(self, target: Path, jobs: int) -> None:
        """Write the library to `target` through a temporary file."""
        self.objects_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="castiron-kernels-") as work_folder:
            work = Path(work_folder)
            for name, data in self.sources.items():
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                (work / name).write_bytes(data)
            # largest first: the last compiler to start should have little to do
            units = sorted(
                (n for n in self.sources if n.endswith(".cpp")), key=lambda n: -len(self.sources[n])
            )
            version = self._run([*self.compiler, "--version"], work).stdout
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                futures = [pool.submit(self._compile, unit, version, work) for unit in units]
                try:
                    objects = [future.result() for future in futures]
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            self._link(objects, target, work)

    def _compile(self, unit: str, version: str, work: Path) -> Path:
        """The object file of one source, from the cache if nothing it may depend on has changed."""
        flags = [*self.flags]
        if unit == "library.cpp":  # the only one that knows its names
            flags += [f'-DCASTIRON_LEVEL="{self.level}"', f'-DCASTIRON_SOURCE_HASH="{self.library_hash}"']
        digest = hashlib.sha256("\0".join([unit, version, *self.compiler, *flags]).encode())
        for name, data in self.sources.items():
            if name == unit or name.endswith(".h"):
                digest.update(f"\0{name}\0{len(data)}\0".encode() + data)
        cached = self.objects_folder / f"{digest.hexdigest()[:32]}.o"
        if not cached.is_file():
            built = work / (unit.replace("/", "-") + ".o")
            result = self._run([*self.compiler, *flags, "-c", unit, "-o", str(built)], work)
            if result.returncode != 0:
                self._raise_compile_error(unit, result.stderr, work)
            _publish(built, cached)
        return cached

    def _link(self, objects: list[Path], target: Path, work: Path) -> None:
        built = work / target.name
        command = [*self.compiler, *LINK_FLAGS, *map(str, objects), "-o", str(built)]
        result = self._run([*command, *PORTABLE_LINK_FLAGS], work)
        if result.returncode != 0:
            result = self._run(command, work)
        if result.returncode != 0:
            raise WorkFailedError(f"linking {target.name} failed: {_first_lines(result.stderr, only='')}")
        _publish(built, target)

    def _raise_compile_error(self, unit: str, message: str, work: Path) -> None:
        """Tell a compiler that doesn't know the level's flags from one that rejects the source."""
        (work / "empty.cpp").write_text("int main() { return 0; }\n")
        probe = self._run([*self.compiler, *self.flags, "-fsyntax-only", "empty.cpp"], work)
        if probe.returncode != 0:
            raise WorkFailedError(
                f"the compiler {self.compiler[0]} can't build CPU level {self.level} "
                f"({_first_lines(probe.stderr)}): use GCC 12 or Clang 16 or newer, or build level generic"
            )
        raise WorkFailedError(f"compiling {unit} for CPU level {self.level} failed: {_first_lines(message)}")

    def _run(self, command: list[str], work: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            return subprocess.run(
                command,
                cwd=work,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise WorkFailedError(f"can't start the compiler {command[0]}: {error.strerror}") from error


def _publish(built: Path, target: Path) -> None:
    """Move a finished file into place: copied beside it, synced, renamed, never seen half written."""
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file, built.open("rb") as source:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o755)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _first_lines(message: str, only: str = "error") -> str:
    """The first lines of a compiler's output that contain `only`, on one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if only in line] or lines
    return " | ".join(errors[:_MESSAGE_LINES]) or "no message"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m castiron.plugins_cpu.compile", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "level", nargs="?", metavar="LEVEL", help=f"one of {', '.join(kernel_library.LEVELS)}"
    )
    parser.add_argument("--all", action="store_true", help="build every level")
    parser.add_argument("--out", type=Path, help="folder to build into (default: the cache folder)")
    options = parser.parse_args(arguments)
    if options.all == (options.level is not None):
        parser.error("name one LEVEL, or --all")
    try:
        for level in kernel_library.LEVELS if options.all else (options.level,):
            print(build_library(level, verbose=True, out=options.out))
    except CastironError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
