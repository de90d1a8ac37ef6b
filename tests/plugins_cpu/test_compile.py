"""Building the kernel library: what is cached, what goes wrong and how it is said. Tiny made-up sources."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from castiron.plugins_cpu import compile as compile_module
from castiron.plugins_cpu.compile import build_library, find_compiler, main
from castiron.runtime.devices import kernel_library
from castiron.runtime.errors import InputError, WorkFailedError

SOURCES = {
    "library.cpp": b"""
        #include "answer.h"
        extern "C" __attribute__((visibility("default"))) const char *ci_level() { return CASTIRON_LEVEL; }
        extern "C" __attribute__((visibility("default"))) int answer() { return part(); }
    """,
    "answer.h": b"int part();\n",
    "kernels/part.cpp": b'#include "../answer.h"\nint part() { return 42; }\n',
}


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
    """The library's sources are these few, the cache is empty and compiler runs can be counted."""
    sources = dict(SOURCES)
    monkeypatch.setattr(kernel_library, "read_sources", lambda: dict(sources))
    monkeypatch.setattr(kernel_library, "library_folders", lambda: (tmp_path / "lib", tmp_path / "kernels"))
    monkeypatch.setattr(kernel_library, "cache_folder", lambda: tmp_path)
    return sources


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sources given to the compiler so far."""
    names: list[str] = []
    original = compile_module._Build._run

    def run(self, command: list[str], work: Path):
        names.extend(part for part in command if part.endswith(".cpp"))
        return original(self, command, work)

    monkeypatch.setattr(compile_module._Build, "_run", run)
    return names


def fake_compiler(folder: Path, script: str) -> Path:
    path = folder / "fake-compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_builds_a_library_named_by_its_content_once(sources, compiled: list[str], tmp_path: Path) -> None:
    path = build_library("generic", jobs=2)
    assert path.name == f"generic-{kernel_library.source_hash('generic')[:16]}.so"
    library = ctypes.CDLL(str(path))
    library.ci_level.restype = ctypes.c_char_p
    assert library.answer() == 42 and library.ci_level() == b"generic"
    assert sorted(compiled) == ["kernels/part.cpp", "library.cpp"]
    assert build_library("generic") == path and len(compiled) == 2
    assert not leftovers(tmp_path)


def test_an_edit_recompiles_what_depends_on_it(sources, compiled: list[str]) -> None:
    first = build_library("generic")
    compiled.clear()
    sources["kernels/part.cpp"] += b"// changed\n"
    second = build_library("generic")
    assert second != first and first.is_file()
    assert sorted(compiled) == ["kernels/part.cpp", "library.cpp"]  # library.cpp holds the hash
    sources["kernels/other.cpp"] = b"\n"
    compiled.clear()
    build_library("generic")
    assert sorted(compiled) == ["kernels/other.cpp", "library.cpp"]
    compiled.clear()
    sources["answer.h"] += b"// changed\n"
    build_library("generic")
    assert len(compiled) == 3


def test_concurrent_builds_agree(sources, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: build_library("generic", jobs=1), range(4)))
    assert len(set(paths)) == 1
    assert ctypes.CDLL(str(paths[0])).answer() == 42
    assert not leftovers(tmp_path)


def test_out_is_where_a_wheel_is_filled(sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "lib"
    assert main(["generic", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(next(out.iterdir()))


def test_no_compiler_says_what_to_install(
    sources, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkFailedError, match=r"no C\+\+ compiler found .* install one.* g\+\+"):
        find_compiler()
    assert main(["generic"]) == 1
    assert capsys.readouterr().err.startswith("error: no C++ compiler found")


def test_cxx_is_used_with_its_arguments_and_must_exist(sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m32")
    with pytest.raises(WorkFailedError, match="CXX=no-such-compiler was not found"):
        build_library("generic")
    monkeypatch.setenv("CXX", f"{find_existing()} -DUNUSED=1")
    assert find_compiler() == [find_existing(), "-DUNUSED=1"]
    assert build_library("generic").is_file()


def find_existing() -> str:
    environment = os.environ.pop("CXX", None)
    try:
        return find_compiler()[0]
    finally:
        if environment is not None:
            os.environ["CXX"] = environment


def test_a_compile_error_shows_the_compilers_message_on_one_line_and_leaves_nothing(
    sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources["kernels/broken.cpp"] = b"int broken() { return undeclared_name; }\n"
    assert main(["generic"]) == 1
    message = capsys.readouterr().err
    assert "compiling kernels/broken.cpp for CPU level generic failed" in message
    assert "undeclared_name" in message and message.count("\n") == 1
    assert not list((tmp_path / "kernels").glob("*.so")) and not leftovers(tmp_path)


def test_a_link_error_is_reported(sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "LINK_FLAGS", ("-shared", "-lno-such-library"))
    with pytest.raises(WorkFailedError, match=r"linking generic-.* failed: .*no-such-library"):
        build_library("generic")


def test_a_compiler_too_old_for_the_level_is_told_from_an_error_in_the_source(
    sources, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = find_existing()
    script = f'case "$*" in *march=*) echo "error: unknown -march" >&2; exit 1;; esac\nexec {real} "$@"'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))
    assert build_library("generic").is_file()
    monkeypatch.setattr(compile_module.platform, "machine", lambda: "x86_64")
    with pytest.raises(
        WorkFailedError, match=r"can't build CPU level x86-64-v3 .*unknown -march.*: use GCC 12"
    ):
        build_library("x86-64-v3")


def test_static_libraries_are_optional(sources, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = find_existing()
    script = (
        f'case "$*" in *static-libstdc*) echo "error: no libstdc++.a" >&2; exit 1;; esac\nexec {real} "$@"'
    )
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))
    assert ctypes.CDLL(str(build_library("generic"))).answer() == 42


def test_a_level_of_another_processor_and_an_unknown_one_are_refused(
    sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module.platform, "machine", lambda: "aarch64")
    with pytest.raises(
        WorkFailedError, match="needs an x86-64 compiler, this machine is aarch64: build level generic"
    ):
        build_library("amx")
    with pytest.raises(InputError, match=r"unknown CPU level 'armv8\.2'"):
        build_library("armv8.2")


def test_a_folder_that_cannot_be_written_is_one_line(sources, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkFailedError, match="can't write the kernel library"):
        build_library("generic", out=tmp_path / "file" / "lib")


@pytest.mark.parametrize("arguments", [[], ["generic", "--all"]])
def test_the_command_wants_a_level_or_all(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "castiron.plugins_cpu.compile", "no-such-level"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == (
        "error: unknown CPU level 'no-such-level': expected one of generic, x86-64-v3, avx512-vnni, amx\n"
    )
