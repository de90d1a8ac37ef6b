"""Tiny engines for sm_90 built without a compiler, tuning engines among them, and made-up times for them."""

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import save_tiny_checkpoint

from castiron.builder import build as build_module
from castiron.builder.build import BuildResult, build_engine
from castiron.builder.kernel_files import KernelFiles
from castiron.builder.options import BuildOptions
from castiron.builder.plan.emit import cubin_member
from castiron.runtime.tuning_format import TuningInfo

LIMITS = {"max_seqs": 2, "max_seq_len": 256, "max_batched_tokens": 128}


def tiny_bf16(folder: Path) -> Path:
    """A checkpoint of two layers that the CUDA kernels take."""
    return save_tiny_checkpoint(
        folder,
        dtype="bf16", hidden_size=256, intermediate_size=384, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
    )  # fmt: skip


def build_sm_90(model: Path | str, output: Path, **options: Any) -> BuildResult:
    """Build with cubins that hold nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            build_module,
            "compile_for_cuda",
            lambda _, planned, *__: KernelFiles(
                "none", {cubin_member(spec): b"cubin" for spec in planned.kernel_specs.values()}
            ),
        )
        values = {"model": str(model), "output": output, "target": "sm_90", **LIMITS, **options}
        return build_engine(BuildOptions(**values), quiet=True)


class MadeUpTimer:
    """A LaunchTimer for which a launch takes 10 µs, less the place of its kernel among the candidates.

    So the cost model's last candidate is the fastest.
    """

    gpu, driver = "NVIDIA H200", "580.1"

    def __init__(self, info: TuningInfo) -> None:
        self.prepared: list[str] = []
        self.timed: list[int] = []
        self._us = {
            candidate.plan: (10 - 0.001 * place) * case.copies
            for case in info.cases
            for place, candidate in enumerate(case.candidates)
        }

    def __enter__(self) -> "MadeUpTimer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, case: Any) -> None:
        self.prepared.append(case.key.text)

    def chain_us(self, plan: int) -> float:
        self.timed.append(plan)
        return self._us[plan]
