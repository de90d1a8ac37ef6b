"""A device that runs ahead: the next step is launched before the last one's ids are read; nothing else changes."""

import random

import pytest
from simulated_device import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    device_of,
    expected_tokens,
    request,
    run,
    simulated_engine,
    tokens,
)

from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + i * 7) % VOCAB_SIZE for i in range(length))


def engine_ahead(**sizes: int) -> LLMEngine:
    return simulated_engine(runs_ahead=True, **sizes)  # type: ignore[arg-type]


def requests_of(count: int, seed: int) -> list[AddRequest]:
    """Mixed lengths, greedy and random, some that stop at EOS, some of one token."""
    rng = random.Random(seed)
    return [
        request(
            f"r{i}",
            prompt(rng.randint(1, 60), i + 100 * seed),
            rng.choice((1, 2, 3, 9, 25)),
            temperature=rng.choice((0.0, 0.8)),
            seed=i,
            ignore_eos=rng.random() < 0.5,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("num_blocks", [23, 60, 400])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_what_it_gets_alone_with_preemption_and_chunks(num_blocks: int, seed: int) -> None:
    engine = engine_ahead(num_blocks=num_blocks, max_seqs=8, max_batched_tokens=32)
    requests = requests_of(24, seed)
    for each in requests:
        engine.add_request(each)
    outputs = run(engine)
    for each in requests:
        assert tokens(outputs[each.request_id]) == expected_tokens(each.prompt_token_ids, each.sampling)
    if num_blocks == 23:
        assert engine.stats().num_preemptions > 0


def test_one_step_is_launched_before_the_last_is_read() -> None:
    engine = engine_ahead()
    engine.add_request(request("a", prompt(3), max_tokens=5))
    num_given = []
    while engine.has_unfinished():
        num_given.append(sum(len(output.new_token_ids) for output in engine.step()))
    assert num_given == [0, 1, 1, 1, 1, 1]
    assert len(device_of(engine).launches) == 5, "no step after the last token, which is known beforehand"


def test_a_sequence_that_stops_has_one_more_row_in_flight_which_is_dropped_and_not_counted() -> None:
    salt = next(
        s
        for s in range(5000)
        if len(expected_tokens(prompt(5, s), SamplingParams(max_tokens=20))) in range(2, 19)
        and expected_tokens(prompt(5, s), SamplingParams(max_tokens=20))[-1] == EOS_TOKEN_ID
    )
    engine = engine_ahead()
    engine.add_request(request("a", prompt(5, salt), 20, ignore_eos=False))
    outputs = run(engine)["a"]
    expected = expected_tokens(prompt(5, salt), SamplingParams(max_tokens=20))
    assert tokens(outputs) == expected and outputs[-1].finish_reason == "stop"
    assert len(device_of(engine).launches) == len(expected) + 1
    assert engine.stats().num_generated_tokens == len(expected)
    assert not engine.has_unfinished()


def test_an_aborted_request_leaves_at_once_and_others_go_on() -> None:
    engine = engine_ahead(num_blocks=64, max_seqs=4)
    for name in ("a", "b", "c"):
        engine.add_request(request(name, prompt(6, ord(name)), max_tokens=12))
    got: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for step in range(100):
        if step == 4:
            assert engine.abort("b")
        if not engine.has_unfinished():
            break
        for output in engine.step():
            assert output.request_id != "b" or step <= 4 or output.finish_reason == "abort"
            got[output.request_id] += output.new_token_ids
        engine.scheduler.check_integrity()
    for name in ("a", "c"):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        assert got[name] == expected_tokens(prompt(6, ord(name)), sampling)
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


def test_a_row_is_given_to_a_new_sequence_while_its_old_one_is_still_in_flight() -> None:
    """One row: each sequence follows another that ended by EOS a step ago."""
    engine = engine_ahead(num_blocks=40, max_seqs=1)
    requests = [request(f"r{i}", prompt(4, i), 30, ignore_eos=False) for i in range(30)]
    for each in requests:
        engine.add_request(each)
    outputs = run(engine)
    for each in requests:
        assert tokens(outputs[each.request_id]) == expected_tokens(each.prompt_token_ids, each.sampling)


def test_generate_leaves_nothing_in_flight() -> None:
    engine = engine_ahead()
    for _ in range(3):
        for _ in engine.generate([request("a", prompt(5, 7), 20, ignore_eos=False)]):
            pass
        assert not engine.has_unfinished() and not device_of(engine)._waiting
