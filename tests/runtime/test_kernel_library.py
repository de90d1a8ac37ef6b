"""Levels, hashes and lookup of the CPU kernel library; nothing is compiled here."""

import subprocess
import sys
from pathlib import Path

import pytest

from castiron.runtime.devices import kernel_library
from castiron.runtime.errors import EngineTargetError, InputError

V3_FLAGS = "fpu sse2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
AVX512_FLAGS = V3_FLAGS + " avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
AMX_FLAGS = AVX512_FLAGS + " avx512_bf16 amx_tile amx_int8 amx_bf16"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch):
    """Makes this machine look like an x86-64 one with the given /proc/cpuinfo flags."""

    def pretend(flags: str, machine: str = "x86_64", saves_tiles: bool = True) -> None:
        monkeypatch.setattr(kernel_library, "_cpu_flags", lambda: frozenset(flags.split()))
        monkeypatch.setattr(kernel_library, "_system_saves_tiles", lambda: saves_tiles)
        monkeypatch.setattr(kernel_library.platform, "machine", lambda: machine)

    return pretend


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "generic"),
        ("fpu sse2 avx", "generic"),
        (V3_FLAGS, "x86-64-v3"),
        (V3_FLAGS.replace(" fma", ""), "generic"),
        (V3_FLAGS + " avx512f avx512_vnni", "x86-64-v3"),
        (AVX512_FLAGS, "avx512-vnni"),
        (AMX_FLAGS, "amx"),
        (AMX_FLAGS.replace(" avx2", ""), "generic"),
    ],
)
def test_best_level_needs_every_feature_of_all_levels_below(processor, flags: str, expected: str) -> None:
    processor(flags)
    assert kernel_library.best_level() == expected


def test_amx_needs_a_system_that_saves_tiles(processor) -> None:
    processor(AMX_FLAGS, saves_tiles=False)
    assert kernel_library.best_level() == "avx512-vnni"


def test_other_processors_run_generic_only(processor) -> None:
    processor(AMX_FLAGS, machine="aarch64")
    assert kernel_library.best_level() == "generic"
    assert not kernel_library.supports("x86-64-v3")


@pytest.mark.parametrize("level", ["armv8.2", "avx2", ""])
def test_an_unknown_level_is_an_input_error_naming_the_known_ones(level: str) -> None:
    for function in (kernel_library.supports, kernel_library.source_hash, kernel_library.find_library):
        with pytest.raises(InputError, match="expected one of generic, x86-64-v3, avx512-vnni, amx"):
            function(level)


def test_a_level_this_machine_lacks_is_a_target_error(processor) -> None:
    processor(V3_FLAGS)
    with pytest.raises(EngineTargetError, match="can't run CPU level amx, its best is x86-64-v3: rebuild"):
        kernel_library.find_library("amx")


def test_hashes_differ_by_level_and_change_with_any_source() -> None:
    sources = kernel_library.read_sources()
    assert "library.cpp" in sources and "kernels/norm.cpp" in sources and "abi.h" in sources
    hashes = {kernel_library.hash_sources(level, sources) for level in kernel_library.LEVELS}
    assert len(hashes) == len(kernel_library.LEVELS)
    for name in sources:
        changed = {**sources, name: sources[name] + b" "}
        assert kernel_library.hash_sources("generic", changed) not in hashes
    moved = {**{k: v for k, v in sources.items() if k != "pool.h"}, "pool2.h": sources["pool.h"]}
    assert kernel_library.hash_sources("generic", moved) not in hashes


def test_the_abi_hash_ignores_comments_and_spacing_and_sees_every_token() -> None:
    header = (kernel_library.sources_folder() / "abi.h").read_bytes()
    assert kernel_library.hash_abi(header) == kernel_library.abi_hash()
    assert kernel_library.hash_abi(header.replace(b"\n", b"  // a remark\n")) == kernel_library.abi_hash()
    for old, new in ((b"int32_t count", b"int64_t count"), (b'"n16"', b'"n17"'), (b"float eps;", b"")):
        assert old in header
        assert kernel_library.hash_abi(header.replace(old, new, 1)) != kernel_library.abi_hash()


def test_hashing_is_deterministic_and_hex() -> None:
    assert kernel_library.source_hash("generic") == kernel_library.source_hash("generic")
    for digest in (kernel_library.source_hash("generic"), kernel_library.abi_hash()):
        assert len(digest) == 64 and int(digest, 16) >= 0


def test_the_cache_folder_is_the_configured_one_or_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASTIRON_CACHE_DIR", "/some/where")
    assert kernel_library.cache_folder() == Path("/some/where")
    monkeypatch.delenv("CASTIRON_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/of/someone")
    assert kernel_library.cache_folder() == Path("/home/of/someone/.cache/castiron")


def test_a_missing_library_names_the_command_that_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_library, "library_folders", lambda: (tmp_path / "lib", tmp_path / "kernels"))
    with pytest.raises(EngineTargetError, match=r"run `python -m castiron\.plugins_cpu\.compile generic`"):
        kernel_library.find_library("generic")


def test_a_shipped_library_comes_before_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = (tmp_path / "lib", tmp_path / "kernels")
    monkeypatch.setattr(kernel_library, "library_folders", lambda: folders)
    name = kernel_library.library_name("generic", kernel_library.source_hash("generic"))
    for folder in reversed(folders):
        folder.mkdir()
        (folder / "generic-0000000000000000.so").touch()  # of other sources: never taken
        (folder / name).touch()
        assert kernel_library.find_library("generic") == folder / name


def test_only_the_standard_library_is_imported_and_lookup_takes_milliseconds() -> None:
    """In a fresh interpreter; the bound is loose because test machines are busy (about 3 ms when idle)."""
    code = """
import sys, time
from castiron.runtime.devices import kernel_library
start = time.perf_counter()
kernel_library.best_level(), kernel_library.source_hash("generic"), kernel_library.abi_hash()
seconds = time.perf_counter() - start
assert not {"numpy", "msgspec", "castiron.plugins_cpu"} & set(sys.modules), sorted(sys.modules)
assert seconds < 0.1, seconds
"""
    subprocess.run([sys.executable, "-c", code], check=True)
