"""Penalties, biases, bans and allowed ids in whole engines, on the CPU and (marker gpu) on a GPU."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import build
from tiny_checkpoints import save_tiny_checkpoint

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.logits import forward_logits
from castiron.runtime.memory import block_bytes
from castiron.runtime.messages import AddRequest, RequestOutput
from castiron.runtime.sampling_params import SamplingParams

COMPUTES_ALL = EngineOptions(prefix_cache=False, kv_memory_bytes=64 << 20)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
PROMPT = (5, 9, 5, 200, 31, 77, 9)
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.7,
    "logit_bias": {11: 3.5, 12: -100.0, 31: 2.0},
    "allowed_token_ids": (*range(0, 300, 2), 11, 31, 77),
    "bad_words_token_ids": ((20,), (31, 77)),
    "min_tokens": 10,
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("sm_90", marks=pytest.mark.gpu)])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A row-stable engine."""
    if request.param == "cpu":
        return request.getfixturevalue("tiny_engine")
    folder = tmp_path_factory.mktemp("rules")
    checkpoint = save_tiny_checkpoint(folder / "model", seed=5, dtype="bf16", **SIZES)
    flags = ("--quantize", "none", "--target", "sm_90", "--max-seqs", "16", "--batch-invariant")
    return build(checkpoint, folder / "model.engine", *flags)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[LLMEngine]:
    with LLMEngine.load(path, COMPUTES_ALL) as loaded:
        yield loaded


def ask(name: str, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> AddRequest:
    return AddRequest(
        name, prompt, SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "logprobs": 3, **sampling})
    )


def run(engine: LLMEngine, *requests: AddRequest) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for output in engine.generate(requests):
        found[output.request_id].append(output)
    return found


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def generate(engine: LLMEngine, **sampling: Any) -> list[int]:
    return tokens(run(engine, ask("alone", **sampling))["alone"])


def adjusted(logits: np.ndarray, output: list[int], sampling: dict[str, Any], vocab_size: int) -> np.ndarray:
    """float32 [vocab]: what a token after `output` is drawn from, in plain numpy."""
    x = logits.copy()
    x[[t for t in range(vocab_size) if t not in sampling["allowed_token_ids"]]] = -np.inf
    for token_id, bias in sampling["logit_bias"].items():
        x[token_id] += np.float32(bias)
    for words in sampling["bad_words_token_ids"]:
        if not words[:-1] or tuple(output[1 - len(words) :]) == words[:-1]:
            x[words[-1]] = -np.inf
    seen = set(PROMPT) | set(output)
    for token_id in seen:
        penalty = np.float32(sampling["repetition_penalty"])
        x[token_id] = x[token_id] / penalty if x[token_id] > 0 else x[token_id] * penalty
        count = output.count(token_id)
        x[token_id] -= np.float32(sampling["frequency_penalty"]) * np.float32(count)
        x[token_id] -= np.float32(sampling["presence_penalty"]) * np.float32(count > 0)
    return x


def test_greedy_tokens_are_those_of_logits_adjusted_in_plain_numpy(engine: LLMEngine) -> None:
    outputs = run(engine, ask("all", **EVERYTHING))["all"]
    found = tokens(outputs)
    assert len(found) == 24 and len(set(found)) > 8
    logits = forward_logits(engine, [[*PROMPT, *found]])[0][len(PROMPT) - 1 : -1]
    for place, (row, output) in enumerate(zip(logits, outputs, strict=True)):
        expected = adjusted(row, found[:place], EVERYTHING, engine.info.vocab_size)
        assert int(expected.argmax()) == found[place], place
        logprobs = output.logprobs[0]  # of the model's own distribution
        exact = row.astype(np.float64) - row.max()
        exact -= np.log(np.exp(exact).sum())
        assert logprobs.sampled == pytest.approx(exact[found[place]], abs=1e-5)
        assert logprobs.rank == 1 + int((row > row[found[place]]).sum())
        assert logprobs.top_token_ids == tuple(np.argsort(-row, kind="stable")[:3].tolist())
    assert any(output.logprobs[0].rank > 1 for output in outputs)


