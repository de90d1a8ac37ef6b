"""Cached prefixes on the CPU device, float32: the same tokens and log probabilities as computed cold, bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.memory import block_bytes
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams

Answers = dict[str, list[tuple[object, ...]]]
BLOCK = 16


def answers(engine: LLMEngine, requests: list[AddRequest]) -> tuple[Answers, dict[str, int]]:
    """Tokens and log probabilities of each request, and how much of its prompt was cached."""
    result: Answers = {r.request_id: [] for r in requests}
    cached = {}
    for output in engine.generate(requests):
        result[output.request_id].append((output.new_token_ids, output.logprobs))
        cached[output.request_id] = output.num_cached_tokens
        engine.scheduler.check_integrity()
    return result, cached


def requests_around_a_block(vocab_size: int, max_tokens: int = 20) -> list[AddRequest]:
    """Prompts of block - 1 to block + 12 tokens, and two blocks longer, all with one beginning; some random."""
    tokens = np.random.default_rng(3).integers(0, vocab_size, 3 * BLOCK + 12).tolist()
    lengths = [n + more for more in (0, 2 * BLOCK) for n in range(BLOCK - 1, BLOCK + 13)]
    return [
        AddRequest(
            f"r{length}",
            tuple(tokens[:length]),
            SamplingParams(
                max_tokens=max_tokens, temperature=0.8 * (i % 3 == 2), seed=i, ignore_eos=True, logprobs=3
            ),
        )
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def cold(tiny_engine: Path) -> Iterator[tuple[list[AddRequest], Answers]]:
    """The requests, and what each is answered alone without a prefix cache."""
    with LLMEngine.load(tiny_engine, EngineOptions(prefix_cache=False)) as engine:
        assert engine.info.row_stable and engine.info.block_size == BLOCK
        requests = requests_around_a_block(engine.info.vocab_size)
        alone: Answers = {}
        for request in requests:
            alone |= answers(engine, [request])[0]
        assert engine.stats().num_cache_hit_tokens == 0
    yield requests, alone


def test_each_length_around_a_block_twice_equals_cold(
    tiny_engine: Path, cold: tuple[list[AddRequest], Answers]
) -> None:
    requests, alone = cold
    with LLMEngine.load(tiny_engine) as engine:
        for turn in range(2):
            for request in requests:
                got, cached = answers(engine, [request])
                assert got[request.request_id] == alone[request.request_id]
                whole = (len(request.prompt_token_ids) - 1) // BLOCK * BLOCK
                if turn == 1:
                    assert cached[request.request_id] == whole


def test_all_at_once_sharing_what_others_compute_equals_cold(
    tiny_engine: Path, cold: tuple[list[AddRequest], Answers]
) -> None:
    requests, alone = cold
    with LLMEngine.load(tiny_engine, EngineOptions(max_batched_tokens=19, max_seqs=16)) as engine:
        got, cached = answers(engine, requests)
        assert got == alone
        assert sum(cached.values()) > 20 * BLOCK


def test_with_preemption_equals_cold(tiny_engine: Path, cold: tuple[list[AddRequest], Answers]) -> None:
    requests, alone = cold
    with LLMEngine.load(tiny_engine) as engine:
        bytes_of_block = block_bytes(engine.device.header, "kv")
    with LLMEngine.load(tiny_engine, EngineOptions(kv_memory_bytes=9 * bytes_of_block)) as engine:
        for _ in range(2):
            assert answers(engine, requests)[0] == alone
        assert engine.stats().num_preemptions > 3 and engine.stats().num_cache_hit_tokens > 20 * BLOCK
        assert engine.stats().num_free_blocks == 9


def test_with_aborts_between_equals_cold(tiny_engine: Path, cold: tuple[list[AddRequest], Answers]) -> None:
    requests, alone = cold
    got: Answers = {r.request_id: [] for r in requests}
    with LLMEngine.load(tiny_engine, EngineOptions(max_batched_tokens=24, max_seqs=6)) as engine:
        for turn in range(2):
            for request in requests:
                engine.add_request(request)
            victims = [r.request_id for i, r in enumerate(requests) if i % 4 == turn]
            got = {r.request_id: [] for r in requests}
            while engine.has_unfinished():
                if engine.stats().num_steps % 3 == 0 and victims:
                    engine.abort(victims.pop(0))
                for output in engine.step():
                    if output.finish_reason != "abort":
                        got[output.request_id].append((output.new_token_ids, output.logprobs))
                engine.scheduler.check_integrity()
            for request_id, mine in got.items():
                assert mine == alone[request_id][: len(mine)]
        assert sum(len(mine) == 20 for mine in got.values()) >= 20
        assert engine.stats().num_aborted > 0 and engine.stats().num_cache_hit_tokens > 20 * BLOCK
