"""The CPU kernel library: its feature levels, the hash that names it, and where it is found.

One shared library per level holds every kernel, generic in shape. It is named by the level and the hash of
all that went into it, `<level>-<hash16>.so`, and lives in plugins_cpu/lib/ (shipped in a wheel) or in the
cache folder (built by castiron.plugins_cpu.compile). Only the standard library is imported here.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path

from castiron.runtime.errors import EngineTargetError, InputError

# Weakest first: a processor of one level runs all libraries of the levels before it.
LEVELS = ("generic", "x86-64-v3", "avx512-vnni", "amx")

_AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512")
# Compiler flags of a level, beyond those all levels share. Part of the library's hash.
LEVEL_FLAGS: dict[str, tuple[str, ...]] = {
    "generic": (),
    "x86-64-v3": ("-march=x86-64-v3",),
    "avx512-vnni": _AVX512_FLAGS,
    "amx": (*_AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}

# Names in /proc/cpuinfo that a level needs beyond the level before it.
_LEVEL_CPU_FLAGS: dict[str, tuple[str, ...]] = {
    "generic": (),
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    "avx512-vnni": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"),
    "amx": ("avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
}

_SOURCE_PATTERNS = ("*.cpp", "*.h", "kernels/*.cpp", "kernels/*.h")
_ABI_FILE = "abi.h"  # what an engine's baked parameters and packed weights depend on
_COMMENT = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)

_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP = 0x1021
_XFEATURE_XTILEDATA = 18


def check_level(level: str) -> None:
    """Raise InputError unless `level` is one of LEVELS."""
    if level not in LEVELS:
        raise InputError(f"unknown CPU level {level!r}: expected one of {', '.join(LEVELS)}")


def best_level() -> str:
    """The strongest of LEVELS this processor and operating system can run."""
    return next(level for level in reversed(LEVELS) if supports(level))


def supports(level: str) -> bool:
    """Whether this machine can run kernels of `level`. Raises InputError for an unknown level."""
    check_level(level)
    if level == "generic":
        return True
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    flags = _cpu_flags()
    needed = LEVELS[: LEVELS.index(level) + 1]
    if not all(flag in flags for name in needed for flag in _LEVEL_CPU_FLAGS[name]):
        return False
    return level != "amx" or _system_saves_tiles()


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """Feature names of the first processor in /proc/cpuinfo; empty where there is no such file."""
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _system_saves_tiles() -> bool:
    """Whether the kernel can keep AMX tile registers across context switches (Linux >= 5.16)."""
    if sys.platform != "linux":
        return False
    features = ctypes.c_uint64(0)
    libc = ctypes.CDLL(None)
    status = libc.syscall(
        ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_ARCH_GET_XCOMP_SUPP), ctypes.byref(features)
    )
    return status == 0 and bool(features.value >> _XFEATURE_XTILEDATA & 1)


def sources_folder() -> Path:
    """Folder of the plugins_cpu package, found without importing it."""
    spec = importlib.util.find_spec("castiron.plugins_cpu")
    if spec is None or not spec.submodule_search_locations:
        raise EngineTargetError("package castiron.plugins_cpu is not installed: reinstall castiron")
    return Path(next(iter(spec.submodule_search_locations)))


def read_sources() -> dict[str, bytes]:
    """Every C++ source and header of the library, by its path relative to sources_folder(), sorted."""
    folder = sources_folder()
    paths = {path.relative_to(folder).as_posix(): path for p in _SOURCE_PATTERNS for path in folder.glob(p)}
    return {name: paths[name].read_bytes() for name in sorted(paths)}


def abi_hash() -> str:
    """sha256 (hex) of what ties an engine to the kernels: parameter structs and the name of the weight layout.

    Comments and spacing of abi.h don't count, so engines survive releases that change neither.
    """
    try:
        return hash_abi((sources_folder() / _ABI_FILE).read_bytes())
    except FileNotFoundError as error:
        raise EngineTargetError(
            f"castiron is not installed completely: {error.filename} is missing, reinstall it"
        ) from error


def hash_abi(header: bytes) -> str:
    """`abi_hash` of an abi.h already read."""
    return _hash_parts(_COMMENT.sub(b" ", header).split())


def source_hash(level: str) -> str:
    """sha256 (hex) naming the library of `level`: its sources, compiler flags and the ABI."""
    return hash_sources(level, read_sources())


def hash_sources(level: str, sources: dict[str, bytes]) -> str:
    """`source_hash` of sources already read."""
    check_level(level)
    parts = [level.encode(), " ".join(LEVEL_FLAGS[level]).encode(), abi_hash().encode()]
    for name, data in sorted(sources.items()):
        parts += [name.encode(), data]
    return _hash_parts(parts)


def _hash_parts(parts: list[bytes]) -> str:
    """sha256 over the parts, each preceded by its length so that no two lists collide."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def cache_folder() -> Path:
    """$CASTIRON_CACHE_DIR, else ~/.cache/castiron. Not created here."""
    configured = os.environ.get("CASTIRON_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "castiron"


def library_name(level: str, library_hash: str) -> str:
    """File name of the library with this source hash."""
    return f"{level}-{library_hash[:16]}.so"


def library_folders() -> tuple[Path, Path]:
    """Where a library is looked for: shipped in the wheel, then built into the cache."""
    return sources_folder() / "lib", cache_folder() / "kernels"


def find_library(level: str) -> Path:
    """Path of the kernel library of `level` matching the installed sources.

    Raises InputError for an unknown level, EngineTargetError if this machine can't run it or it isn't built.
    """
    if not supports(level):
        raise EngineTargetError(
            f"this machine can't run CPU level {level}, its best is {best_level()}: "
            f"rebuild the engine with --target cpu:{best_level()}"
        )
    name = library_name(level, source_hash(level))
    for folder in library_folders():
        if (folder / name).is_file():
            return folder / name
    raise EngineTargetError(
        f"the CPU kernel library {name} is not built: run `python -m castiron.plugins_cpu.compile {level}`"
    )
