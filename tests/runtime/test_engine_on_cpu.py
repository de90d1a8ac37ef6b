"""The engine loop on the CPU device, with a tiny float32 engine: bit-equal whatever runs beside it."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from castiron.runtime.engine_client import EngineClient
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.errors import EngineTargetError, InputError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.logits import forward_logits
from castiron.runtime.memory import block_bytes
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams

COMPUTES_ALL = EngineOptions(prefix_cache=False)  # what is compared shall be computed, not found in a cache


def workload(engine: LLMEngine, count: int, max_tokens: int = 24) -> list[AddRequest]:
    """`count` requests with prompts of 1 to about 100 tokens, every third one sampled randomly."""
    random = np.random.default_rng(7)
    return [
        AddRequest(
            f"r{i}",
            tuple(random.integers(0, engine.info.vocab_size, 1 + 97 * i // count).tolist()),
            SamplingParams(
                max_tokens=max_tokens, temperature=0.8 * (i % 3 == 2), seed=i, ignore_eos=True, logprobs=2
            ),
        )
        for i in range(count)
    ]


Answers = dict[str, list[tuple[object, ...]]]


def answers(engine: LLMEngine, requests: list[AddRequest]) -> Answers:
    """Tokens and log probabilities of each request."""
    result: Answers = {r.request_id: [] for r in requests}
    for output in engine.generate(requests):
        result[output.request_id].append((output.new_token_ids, output.logprobs))
        engine.scheduler.check_integrity()
    return result


def test_sixteen_concurrent_requests_are_bit_equal_to_each_alone_chunked_or_not(tiny_engine: Path) -> None:
    with LLMEngine.load(tiny_engine, COMPUTES_ALL) as engine:
        assert engine.info.row_stable and engine.info.max_seqs >= 16
        requests = workload(engine, 16)
        together = answers(engine, requests)
        alone: Answers = {}
        for request in requests:
            alone |= answers(engine, [request])
    assert together == alone
    with LLMEngine.load(
        tiny_engine, EngineOptions(max_batched_tokens=19, max_seqs=16, prefix_cache=False)
    ) as engine:
        assert answers(engine, requests) == alone


def test_logits_are_bit_equal_whatever_the_chunk_and_the_company(tiny_engine: Path) -> None:
    with LLMEngine.load(tiny_engine) as engine:
        random = np.random.default_rng(3)
        sequences = [random.integers(0, engine.info.vocab_size, n).tolist() for n in (1, 7, 64, 100)]
        alone = [forward_logits(engine, [ids])[0] for ids in sequences]
        assert all(np.isfinite(a).all() and a.std() > 0.5 for a in alone)
        for chunk in (None, 1, 13):
            for logits, expected in zip(forward_logits(engine, sequences, chunk), alone, strict=True):
                assert np.array_equal(logits, expected)


def test_preempted_requests_are_bit_equal_to_undisturbed_ones(tiny_engine: Path) -> None:
    with LLMEngine.load(tiny_engine, COMPUTES_ALL) as engine:
        requests = workload(engine, 8, max_tokens=60)
        undisturbed = answers(engine, requests)
        assert engine.stats().num_preemptions == 0
        bytes_of_block = block_bytes(engine.device.header, "kv")
        num_blocks = 2 + -(
            -160 // engine.info.block_size
        )  # one request of the longest kind and a little more
    options = EngineOptions(kv_memory_bytes=num_blocks * bytes_of_block, prefix_cache=False)
    with LLMEngine.load(tiny_engine, options) as engine:
        assert engine.info.num_blocks == num_blocks
        assert answers(engine, requests) == undisturbed
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_free_blocks == num_blocks


def test_an_engine_in_its_own_process_answers_the_same(tiny_engine: Path) -> None:
    with LLMEngine.load(tiny_engine) as engine:
        requests = workload(engine, 6)
        expected = answers(engine, requests)
        info = engine.info

    async def collect(client: EngineClient, request: AddRequest) -> list[tuple[object, ...]]:
        return [(output.new_token_ids, output.logprobs) async for output in client.generate(request)]

    async def work() -> None:
        client = await EngineClient.start(tiny_engine)
        got = await asyncio.gather(*(collect(client, request) for request in requests))
        assert dict(zip(expected, got, strict=True)) == expected
        assert client.info.max_seq_len == info.max_seq_len
        assert set(client.info.timings) == {
            "load_plan_s",
            "device_init_s",
            "load_weights_s",
            "build_graphs_s",
        }
        await client.stop()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_limits_and_memory_the_engine_or_the_machine_lacks_are_refused(tiny_engine: Path) -> None:
    with pytest.raises(InputError, match=r"`max_seqs` is 100000, the engine was built for \d+"):
        LLMEngine.load(tiny_engine, EngineOptions(max_seqs=100000))
    with pytest.raises(EngineTargetError, match="MiB are free after the weights"):
        LLMEngine.load(tiny_engine, EngineOptions(kv_memory_bytes=1 << 50))
    with pytest.raises(InputError, match="one block needs"):
        LLMEngine.load(tiny_engine, EngineOptions(kv_memory_bytes=1))
