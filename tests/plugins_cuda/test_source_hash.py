"""The hash of a kernel's source: it changes with all that changes the kernel, and with nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from castiron.plugins_cuda import source_hash as module
from castiron.plugins_cuda.source_hash import compiler_version, source_hash, without_comments
from castiron.plugins_cuda.specs import SPECS

SPEC = SPECS["linear_few.bf16.8"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sources of one kernel that includes a header beside it, which includes one of the folder above."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / SPEC.source).write_text('#include "one.cuh"\nint a;  // first\n')
    (tmp_path / "kernels" / "one.cuh").write_text(
        '#pragma once\n  # include "two.cuh"\n#include <stdint.h>\n'
    )
    (tmp_path / "two.cuh").write_text('#include "kernels/one.cuh"\nint b;\n')
    (tmp_path / "other.cuh").write_text("int c;\n")
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    yield tmp_path
    module._hash.cache_clear()
    module._code.cache_clear()


def new_hash() -> str:
    """As a new process computes it."""
    module._hash.cache_clear()
    module._code.cache_clear()
    return source_hash(SPEC, "sm_90")


@pytest.mark.parametrize("name", [f"kernels/{SPEC.source}", "kernels/one.cuh", "two.cuh"])
def test_code_of_the_file_and_of_what_it_includes_counts(folder: Path, name: str) -> None:
    before = new_hash()
    (folder / name).write_text((folder / name).read_text() + "int more;\n")
    assert new_hash() != before


def test_comments_and_other_files_do_not_count(folder: Path) -> None:
    before = new_hash()
    (folder / "other.cuh").write_text("int other;\n")
    source = folder / "kernels" / SPEC.source
    source.write_text("/* what it\n does */\n" + source.read_text().replace("first", "second"))
    assert new_hash() == before


def test_defines_entry_and_target_count() -> None:
    before = source_hash(SPEC, "sm_90")
    assert source_hash(replace(SPEC, defines=(*SPEC.defines, ("MORE", "1"))), "sm_90") != before
    assert source_hash(replace(SPEC, entry="other"), "sm_90") != before
    assert source_hash(SPEC, "sm_100a") != before
    assert source_hash(SPEC, "sm_90") == before


def test_strings_are_not_comments() -> None:
    assert (
        without_comments('a("// no", "\\"/*"); // yes\n\n  b /* x */ c;  \n')
        == 'a("// no", "\\"/*");\n  b   c;'
    )


def test_every_kernel_has_a_hash_of_its_own() -> None:
    hashes = {source_hash(spec, "sm_90") for spec in SPECS.values()}
    builds = {(spec.source, spec.entry, spec.defines) for spec in SPECS.values()}
    assert len(hashes) == len(builds)


def test_the_compiler_has_a_version() -> None:
    assert compiler_version().startswith("nvcc 13.")
