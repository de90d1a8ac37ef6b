"""Compiles CUDA kernels to cubins, on any machine: no GPU is needed. Objects are cached by content.

A kernel is one .cu file compiled alone for one architecture and one set of defines. The cache key covers the
file, the headers, the defines, the flags and the compiler's version, so what the cache holds is never stale.
"""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from castiron.runtime.devices import kernel_library
from castiron.runtime.errors import WorkFailedError

FOLDER = Path(__file__).parent
# name of a target -> what nvcc builds for it: sm_90 has warpgroup instructions and TMA only as sm_90a
ARCHITECTURES = {
    "sm_80": "sm_80",
    "sm_89": "sm_89",
    "sm_90": "sm_90a",
    "sm_100a": "sm_100a",
    "sm_120a": "sm_120a",
    "sm_121a": "sm_121a",
}
FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-cubin")
_MESSAGE_LINES = 3  # of a compiler's error that are shown


def compile_cubin(source: str, defines: tuple[tuple[str, str], ...], target: str) -> bytes:
    """The cubin of kernels/`source` for `target` (a key of ARCHITECTURES) with these preprocessor defines.

    Raises WorkFailedError if there is no nvcc or it fails.
    """
    nvcc = find_nvcc()
    arguments = [f"-arch={ARCHITECTURES[target]}", *FLAGS, *(f"-D{name}={value}" for name, value in defines)]
    files = _sources()
    digest = hashlib.sha256("\0".join([source, nvcc_version(nvcc), *arguments]).encode())
    for name, data in files.items():
        if name == f"kernels/{source}" or name.endswith(".cuh"):
            digest.update(f"\0{name}\0{len(data)}\0".encode() + data)
    cached = kernel_library.cache_folder() / "cubins" / f"{digest.hexdigest()[:32]}.cubin"
    if cached.is_file():
        return cached.read_bytes()
    with tempfile.TemporaryDirectory(prefix="castiron-cubin-") as folder:
        output = Path(folder) / "kernel.cubin"
        command = [nvcc, *arguments, "-I", str(FOLDER), "-o", str(output), str(FOLDER / "kernels" / source)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            raise WorkFailedError(
                f"nvcc failed on {source} for {target}: {_first_lines(done.stderr + done.stdout)}"
            )
        data = output.read_bytes()
        _publish(output, cached)
    return data


@functools.cache
def find_nvcc() -> str:
    """Path of nvcc: on PATH, in CUDA_HOME, or in the nvidia-cuda-nvcc package. Raises WorkFailedError."""
    home = os.environ.get("CUDA_HOME")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    found = shutil.which("nvcc")
    if found:
        candidates.append(Path(found))
    package = importlib.util.find_spec("nvidia")
    for place in (package.submodule_search_locations or ()) if package is not None else ():
        candidates += sorted(Path(place).glob("*/bin/nvcc"))
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    raise WorkFailedError(
        "no nvcc found: install castiron[cuda-build], or put CUDA 13's nvcc on PATH, or set CUDA_HOME"
    )


@functools.cache
def nvcc_version(nvcc: str) -> str:
    """What nvcc says of its version. Raises WorkFailedError if it can't be started."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise WorkFailedError(f"can't run {nvcc}: {error}") from error
    return done.stdout


def _sources() -> dict[str, bytes]:
    """Every source file of the folder by its name in it."""
    paths = sorted((*FOLDER.rglob("*.cu"), *FOLDER.rglob("*.cuh")))
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}


def _publish(built: Path, target: Path) -> None:
    """Move a finished file into the cache; never seen half written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(built.read_bytes())
    Path(temporary).replace(target)


def _first_lines(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line] or lines
    return " | ".join(errors[:_MESSAGE_LINES]) or "no message"
