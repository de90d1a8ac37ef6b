"""Engines built with --batch-invariant on the GPU: the same bits alone, batched, chunked, preempted, cached."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import build
from tiny_checkpoints import save_tiny_checkpoint

from castiron.runtime.devices.cuda import CudaDevice
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_options import EngineOptions, resolve_limits
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.logits import forward_logits
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

TARGET = ("--target", "sm_90", "--max-seqs", "64", "--max-batched-tokens", "1024", "--batch-invariant")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2}
HEAD_DIMS = {"none": 64, "int4": 128, "fp8": 64}
LENGTHS = (1, 7, 63, 64, 65, 150, 300)
NEW_TOKENS = 70  # over a block's end


@pytest.fixture(scope="module", params=["none", "int4", "fp8"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invariant")
    checkpoint = save_tiny_checkpoint(
        folder / "model", seed=5, dtype="bf16", head_dim=HEAD_DIMS[request.param], **SIZES
    )
    return build(checkpoint, folder / "model.engine", "--quantize", request.param, *TARGET)


def load(path: Path, num_blocks: int = 600, prefix_cache: bool = False) -> LLMEngine:
    """Without a prefix cache unless it is meant: what is compared shall be computed."""
    with EngineFile.open(path) as engine_file:
        header, _ = engine_file.plan()
        device = CudaDevice(engine_file, {group.name: num_blocks for group in header.cache_groups})
        limits = resolve_limits(EngineOptions(), engine_file.manifest.profile)
        return LLMEngine(engine_file.manifest, device, limits, prefix_cache=prefix_cache)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[LLMEngine]:
    with load(path) as loaded:
        yield loaded


def prompts(engine: LLMEngine) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, engine.info.vocab_size, length).tolist() for length in LENGTHS]


def answers(engine: LLMEngine, requests: list[AddRequest]) -> dict[str, list[tuple[int, float]]]:
    """Token ids and their log probabilities by request."""
    found: dict[str, list[tuple[int, float]]] = {request.request_id: [] for request in requests}
    for output in engine.generate(requests):
        for token_id, logprob in zip(output.new_token_ids, output.logprobs, strict=True):
            found[output.request_id].append((token_id, logprob.sampled))
    return found


def requests_of(engine: LLMEngine, copies: int = 1) -> list[AddRequest]:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    return [
        AddRequest(f"{index}.{copy}", tuple(prompt), sampling)
        for copy in range(copies)
        for index, prompt in enumerate(prompts(engine))
    ]


def test_the_engine_says_so(engine: LLMEngine) -> None:
    assert engine.info.row_stable


@pytest.mark.parametrize("chunk", [1, 3, 8, 64, 65, 129])
def test_logits_in_batches_and_chunks_equal_each_alone_bit_for_bit(engine: LLMEngine, chunk: int) -> None:
    sequences = prompts(engine)
    alone = [forward_logits(engine, [sequence])[0] for sequence in sequences]
    assert all(np.isfinite(rows).all() for rows in alone)
    for rows, expected in zip(forward_logits(engine, sequences, chunk=chunk), alone, strict=True):
        np.testing.assert_array_equal(rows, expected)


def test_greedy_answers_in_a_batch_and_with_preemption_equal_each_alone_bit_for_bit(
    path: Path, engine: LLMEngine
) -> None:
    alone: dict[str, list[tuple[int, float]]] = {}
    for request in requests_of(engine):
        alone |= answers(engine, [request])
    batched = answers(engine, requests_of(engine, copies=8))
    with load(path, num_blocks=24) as small:
        preempted = answers(small, requests_of(small, copies=3))
        assert small.stats().num_preemptions > 0
    for found in (batched, preempted):
        for request_id, tokens in found.items():
            assert tokens == alone[f"{request_id.partition('.')[0]}.0"], request_id


def test_answers_behind_cached_prefixes_equal_cold_ones_bit_for_bit(path: Path, engine: LLMEngine) -> None:
    """Each alone, cold; then twice through a cache: one by one, and all at once with eight copies of each."""
    requests = requests_of(engine)
    cold: dict[str, list[tuple[int, float]]] = {}
    for request in requests:
        cold |= answers(engine, [request])
    with load(path, prefix_cache=True) as cached:
        for _ in range(2):
            for request in requests:
                assert answers(cached, [request])[request.request_id] == cold[request.request_id]
        for request_id, tokens in answers(cached, requests_of(cached, copies=8)).items():
            assert tokens == cold[f"{request_id.partition('.')[0]}.0"], request_id
        assert cached.stats().num_cache_hit_tokens > 10 * 64
        cached.scheduler.check_integrity()
