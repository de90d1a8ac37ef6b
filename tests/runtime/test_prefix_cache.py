"""Prefix cache in the engine loop: what hits, what is reported, and that every token stays right whatever happens."""

import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from simulated_device import (
    KV,
    VOCAB_SIZE,
    device_of,
    expected_tokens,
    request,
    run,
    simulated_engine,
    tokens,
)

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.errors import RequestError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest
from castiron.runtime.step_abi import CacheGroup

SLIDING = CacheGroup("sliding", "paged", block_size=4, table_width=0, window=10)
LATENT = CacheGroup("mla", "paged", block_size=8, table_width=0)
STATE = CacheGroup("gdn", "state", block_size=8, table_width=0)
GROUPS = {
    "full": (KV,),
    "window": (SLIDING,),
    "full and window": (KV, SLIDING),
    "full and state": (KV, STATE),
    "all kinds": (LATENT, STATE, SLIDING),
}


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + i * 7) % VOCAB_SIZE for i in range(length))


def answer(engine: LLMEngine, asked: AddRequest) -> int:
    """Run one request alone and check its tokens; how many of its prompt were cached."""
    engine.add_request(asked)
    outputs = run(engine)[asked.request_id]
    assert tokens(outputs) == expected_tokens(asked.prompt_token_ids, asked.sampling)
    assert len({output.num_cached_tokens for output in outputs}) == 1
    return outputs[0].num_cached_tokens


def test_a_second_request_computes_only_what_differs() -> None:
    engine = simulated_engine()
    device_of(engine).record = True
    assert answer(engine, request("a", prompt(18, 1), 4)) == 0
    assert answer(engine, request("b", prompt(18, 1), 4)) == 16
    assert device_of(engine).steps[4]["positions"].tolist() == [16, 17]
    assert answer(engine, request("c", prompt(10, 1) + prompt(9, 2), 4)) == 8
    stats = engine.stats()
    assert stats.num_prompt_tokens == 18 + 2 + 11
    assert (stats.num_cache_query_tokens, stats.num_cache_hit_tokens) == (18 + 18 + 19, 16 + 8)
    assert stats.num_cached_blocks == 5 + 3 and stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("length", range(7, 21))
def test_hits_are_whole_blocks_and_leave_a_token_at_every_length_around_a_block(length: int) -> None:
    engine = simulated_engine()
    assert answer(engine, request("cold", prompt(length, 1), 3)) == 0
    for name in ("hit", "again"):
        assert answer(engine, request(name, prompt(length, 1), 3)) == (length - 1) // 4 * 4


def test_the_answer_is_cached_too_so_a_conversation_goes_on_from_it() -> None:
    engine = simulated_engine()
    asked = request("first", prompt(9, 1), 8)
    answer(engine, asked)
    history = asked.prompt_token_ids + tuple(expected_tokens(asked.prompt_token_ids, asked.sampling))
    assert answer(engine, request("next", history + prompt(3, 4), 4)) == 16  # the last token wasn't computed


def test_a_hit_on_a_request_that_still_runs() -> None:
    engine = simulated_engine()
    first = request("first", prompt(17, 1), 20)
    engine.add_request(first)
    engine.step()
    second = request("second", prompt(17, 1), 3)
    engine.add_request(second)
    outputs = run(engine)
    assert outputs["second"][0].num_cached_tokens == 16
    assert tokens(outputs["second"]) == expected_tokens(second.prompt_token_ids, second.sampling)


def test_only_requests_of_the_same_salt_share() -> None:
    engine = simulated_engine()
    cached = [
        answer(engine, request(f"r{i}", prompt(17, 1), 2, cache_salt=salt))
        for i, salt in enumerate(("X", None, "X", "x", None, "cache_salt"))
    ]
    assert cached == [0, 0, 16, 0, 16, 0]


