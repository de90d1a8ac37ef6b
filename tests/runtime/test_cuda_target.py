"""What keeps a CUDA engine from running somewhere: one line each, before anything is allocated."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from castiron.runtime.devices import cuda_driver, cuda_plan
from castiron.runtime.devices.cuda_target import GpuProperties, check_gpu, check_gpu_memory, memory_table
from castiron.runtime.errors import EngineTargetError
from castiron.runtime.plan_format import CacheTensor, PlanHeader
from castiron.runtime.step_abi import CacheGroup

H200 = GpuProperties(
    name="NVIDIA H200",
    compute_capability=(9, 0),
    driver_version=13000,
    num_sms=132,
    shared_bytes_per_block=232448,
    free_bytes=140 << 30,
    total_bytes=141 << 30,
)
REQUIREMENTS = {
    "compute_capability": [9, 0],
    "min_driver": 13000,
    "num_sms": 132,
    "shared_bytes_per_block": 232448,
}


def engine_file(**requirements: Any) -> Any:
    """As much of an EngineFile as the check reads."""
    target = SimpleNamespace(level="sm_90", requirements={**REQUIREMENTS, **requirements})
    return SimpleNamespace(path=Path("x.engine"), manifest=SimpleNamespace(target=target))


def test_the_gpu_an_engine_was_built_for_is_accepted() -> None:
    check_gpu(engine_file(), H200)
    check_gpu(engine_file(), dataclasses.replace(H200, name="NVIDIA H100", driver_version=13010))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"compute_capability": (8, 0), "name": "NVIDIA A100"}, r"9\.0\), this GPU is NVIDIA A100 \(8\.0\)"),
        ({"driver_version": 12080}, r"needs a driver for CUDA 13\.0, this machine's is for CUDA 12\.8"),
        ({"num_sms": 60}, r"needs 132 multiprocessors, this GPU \(NVIDIA H200\) has 60"),
        ({"shared_bytes_per_block": 101376}, r"needs 232448 bytes of shared memory a block, .* has 101376"),
    ],
)
def test_another_gpu_is_refused_with_what_differs(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineTargetError, match=said) as error:
        check_gpu(engine_file(), dataclasses.replace(H200, **changed))
    assert error.value.exit_code == 3 and "\n" not in str(error.value)


def header() -> PlanHeader:
    return PlanHeader(
        kernels=(),
        plans=(),
        cache_groups=(CacheGroup("kv", "paged", 64, 4),),
        cache_tensors=(CacheTensor("cache.0", "kv", 1 << 20, "bf16", (2, 4, 64, 1024)),),
        tensor_maps=(),
        vocab_size=100,
        max_rows=4,
        arena_bytes=3 << 20,
        weights_bytes=500 << 20,
        rows_bytes=64,
        counters_bytes=64,
        exchange_bytes=0,
        staging_bytes=64,
        logits_offset=0,
    )


def test_too_little_memory_is_refused_with_a_table_of_what_needs_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("castiron.runtime.devices.cuda_target.step_bytes", lambda *_: 1000)
    plans = SimpleNamespace(**{name: getattr(header(), name) for name in header().__struct_fields__})
    plans.plans = ("any",)
    needs = memory_table(plans, {"kv": 200})
    assert needs["weights"] == 500 << 20 and needs["KV cache"] == 200 << 20
    check_gpu_memory(plans, {"kv": 200}, sum(needs.values()))
    with pytest.raises(
        EngineTargetError, match=r"weights 500, KV cache 200, arena 3, .* MiB are free: lower"
    ):
        check_gpu_memory(plans, {"kv": 200}, sum(needs.values()) - 1)


def test_without_cuda_bindings_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "driver", None)
    with pytest.raises(
        EngineTargetError, match=r"needs the package cuda-bindings: pip install 'castiron\[cuda\]'"
    ):
        cuda_driver.initialize()


class FakeDriver:
    """A driver whose cuInit ends in a given way."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def cuInit(self, flags: int) -> tuple[int]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return (self.outcome,)

    def cuGetErrorName(self, error: int) -> tuple[int, bytes]:
        return 0, b"CUDA_ERROR_NO_DEVICE"

    def cuGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, b"no CUDA-capable device is detected"


@pytest.mark.parametrize(
    ("outcome", "said"),
    [(RuntimeError("libcuda"), "no NVIDIA driver found"), (100, "finds no usable GPU .CUDA_ERROR_NO_DEVICE")],
)
def test_without_a_driver_or_a_gpu_it_says_so(
    outcome: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "driver", FakeDriver(outcome))
    with pytest.raises(EngineTargetError, match=said):
        cuda_driver.initialize()


@pytest.mark.parametrize(("has_programmatic_edges", "kinds"), [(True, [1, 0]), (False, [0, 0])])
def test_edges_are_programmatic_only_where_the_gpu_has_them(
    has_programmatic_edges: bool, kinds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[Any] = []
    fake = SimpleNamespace(
        CUgraphEdgeData=lambda: SimpleNamespace(from_port=0, type=0),
        CUgraphDependencyType=SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1),
        CUresult=FakeDriver.CUresult,
        cuGraphAddDependencies=lambda *arguments: (added.append(arguments), (0,))[1],
    )
    monkeypatch.setattr(cuda_plan, "driver", fake)
    monkeypatch.setattr(cuda_driver, "driver", fake)
    plans: Any = SimpleNamespace(_has_programmatic_edges=has_programmatic_edges)
    cuda_plan.LinkedPlans._add_edges(plans, "graph", ["a", "b", "c"], [(0, 1, True), (1, 2, False)])
    (_, sources, targets, data, count) = added[0]
    assert (sources, targets, count) == (["a", "b"], ["b", "c"], 2)
    assert [edge.type for edge in data] == kinds
