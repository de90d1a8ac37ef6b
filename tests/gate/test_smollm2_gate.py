"""SmolLM2 against transformers on the dequantized GGUF: the gate, greedy coverage and perplexity.

The reference's logits are computed once a session; its own greedy answers are read off its argmax after ours,
which is the same up to the first difference.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import build
from gate_report import MIN_GREEDY_COVERAGE, greedy_coverage, measure, perplexity
from llama_oracle import greedy_after, load_llama_gguf, reference_logits

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.logits import forward_logits
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams
from castiron.server.text_front import TextFront

ROOT = Path(__file__).parents[2]
CHUNK = 512  # perplexity: chunks of 512 tokens, second half scored
NUM_POSITIONS = 2048
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rust.",
    "Explain why the sky is blue to a child.",
    "List three uses of a paperclip.",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Tell me a short story about a lighthouse keeper.",
    "How do I boil an egg?",
)
GREEDY_TOKENS = 32


@pytest.fixture(scope="module")
def oracle(smollm2_gguf: Path):
    return load_llama_gguf(smollm2_gguf)


ENGINES = {  # name -> flags of build-engine
    "bf16": ("--quantize", "none", "--compute", "bf16"),
    "sm_90": ("--target", "sm_90"),
    "sm_90-dense": ("--target", "sm_90", "--quantize", "none"),
}


@pytest.fixture(
    scope="module",
    params=[
        "int8",
        pytest.param("bf16", marks=pytest.mark.long),
        pytest.param("f32", marks=pytest.mark.long),
        pytest.param("sm_90", marks=pytest.mark.gpu),
        pytest.param("sm_90-dense", marks=pytest.mark.gpu),
    ],
)
def engine(request: pytest.FixtureRequest, smollm2_gguf: Path, engines_folder: Path) -> Iterator[LLMEngine]:
    name = {"int8": "smollm2_engine", "f32": "smollm2_f32_engine"}.get(request.param)
    if name is not None:
        path = request.getfixturevalue(name)
    else:
        path = build(
            smollm2_gguf, engines_folder / f"smollm2-{request.param}.engine", *ENGINES[request.param]
        )
    # a GPU's memory is taken at load: as much cache as the test uses
    options = EngineOptions(kv_memory_bytes=2 << 30) if request.param.startswith("sm_") else EngineOptions()
    with LLMEngine.load(path, options) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text_front(smollm2_engine: Path) -> TextFront:
    return TextFront.load(smollm2_engine)


@pytest.fixture(scope="module")
def text_ids(text_front: TextFront) -> list[int]:
    """The repository's LICENSE as token ids, at least NUM_POSITIONS of them."""
    ids = text_front.tokenizer.encode_plain((ROOT / "LICENSE").read_text())
    assert len(ids) >= NUM_POSITIONS
    return ids


@pytest.fixture(scope="module")
def chunks(text_ids: list[int]) -> list[list[int]]:
    return [text_ids[i : i + CHUNK] for i in range(0, NUM_POSITIONS, CHUNK)]


@pytest.fixture(scope="module")
def expected(oracle, chunks: list[list[int]]) -> list[np.ndarray]:
    return [reference_logits(oracle, chunk) for chunk in chunks]


@pytest.fixture(scope="module")
def prompts(text_front: TextFront) -> list[list[int]]:
    return [text_front.prompter.encode([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def ours(engine: LLMEngine, chunks: list[list[int]]) -> list[np.ndarray]:
    """Our logits at every position, all chunks running at once, a step having as many tokens as logits."""
    return forward_logits(engine, chunks, chunk=engine.plans.max_logits // len(chunks))


def test_gate_holds_teacher_forced_with_all_chunks_in_one_batch(ours, expected):
    report = measure(expected, ours)
    assert report.num_positions >= 2000
    assert not report.failures(), (report.failures(), report)


def test_the_largest_steps_give_the_same_logits_bit_for_bit(engine, chunks, ours):
    if not engine.info.row_stable:
        pytest.skip("this engine's sums depend on the bucket")
    tokens = engine.info.max_batched_tokens // len(chunks)  # of each chunk in a step
    some = range(0, CHUNK, tokens * len(chunks) // engine.plans.max_logits)
    for rows, every in zip(forward_logits(engine, chunks, tokens, [some] * len(chunks)), ours, strict=True):
        np.testing.assert_array_equal(rows, every[some])


def test_gate_holds_token_by_token(engine, chunks, expected):
    first = chunks[0][:128]
    report = measure([expected[0][:128]], forward_logits(engine, [first], chunk=1))
    assert not report.failures(), (report.failures(), report)


def test_perplexity_is_within_one_percent(ours, chunks, expected):
    want = np.mean([np.log(perplexity(e, c, CHUNK // 2)) for e, c in zip(expected, chunks, strict=True)])
    got = np.mean([np.log(perplexity(o, c, CHUNK // 2)) for o, c in zip(ours, chunks, strict=True)])
    assert abs(np.exp(got - want) - 1) <= 0.01


def test_concurrent_greedy_generation_covers_the_reference(engine, oracle, prompts):
    sampling = SamplingParams(max_tokens=GREEDY_TOKENS, ignore_eos=True)
    requests = [AddRequest(str(i), tuple(p), sampling) for i, p in enumerate(prompts)]
    answers: list[list[int]] = [[] for _ in requests]
    for output in engine.generate(requests):
        answers[int(output.request_id)] += output.new_token_ids
    assert all(len(answer) == GREEDY_TOKENS for answer in answers)
    expected = [greedy_after(oracle, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert greedy_coverage(expected, answers) >= MIN_GREEDY_COVERAGE