@pytest.mark.parametrize("salt", ["", "a" * 257, "line\nbreak", "\ud800", 5])
def test_a_salt_that_is_no_short_printable_text_is_refused(salt: object) -> None:
    engine = simulated_engine()
    with pytest.raises(RequestError, match="expected text of 1 to 256 printable") as error:
        engine.add_request(request("a", prompt(3), 2, cache_salt=salt))
    assert error.value.param == "cache_salt"
    engine.validate(request("a", prompt(3), 2, cache_salt="a" * 256))


def test_without_a_prefix_cache_everything_is_computed() -> None:
    engine = simulated_engine(options=EngineOptions(prefix_cache=False))
    assert not engine.info.prefix_cache
    assert [answer(engine, request(name, prompt(17, 1), 2)) for name in "ab"] == [0, 0]
    assert engine.stats().num_cached_blocks == engine.stats().num_cache_query_tokens == 0


def test_a_request_that_needs_all_its_logits_reads_no_cache_but_fills_it() -> None:
    """As for log probabilities of the prompt: twice the same, whatever is cached."""
    engine = simulated_engine()
    device_of(engine).record = True
    for name in ("a", "b"):
        engine.add_request(request(name, prompt(17, 1), 1))
        engine.scheduler._sequences[name].skip_cache_read = True
        assert run(engine)[name][0].num_cached_tokens == 0
        assert device_of(engine).steps[-1]["positions"].tolist() == list(range(17))
    assert engine.stats().num_cache_query_tokens == 0
    assert answer(engine, request("c", prompt(17, 1), 1)) == 16


def test_a_preempted_request_resumes_from_what_is_left_of_its_own_blocks() -> None:
    engine = simulated_engine(num_blocks=9, max_seqs=2)
    device_of(engine).record = True
    old, young = request("old", prompt(15, 1), 8), request("young", prompt(15, 2), 8)
    for each in (old, young):
        engine.add_request(each)
    outputs = run(engine)
    assert engine.stats().num_preemptions == 1
    for each in (old, young):
        assert tokens(outputs[each.request_id]) == expected_tokens(each.prompt_token_ids, each.sampling)
    # `old` took the last block of `young`'s four full ones and its partial one; the first three were still there
    steps = device_of(engine).steps
    resumed = next(s for s in steps[2:] if len(s["positions"]) > 2)
    assert resumed["positions"].tolist()[0] == 12 and len(resumed["seq_lens"]) == 1
    assert outputs["young"][-1].num_cached_tokens == 0, "of its prompt nothing was cached when it came"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_aborted_requests_confirmed_blocks_stay_findable(runs_ahead: bool) -> None:
    engine = simulated_engine(max_batched_tokens=8, runs_ahead=runs_ahead)
    engine.add_request(request("a", prompt(30, 1), 4))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    run(engine)
    cached = answer(engine, request("b", prompt(30, 1), 4))
    assert cached == (16 if runs_ahead else 24), "a step not read when it was aborted isn't confirmed"


def test_an_engine_that_runs_ahead_publishes_a_step_only_once_it_is_read() -> None:
    engine = simulated_engine(runs_ahead=True)
    engine.add_request(request("a", prompt(16, 1), 10))
    tokens_asked = np.array(prompt(17, 1), np.int32)
    engine.step()  # launched, not read
    assert engine.blocks.lookup(engine.blocks.new_keys(()), tokens_asked).num_tokens == 0
    engine.step()
    assert engine.blocks.lookup(engine.blocks.new_keys(()), tokens_asked).num_tokens == 16
    run(engine)