def test_prompts_have_the_log_probabilities_of_their_logits(engine: LLMEngine) -> None:
    rng = np.random.default_rng(8)
    prompt = tuple(rng.integers(0, 250, 90).tolist())
    for _ in range(2):
        outputs = run(engine, ask("p", prompt, max_tokens=2, prompt_logprobs=4), ask("beside"))["p"]
        logits = forward_logits(engine, [list(prompt)])[0][:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert len(outputs[0].prompt_logprobs) == len(prompt) - 1 and not outputs[1].prompt_logprobs
        for row, token_id, found in zip(logprobs, prompt[1:], outputs[0].prompt_logprobs, strict=True):
            assert found.sampled == pytest.approx(row[token_id], abs=1e-5)
            assert found.rank == 1 + int((row > row[token_id]).sum())
            assert found.top_token_ids == tuple(np.argsort(-row, kind="stable")[:4].tolist())


def test_each_rule_has_its_effect(engine: LLMEngine) -> None:
    plain = generate(engine)
    assert generate(engine, repetition_penalty=1.0, presence_penalty=0.0, logit_bias={}) == plain
    assert generate(engine, logit_bias={123: 100.0}) == [123] * 24
    first, second = plain[0], plain[1]
    assert first not in generate(engine, logit_bias={first: -100.0}) and first in plain
    banned = generate(engine, bad_words_token_ids=((first, second),))
    assert banned[0] == first and banned[1] != second
    assert (first, second) not in itertools.pairwise(banned)
    assert generate(engine, bad_words_token_ids=((first,),))[0] != first
    allowed = (3, 4, 250)
    assert set(generate(engine, allowed_token_ids=allowed)) <= set(allowed)
    assert len(set(generate(engine, frequency_penalty=2.0, presence_penalty=2.0))) >= len(set(plain))
    assert len(set(generate(engine, repetition_penalty=100.0, logit_bias={7: 60.0}))) > 1  # not 7 for ever


def test_a_stop_token_waits_for_min_tokens(engine: LLMEngine) -> None:
    stopping = {"ignore_eos": False, "stop_token_ids": (44,), "logit_bias": {44: 100.0}}
    assert generate(engine, **stopping) == [44]
    found = generate(engine, min_tokens=5, **stopping)
    assert len(found) == 6 and found[5] == 44 and 44 not in found[:5]
    eos = engine.info.eos_token_ids[0]
    found = generate(engine, min_tokens=5, ignore_eos=False, logit_bias={eos: 100.0})
    assert found[5] == eos and not set(found[:5]) & set(engine.info.eos_token_ids)


def workload() -> list[AddRequest]:
    """Requests of all kinds: greedy, random, with rules, some with two-token bad words."""
    rng = np.random.default_rng(2)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.9, "seed": 5},
        EVERYTHING,
        {**EVERYTHING, "temperature": 1.2, "seed": 6, "top_p": 0.9, "min_p": 0.01, "top_k": 40},
        {"frequency_penalty": 1.5, "temperature": 0.7, "seed": 9},
    )
    return [
        ask(f"r{i}", tuple(rng.integers(0, 250, 3 + 7 * i).tolist()), max_tokens=40, **kinds[i % len(kinds)])
        for i in range(10)
    ]


def comparable(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    return [(output.new_token_ids, output.logprobs) for output in outputs]


def test_requests_side_by_side_and_preempted_are_bit_equal_to_each_alone(
    path: Path, engine: LLMEngine
) -> None:
    alone = {r.request_id: comparable(run(engine, r)[r.request_id]) for r in workload()}
    together = run(engine, *workload())
    assert {name: comparable(outputs) for name, outputs in together.items()} == alone
    blocks = 1 + -(-120 // engine.info.block_size)
    options = EngineOptions(
        prefix_cache=False, kv_memory_bytes=blocks * block_bytes(engine.device.header, "kv")
    )
    with LLMEngine.load(path, options) as small:
        preempted = run(small, *workload())
        assert small.stats().num_preemptions > 0
    assert {name: comparable(outputs) for name, outputs in preempted.items()} == alone
