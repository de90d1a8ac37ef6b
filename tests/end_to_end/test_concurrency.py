"""Sixteen concurrent requests on SmolLM2: bit-equal to each alone with float32 compute, chunked or not."""

from pathlib import Path

import numpy as np
import pytest

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.logits import forward_logits
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams

NUM_REQUESTS = 16


def prompts(vocab_size: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(5)
    lengths = [1, 2, 15, 16, 17, 31, 33, 48, 64, 65, 90, 100, 127, 128, 129, 150]
    return [tuple(int(t) for t in rng.integers(10, vocab_size, n)) for n in lengths]


def tokens(engine: LLMEngine, requests: list[AddRequest]) -> dict[str, list[tuple]]:
    """Every request's (token id, its logprob, top logprobs) in order."""
    result: dict[str, list[tuple]] = {request.request_id: [] for request in requests}
    for output in engine.generate(requests):
        for token, logprob in zip(output.new_token_ids, output.logprobs, strict=True):
            result[output.request_id].append((token, logprob.sampled, logprob.top_logprobs))
    return result


@pytest.fixture(scope="module", params=["f32", "int8"])
def engine_path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("smollm2_f32_engine" if request.param == "f32" else "smollm2_engine")


@pytest.fixture(scope="module")
def alone(engine_path: Path) -> tuple[list[AddRequest], dict[str, list[tuple]]]:
    """The requests, every other one greedy, and what each is answered when nothing else runs."""
    with LLMEngine.load(engine_path, EngineOptions()) as engine:
        requests = [
            AddRequest(
                f"r{i}",
                prompt,
                SamplingParams(
                    max_tokens=8, logprobs=5, ignore_eos=True, temperature=0.0 if i % 2 else 0.8, seed=i
                ),
            )
            for i, prompt in enumerate(prompts(engine.info.vocab_size))
        ]
        answers = {}
        for request in requests:
            answers |= tokens(engine, [request])
    return requests, answers


@pytest.mark.parametrize("max_batched_tokens", [None, 48])
def test_sixteen_concurrent_requests_equal_each_alone_bit_for_bit(
    engine_path: Path, alone: tuple[list[AddRequest], dict[str, list[tuple]]], max_batched_tokens: int | None
) -> None:
    requests, answers = alone
    options = EngineOptions(max_seqs=NUM_REQUESTS, max_batched_tokens=max_batched_tokens)
    with LLMEngine.load(engine_path, options) as engine:
        assert tokens(engine, requests) == answers


def test_logits_of_sixteen_sequences_equal_each_alone_bit_for_bit(smollm2_f32_engine: Path) -> None:
    with LLMEngine.load(smollm2_f32_engine, EngineOptions()) as engine:
        sequences = [list(p)[:48] for p in prompts(engine.info.vocab_size)]
        batched = forward_logits(engine, sequences, chunk=7)
        for sequence, rows in zip(sequences, batched, strict=True):
            np.testing.assert_array_equal(forward_logits(engine, [sequence])[0], rows)