@pytest.mark.parametrize("kind", [name for name in GROUPS if name != "full"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_other_kinds_of_group_hit_as_far_as_all_can(kind: str, runs_ahead: bool) -> None:
    engine = simulated_engine(num_blocks=64, groups=GROUPS[kind], runs_ahead=runs_ahead)
    assert answer(engine, request("cold", prompt(45, 1), 6)) == 0
    step = 8 if "state" in kind or kind == "all kinds" else 4
    assert answer(engine, request("same", prompt(45, 1), 6)) == 44 // step * step
    hit = answer(engine, request("fork", prompt(35, 1) + prompt(9, 2), 6))
    assert hit == 32, "32 tokens were a chunk of the prompt: a checkpoint, and the window was still there"


@pytest.mark.parametrize("kind", ["window", "all kinds"])
def test_a_sliding_window_engine_serves_sequences_longer_than_its_cache(kind: str) -> None:
    """9 tokens before a token and two steps of 16 under way; the cache has 64 tokens' blocks, without the latents."""
    groups = (SLIDING,) if kind == "window" else (SLIDING, STATE)
    engine = simulated_engine(num_blocks=16, groups=groups, max_batched_tokens=16)
    assert engine.info.max_seq_len == 128 and engine.info.warnings == ()
    answer(engine, request("long", prompt(100, 1), 20))
    assert answer(engine, request("again", prompt(97, 1), 20)) >= 88


def _shared_workload(seed: int, count: int) -> list[AddRequest]:
    """Requests that share prefixes of all lengths with each other and with others' answers."""
    rng = random.Random(seed)
    requests: list[AddRequest] = []
    for i in range(count):
        start: tuple[int, ...] = ()
        if requests and rng.random() < 0.8:
            base = rng.choice(requests)
            start = base.prompt_token_ids
            if rng.random() < 0.4:
                start += tuple(expected_tokens(start, base.sampling))
            start = start[: rng.randint(0, len(start))][:60]
        requests.append(
            request(
                f"r{i}",
                start + prompt(rng.randint(0 if start else 1, 25), rng.randint(0, 999)),
                rng.choice((1, 2, 5, 17)),
                rng.choice((0, 0, -1)),
                temperature=rng.choice((0.0, 0.7)),
                seed=i,
                ignore_eos=rng.random() < 0.5,
                cache_salt=rng.choice((None, None, None, "X")),
            )
        )
    return requests


def _serve(engine: LLMEngine, requests: list[AddRequest], seed: int) -> None:
    """Requests arrive over time, some are aborted; every token must be right and nothing lost."""
    rng = random.Random(seed)
    waiting = list(requests)
    got: dict[str, list[int]] = {r.request_id: [] for r in requests}
    aborted: set[str] = set()
    for _ in range(3000):
        for _ in range(rng.choice((0, 0, 1, 4))):
            if waiting:
                engine.add_request(waiting.pop(0))
        if rng.random() < 0.05 and requests:
            victim = rng.choice(requests).request_id
            if engine.abort(victim):
                aborted.add(victim)
        if not waiting and not engine.has_unfinished():
            break
        for output in engine.step():
            got[output.request_id] += output.new_token_ids
        engine.scheduler.check_integrity()
    else:
        raise AssertionError("stalled")
    for r in requests:
        expected = expected_tokens(r.prompt_token_ids, r.sampling)
        mine = got[r.request_id]
        assert mine == (expected[: len(mine)] if r.request_id in aborted else expected)
    for group in engine.blocks.groups:
        assert group.pool.num_free == group.pool.num_blocks


_TRAFFIC = (st.sampled_from(sorted(GROUPS)), st.booleans(), st.integers(30, 90), st.integers(0, 10**6))


def serve_shared_prefixes(kind: str, runs_ahead: bool, num_blocks: int, seed: int) -> None:
    engine = simulated_engine(
        num_blocks, max_seqs=5, max_batched_tokens=24, runs_ahead=runs_ahead, groups=GROUPS[kind]
    )
    _serve(engine, _shared_workload(seed, 14), seed)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(*_TRAFFIC)
def test_requests_that_share_prefixes_get_what_each_gets_alone(
    kind: str, runs_ahead: bool, num_blocks: int, seed: int
) -> None:
    serve_shared_prefixes(kind, runs_ahead, num_blocks, seed)


@pytest.mark.long
@hypothesis.settings(max_examples=1500, deadline=None)
@hypothesis.given(*_TRAFFIC)
def test_hundreds_of_workloads_that_share_prefixes_stay_right(
    kind: str, runs_ahead: bool, num_blocks: int, seed: int
) -> None:
    serve_shared_prefixes(kind, runs_ahead, num_blocks, seed)
