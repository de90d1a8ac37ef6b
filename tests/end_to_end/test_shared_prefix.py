"""SmolLM2 with long shared prefixes: cached answers are those computed cold."""

from pathlib import Path

import numpy as np
import pytest

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams

PREFIX_LEN = 1000


def ask(engine: LLMEngine, request: AddRequest) -> tuple[list[tuple[object, ...]], int]:
    """(token ids, log probabilities) of the answer, and how much of the prompt was cached."""
    outputs = list(engine.generate([request]))
    return [(o.new_token_ids, o.logprobs) for o in outputs], outputs[-1].num_cached_tokens


@pytest.mark.long
@pytest.mark.parametrize("fixture", ["smollm2_engine", "smollm2_f32_engine"])
def test_answers_behind_a_shared_prefix_of_a_thousand_tokens_equal_cold_ones_bit_for_bit(
    request: pytest.FixtureRequest, fixture: str
) -> None:
    path: Path = request.getfixturevalue(fixture)
    random = np.random.default_rng(0)
    asked = []
    cold = []
    with LLMEngine.load(path, EngineOptions(max_seqs=4, prefix_cache=False)) as engine:
        prefix = random.integers(10, engine.info.vocab_size, PREFIX_LEN).tolist()
        for index, length in enumerate((20, 1, 5, 16)):
            tail = random.integers(10, engine.info.vocab_size, length).tolist()
            sampling = SamplingParams(
                max_tokens=12, logprobs=5, ignore_eos=True, temperature=0.7 * (index % 2), seed=index
            )
            asked.append(AddRequest(f"r{index}", (*prefix, *tail), sampling))
        for each in asked:
            answer, num_cached = ask(engine, each)
            assert num_cached == 0
            cold.append(answer)
    with LLMEngine.load(path, EngineOptions(max_seqs=4)) as engine:
        block_size = engine.info.block_size
        for index, each in enumerate(asked):
            answer, num_cached = ask(engine, each)
            assert answer == cold[index]
            assert num_cached == (PREFIX_LEN // block_size * block_size if index else 0)
        engine.scheduler.check_integrity()
