"""Engines for GPUs that this project hasn't run on: built here, their kernels compiled, their status shown."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cubin_elf import sm_number
from tiny_checkpoints import save_tiny_checkpoint
from tiny_gguf import write_tiny_gguf

from castiron.builder import build as build_module
from castiron.builder.build import BuildResult, build_engine
from castiron.builder.kernel_files import KernelFiles
from castiron.builder.options import BuildOptions
from castiron.builder.plan.planner import PlannedEngine
from castiron.builder.targets import Target
from castiron.runtime import inspect_cli
from castiron.runtime.devices.cuda_target import GpuProperties, check_gpu
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineTargetError
from castiron.runtime.plan_format import RecordFlag

OTHERS = ("sm_80", "sm_89", "sm_100a", "sm_120a", "sm_121a")
QUICK = ("sm_80", "int4")
LIMITS = {"max_seqs": 4, "max_seq_len": 256, "max_batched_tokens": 128}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny Llamas by what their linears are stored as."""
    folder = tmp_path_factory.mktemp("targets")
    dense = save_tiny_checkpoint(folder / "dense", dtype="bf16", head_dim=64, **SIZES)
    return {"bf16": dense, "int4": dense, "q4_1": write_tiny_gguf(dense, folder / "q4_1.gguf", "q4_1")}


def build(models: dict[str, Path], stored: str, target: str, output: Path, quiet: bool = True) -> BuildResult:
    quantize = {"bf16": "none", "int4": "int4", "q4_1": "keep"}[stored]
    options: dict[str, Any] = {"model": str(models[stored]), "output": output, "target": target, **LIMITS}
    return build_engine(BuildOptions(quantize=quantize, **options), quiet=quiet)


@pytest.mark.parametrize(
    ("target", "stored"),
    [
        pytest.param(target, stored, marks=() if (target, stored) == QUICK else pytest.mark.long)
        for target in OTHERS
        for stored in ("bf16", "q4_1", "int4")
    ],
)
def test_all_kernels_of_an_engine_compile_for_its_target(
    models: dict[str, Path], target: str, stored: str, tmp_path: Path
) -> None:
    build(models, stored, target, tmp_path / "x.engine")
    with EngineFile.open(tmp_path / "x.engine") as engine:
        header, _ = engine.plan()
        schemes = set(engine.manifest.quantization.schemes)
        assert any(scheme.startswith(stored) for scheme in schemes), schemes
        assert len(header.kernels) > 10
        for kernel in header.kernels:
            cubin = engine.member(kernel.member)
            assert f"sm_{sm_number(cubin)}" == target.rstrip("a"), kernel.name
            assert f".text.{kernel.entry}\0".encode() in cubin, kernel.name


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines hold empty kernels."""

    def compile_none(
        target: Target, planned: PlannedEngine, keep_going: Callable[[], None], with_fill_dummy: bool
    ) -> KernelFiles:
        return KernelFiles("none", {kernel.member: b"\x7fELF" for kernel in planned.header.kernels})

    monkeypatch.setattr(build_module, "compile_for_cuda", compile_none)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("target", ["sm_80", "sm_120a"])
def test_build_report_manifest_and_inspection_say_that_it_has_not_run(
    models: dict[str, Path], target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.engine"
    result = build(models, "bf16", target, path, quiet=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "compiled, not run" in line]
    assert len(lines) == 1 and "warning: " in lines[0] and target in lines[0]
    assert result.manifest is not None and result.manifest.target.status == "compiled, not run"
    assert any("compiled, not run" in warning for warning in result.report["warnings"])
    assert inspect_cli.main([str(path)]) == 0
    assert f"cuda {target} (compiled, not run)" in capsys.readouterr().out
    assert inspect_cli.main([str(path), "--json"]) == 0
    summary = msgspec.json.decode(capsys.readouterr().out)
    assert summary["manifest"]["target"]["status"] == "compiled, not run"


@pytest.mark.usefixtures("no_compiler")
def test_an_engine_for_sm_90_says_nothing_of_the_kind(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = build(models, "bf16", "sm_90", tmp_path / "x.engine", quiet=False)
    assert "not run" not in capsys.readouterr().err
    assert result.manifest is not None and result.manifest.target.status == "run"


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("target", "is_programmatic"), [("sm_80", False), ("sm_89", False), ("sm_100a", True)]
)
def test_edges_are_full_where_kernels_cannot_wait_for_inputs_themselves(
    models: dict[str, Path], target: str, is_programmatic: bool, tmp_path: Path
) -> None:
    build(models, "bf16", target, tmp_path / "x.engine")
    with EngineFile.open(tmp_path / "x.engine") as engine:
        header, arrays = engine.plan()
    flags = arrays.records["flags"] & int(RecordFlag.PDL_IN_EDGE)
    for plan in header.plans:
        later = slice(plan.records_start + 1, plan.records_start + plan.records_count)
        assert np.all(arrays.records["dependencies_count"][later] == 1)
        assert np.all((flags[later] != 0) == is_programmatic)


@pytest.mark.usefixtures("no_compiler")
def test_an_engine_for_sm_80_is_refused_on_an_h200_with_one_line(
    models: dict[str, Path], tmp_path: Path
) -> None:
    h200 = GpuProperties("NVIDIA H200", (9, 0), 13000, 132, 232448, 140 << 30, 141 << 30)
    a100 = GpuProperties("NVIDIA A100", (8, 0), 13000, 108, 166912, 79 << 30, 80 << 30)
    build(models, "bf16", "sm_80", tmp_path / "x.engine")
    with EngineFile.open(tmp_path / "x.engine") as engine:
        check_gpu(engine, a100)
        with pytest.raises(
            EngineTargetError, match=r"sm_80 \(compute capability 8\.0\), .* H200 \(9\.0\)"
        ) as error:
            check_gpu(engine, h200)
    assert "\n" not in str(error.value)
