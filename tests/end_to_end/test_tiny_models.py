"""Tiny random checkpoints, built with --quantize none and float32 compute, against transformers in float32."""

from collections.abc import Iterator

import numpy as np
import pytest
from commands import build
from tiny_checkpoints import load_reference, reference_logits, save_tiny_checkpoint

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.logits import forward_logits

BOUND = 2e-3  # max |logit difference|
LENGTHS = (1, 7, 64, 300)
VARIANTS = {
    "llama": {"architecture": "llama"},
    "llama-tied-sharded": {"architecture": "llama", "tied": True, "sharded": True},
    "llama-biases-llama3-rope": {
        "architecture": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope": "llama3",
    },
    "llama-odd-sizes": {
        "architecture": "llama",
        "hidden_size": 60,
        "intermediate_size": 101,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 10,
        "vocab_size": 263,
    },
    "llama-linear-rope-bf16": {"architecture": "llama", "rope": "linear", "dtype": "bf16"},
    "llama-f16": {"architecture": "llama", "dtype": "f16"},
    "llama-yarn": {"architecture": "llama", "rope": "yarn"},
    "qwen2": {"architecture": "qwen2"},
    "qwen2-tied": {"architecture": "qwen2", "tied": True},
}


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLMEngine, list[list[int]], list[np.ndarray]]]:
    folder = tmp_path_factory.mktemp("tiny-model")
    checkpoint = save_tiny_checkpoint(folder / request.param, seed=3, **VARIANTS[request.param])
    engine = build(checkpoint, folder / "model.engine", "--quantize", "none", "--compute", "f32")
    reference = load_reference(checkpoint)
    vocab_size = VARIANTS[request.param].get("vocab_size", 307)
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in LENGTHS]
    expected = [np.asarray(reference_logits(reference, prompt)) for prompt in prompts]
    with LLMEngine.load(engine, EngineOptions()) as loaded:
        yield loaded, prompts, expected


def largest_difference(ours: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.abs(o - e).max()) for o, e in zip(ours, expected, strict=True))


def test_each_prompt_alone(case) -> None:
    engine, prompts, expected = case
    ours = [forward_logits(engine, [prompt])[0] for prompt in prompts]
    assert max(e.std() for e in expected) >= 1.0, "the reference's logits are too flat to show mistakes"
    assert largest_difference(ours, expected) <= BOUND


@pytest.mark.parametrize("chunk", [None, 1, 5, 64])
def test_ragged_batch_in_chunks(case, chunk: int | None) -> None:
    engine, prompts, expected = case
    ours = forward_logits(engine, prompts, chunk=chunk)
    assert largest_difference(ours, expected) <= BOUND


def test_rows_are_bit_equal_alone_and_batched_chunked_or_not(case) -> None:
    engine, prompts, _ = case
    alone = [forward_logits(engine, [prompt])[0] for prompt in prompts]
    for chunk in (None, 3, 17):
        for one, many in zip(alone, forward_logits(engine, prompts, chunk=chunk), strict=True):
            np.testing.assert_array_equal(one, many)
