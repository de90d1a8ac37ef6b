"""What a build compiles for a GPU: the plans' kernels, and the filling of dummy weights where they are dummies."""

from dataclasses import dataclass
from typing import Any

import pytest

from castiron.builder import kernel_files
from castiron.builder.kernel_files import compile_for_cuda
from castiron.builder.targets import resolve_target
from castiron.plugins_cuda.specs import SPECS


@dataclass
class Planned:
    kernel_specs: dict[str, Any]


@pytest.mark.parametrize("with_fill_dummy", [False, True])
def test_the_kernel_that_makes_up_weights_travels_in_engines_with_dummy_weights_only(
    with_fill_dummy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile_cubin(source: str, defines: tuple[tuple[str, str], ...], target: str) -> bytes:
        compiled.append((source, defines, target))
        return source.encode()

    monkeypatch.setattr(kernel_files, "compile_cubin", compile_cubin)
    planned: Any = Planned({"add": SPECS["add"]})
    files = compile_for_cuda(resolve_target("sm_90"), planned, lambda: None, with_fill_dummy)
    expected = {"kernels/add.cubin": b"add.cu"}
    if with_fill_dummy:
        expected["kernels/fill_dummy.cubin"] = b"fill_dummy.cu"
    assert files.members == expected
    assert sorted(compiled) == [(data.decode(), (), "sm_90") for data in sorted(expected.values())]


def test_a_build_that_is_to_stop_compiles_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_files, "compile_cubin", lambda *_: pytest.fail("compiled"))
    planned: Any = Planned({"add": SPECS["add"]})
    with pytest.raises(KeyboardInterrupt):
        compile_for_cuda(resolve_target("sm_90"), planned, stop)
