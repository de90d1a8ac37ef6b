"""Who starts next: small requests pass a large one that waits, and it still starts in time; shared prompts run once."""

import pytest
from simulated_device import (
    VOCAB_SIZE,
    device_of,
    expected_tokens,
    request,
    run,
    simulated_engine,
    tokens,
)

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.llm_engine import LLMEngine


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + i * 7) % VOCAB_SIZE for i in range(length))


def step_with(engine: LLMEngine) -> list[str]:
    """One step; the requests that ended with it."""
    ended = [o.request_id for o in engine.step() if o.finish_reason]
    engine.scheduler.check_integrity()
    return ended


def run_to_end(engine: LLMEngine) -> list[str]:
    ended: list[str] = []
    while engine.has_unfinished():
        ended += step_with(engine)
    return ended


def started(engine: LLMEngine, request_id: str) -> bool:
    return engine.scheduler._sequences[request_id].row >= 0


def engine_with_large_one_waiting(max_tokens: int = 8) -> LLMEngine:
    """Eight blocks: `running` may hold five for up to `max_tokens` steps, `large` waits for seven."""
    engine = simulated_engine(num_blocks=8, max_seqs=4)
    engine.add_request(request("running", prompt(12, 1), max_tokens=max_tokens))
    engine.step()
    engine.add_request(request("large", prompt(25, 2), max_tokens=2))
    return engine


def test_a_small_request_passes_a_large_one_that_has_to_wait_longer_anyway() -> None:
    engine = engine_with_large_one_waiting()
    engine.add_request(request("small", prompt(1, 3), max_tokens=6))
    assert run_to_end(engine) == ["small", "running", "large"]


def test_a_small_request_that_would_make_the_large_one_later_waits_behind_it() -> None:
    engine = engine_with_large_one_waiting()
    engine.add_request(request("slow", prompt(1, 3), max_tokens=20))
    assert run_to_end(engine)[:2] == ["running", "large"]


def test_a_small_request_may_outlast_the_start_of_the_large_one_if_both_fit() -> None:
    engine = simulated_engine(num_blocks=12, max_seqs=4)
    engine.add_request(request("running", prompt(30, 1), max_tokens=8))  # 10 of 12 blocks in the end
    engine.step()
    engine.add_request(request("large", prompt(31, 2), max_tokens=2))  # 8
    engine.add_request(request("long", prompt(1, 3), max_tokens=15))  # 4: all that is left beside `large`
    engine.step()
    assert started(engine, "long") and not started(engine, "large")
    assert run_to_end(engine) == ["running", "large", "long"]


def test_a_large_request_starts_in_time_under_a_stream_of_small_ones() -> None:
    """A new small request every step, each short enough to pass: the large one's reservation holds."""
    engine = engine_with_large_one_waiting()
    running_ends = 8  # one step is done
    for number in range(60):
        if started(engine, "large"):
            break
        engine.add_request(request(f"small{number}", prompt(3, number + 5), max_tokens=3))
        step_with(engine)
    assert number <= running_ends + 1
    ended = run_to_end(engine)
    assert "large" in ended and sum(name.startswith("small") for name in ended) >= 3


def test_small_requests_do_not_starve_under_a_stream_of_large_ones() -> None:
    engine = simulated_engine(num_blocks=8, max_seqs=4)
    engine.add_request(request("large0", prompt(25, 50), max_tokens=4))
    engine.step()
    engine.add_request(request("small", prompt(9, 1), max_tokens=4))
    for number in range(1, 20):
        engine.add_request(request(f"large{number}", prompt(25, 50 + number), max_tokens=4))
    ended = run_to_end(engine)
    assert ended.index("small") <= 2


def test_a_more_urgent_request_that_fits_starts_before_the_large_one() -> None:
    engine = engine_with_large_one_waiting()
    engine.add_request(request("urgent", prompt(1, 3), max_tokens=30, priority=-1))
    engine.step()
    assert started(engine, "urgent") and not started(engine, "large")


def test_nobody_passes_once_the_reserved_step_has_come() -> None:
    """What runs ends when it said it would, but the large one had been promised that step before."""
    engine = engine_with_large_one_waiting(max_tokens=4)
    engine.add_request(request("first", prompt(1, 3), max_tokens=2))
    engine.step()
    large = engine.scheduler._sequences["large"]
    assert started(engine, "first") and large.start_by == 4
    large.start_by = 2  # as if it had been due by now
    engine.add_request(request("second", prompt(1, 4), max_tokens=1))
    engine.step()
    assert not started(engine, "second")


def test_n_answers_to_one_prompt_compute_it_once_and_share_its_blocks() -> None:
    engine = simulated_engine(num_blocks=40, max_seqs=8)
    device_of(engine).record = True
    many = [request(f"r{i}", prompt(22, 1), 5, temperature=1.0, seed=i) for i in range(6)]
    for each in many:
        engine.add_request(each)
    outputs = run(engine)
    for each in many:
        assert tokens(outputs[each.request_id]) == expected_tokens(each.prompt_token_ids, each.sampling)
    assert [outputs[f"r{i}"][0].num_cached_tokens for i in range(6)] == [0, 20, 20, 20, 20, 20]
    assert engine.stats().num_prompt_tokens == 22 + 5 * 2, "the last, partial block is computed by each"
    tables = device_of(engine).steps[2]["block_tables.kv"]
    assert (tables[:, :5] == tables[0, :5]).all() and len(set(tables[:, 5].tolist())) == 6


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_burst_with_one_long_system_prompt_computes_it_once(runs_ahead: bool) -> None:
    engine = simulated_engine(num_blocks=120, max_seqs=8, max_batched_tokens=16, runs_ahead=runs_ahead)
    many = [request(f"r{i}", prompt(60, 1) + prompt(5 + i, i + 2), 3) for i in range(6)]
    for each in many:
        engine.add_request(each)
    outputs = run(engine)
    for each in many:
        assert tokens(outputs[each.request_id]) == expected_tokens(each.prompt_token_ids, each.sampling)
    assert engine.stats().num_prompt_tokens == 60 + sum(5 + i for i in range(6))


def test_requests_with_little_in_common_do_not_wait_for_each_other() -> None:
    engine = simulated_engine(num_blocks=64, max_seqs=8)
    engine.add_request(request("a", prompt(4, 1) + prompt(9, 2), 2))
    engine.add_request(request("b", prompt(4, 1) + prompt(9, 3), 2))
    engine.step()
    assert started(engine, "a") and started(engine, "b")
    run(engine)


def test_whoever_waits_for_a_prefix_goes_on_when_its_producer_is_aborted() -> None:
    engine = simulated_engine(num_blocks=64, max_seqs=8, max_batched_tokens=8)
    same = prompt(40, 1)
    engine.add_request(request("first", same, 2))
    engine.add_request(request("second", same, 2))
    engine.step()
    assert not started(engine, "second")
    engine.abort("first")
    outputs = run(engine)
    assert tokens(outputs["second"]) == expected_tokens(same, request("x", same, 2).sampling)
    assert outputs["second"][0].num_cached_tokens == 8, "what was confirmed of the first stays"


def test_without_a_prefix_cache_nobody_waits_for_a_prefix() -> None:
    engine = simulated_engine(options=EngineOptions(prefix_cache=False))
    for name in "ab":
        engine.add_request(request(name, prompt(20, 1), 2))
    engine.step()
    assert engine.stats().num_running == 2
    run(engine)
