"""The CUDA device on a GPU: weights made up at load are those of the file, and timing changes no token."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import build
from tiny_checkpoints import save_tiny_checkpoint

from castiron.runtime.devices.cuda import CudaDevice
from castiron.runtime.devices.cuda_driver import check, driver
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest
from castiron.runtime.plan_format import MemoryClass
from castiron.runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

FLAGS = ("--target", "sm_90", "--max-seqs", "4", "--max-batched-tokens", "64")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
OPTIONS = EngineOptions(kv_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("device") / "tiny", architecture="llama", **SIZES)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    path = build(checkpoint, tmp_path_factory.mktemp("device") / "x.engine", "--quantize", "none", *FLAGS)
    with LLMEngine.load(path, OPTIONS) as loaded:
        yield loaded


def weights_of(path: Path) -> np.ndarray:
    """uint8 copy of memory class `weights` of the loaded engine."""
    with LLMEngine.load(path, OPTIONS) as loaded:
        assert isinstance(loaded.device, CudaDevice)
        memory = loaded.device._memory[MemoryClass.WEIGHTS]
        weights = np.empty(memory.num_bytes, np.uint8)
        check(driver.cuMemcpyDtoH(weights.ctypes.data, memory.address, weights.nbytes), "reading weights")
    return weights


@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_weights_made_up_at_load_are_those_written_into_the_file(
    checkpoint: Path, tmp_path: Path, quantize: str
) -> None:
    made_up, written = (
        weights_of(
            build(checkpoint, tmp_path / f"{mode}.engine", "--quantize", quantize, "--weights", mode, *FLAGS)
        )
        for mode in ("dummy", "random")
    )
    assert made_up.any() and np.array_equal(made_up, written)


def generated(engine: LLMEngine, num_tokens: int) -> dict[str, list[int]]:
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [AddRequest(f"r{index}", (index + 1, 5, 9), sampling) for index in range(3)]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for output in engine.generate(requests):
        tokens[output.request_id] += output.new_token_ids
    return tokens


def test_timed_steps_give_the_same_tokens_and_less_than_wall_time(engine: LLMEngine) -> None:
    device = engine.device
    assert isinstance(device, CudaDevice)
    expected = generated(engine, 40)
    seconds = []
    for num_tokens in (40, 2, 40):
        device.start_timing()
        started = time.perf_counter()
        tokens = generated(engine, num_tokens)
        wall_s = time.perf_counter() - started
        seconds.append(device.stop_timing())
        assert tokens == {name: ids[:num_tokens] for name, ids in expected.items()}
        assert 0 < seconds[-1] < wall_s
    assert seconds[1] < 0.5 * min(seconds[0], seconds[2])  # each time from zero
    assert generated(engine, 40) == expected


def test_a_step_launched_before_timing_began_is_not_counted(engine: LLMEngine) -> None:
    device = engine.device
    assert isinstance(device, CudaDevice)
    generated(engine, 2)
    device.start_timing()
    assert device.stop_timing() == 0.0
    with pytest.raises(AssertionError, match="start_timing wasn't called"):
        device.stop_timing()
