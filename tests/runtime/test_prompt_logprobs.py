"""Log probabilities of prompts: right whatever chunks, company, cache and preemption."""

import numpy as np
import pytest
from simulated_device import (
    VOCAB_SIZE,
    device_of,
    logits_of,
    prefix_hashes,
    request,
    run,
    simulated_engine,
    tokens,
)

from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.logprobs import token_logprobs
from castiron.runtime.messages import RequestOutput, TokenLogprobs


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + i * 7) % VOCAB_SIZE for i in range(length))


def expected(ids: tuple[int, ...], num_top: int) -> list[TokenLogprobs]:
    """In plain numpy, from the simulated model."""
    found = []
    for row_hash, token_id in zip(prefix_hashes(np.array(ids))[:-1], ids[1:], strict=True):
        row = logits_of(row_hash).astype(np.float64)
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        order = np.argsort(-row, kind="stable")
        rank = int(np.flatnonzero(order == token_id)[0]) + 1
        found.append(
            (float(logprobs[token_id]), rank, order[:num_top].tolist(), logprobs[order[:num_top]].tolist())
        )
    return [TokenLogprobs(sampled, rank, tuple(top), tuple(values)) for sampled, rank, top, values in found]


def check(outputs: list[RequestOutput], ids: tuple[int, ...], num_top: int) -> None:
    assert all(output.prompt_logprobs == () for output in outputs[1:])
    for found, wanted in zip(outputs[0].prompt_logprobs, expected(ids, num_top), strict=True):
        assert (found.rank, found.top_token_ids) == (wanted.rank, wanted.top_token_ids)
        assert found.sampled == pytest.approx(wanted.sampled, abs=1e-5)
        assert found.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-5)


def engine(**sizes: int) -> LLMEngine:
    return simulated_engine(
        **{"max_seqs": 4, "max_batched_tokens": 16, "num_blocks": 64, "runs_ahead": True, **sizes}
    )


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 17, 40])
def test_every_prompt_token_but_the_first_has_its_log_probability(length: int, runs_ahead: bool) -> None:
    loop = engine(runs_ahead=runs_ahead)
    loop.add_request(request("a", prompt(length), 3, prompt_logprobs=5))
    outputs = run(loop)["a"]
    check(outputs, prompt(length), 5)
    plain = engine()
    plain.add_request(request("a", prompt(length), 3))
    assert tokens(outputs) == tokens(run(plain)["a"])


def test_beside_others_no_step_asks_for_more_logits_than_it_has_and_all_are_right() -> None:
    loop = engine()
    device_of(loop).record = True
    ids = {f"r{i}": prompt(5 + 9 * i, i) for i in range(7)}
    for index, (name, own) in enumerate(ids.items()):
        wanted = {"prompt_logprobs": index % 4} if index % 2 else {}
        loop.add_request(request(name, own, 12, **wanted))
    found = run(loop)
    assert max(len(step["logit_rows"]) for step in device_of(loop).steps) == 4
    for index, (name, own) in enumerate(ids.items()):
        assert len(tokens(found[name])) == 12
        if index % 2:
            check(found[name], own, index % 4)
        else:
            assert all(output.prompt_logprobs == () for output in found[name])


def test_a_cached_prefix_is_computed_again_and_twice_the_same() -> None:
    loop = engine()
    for name in ("warm", "a", "b"):
        wanted = {} if name == "warm" else {"prompt_logprobs": 2}
        loop.add_request(request(name, prompt(30), 2, **wanted))
        outputs = run(loop)[name]
        if name != "warm":
            check(outputs, prompt(30), 2)
            assert outputs[0].num_cached_tokens == 0


def test_preempted_prompts_are_complete() -> None:
    loop = engine(num_blocks=14)
    for index in range(4):
        loop.add_request(request(f"r{index}", prompt(9, index), 25, prompt_logprobs=1))
    found = run(loop)
    assert loop.stats().num_preemptions > 0
    for index in range(4):
        check(found[f"r{index}"], prompt(9, index), 1)


def test_ties_nan_and_infinity() -> None:
    row = np.array([[1.0, np.nan, 3.0, 3.0, -np.inf]], np.float32)
    for token_id, rank in ((2, 1), (3, 1), (0, 3), (4, 4), (1, 4)):
        (found,) = token_logprobs(row, [token_id], 3)
        assert found.rank == rank and found.top_token_ids == (2, 3, 0)
    assert found.sampled == -np.inf
    assert token_logprobs(row, [2], 0)[0].top_token_ids == ()
    (nothing,) = token_logprobs(np.full((1, 3), -np.inf, np.float32), [1], 2)
    assert nothing.sampled == -np.inf and nothing.top_token_ids == (0, 1)
