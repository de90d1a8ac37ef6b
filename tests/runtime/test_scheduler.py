"""Scheduler: exact tokens, rows and blocks of each step, preemption, fairness and freedom from stalls."""

import hypothesis
import pytest
from hypothesis import strategies as st
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

from castiron.runtime.errors import RequestError
from castiron.runtime.llm_engine import LLMEngine


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + i * 7) % VOCAB_SIZE for i in range(length))


def step_lengths(engine: LLMEngine) -> list[list[int]]:
    """Query lengths of each recorded step."""
    return [(s["query_starts"][1:] - s["query_starts"][:-1]).tolist() for s in device_of(engine).steps]


def recording_engine(**sizes: int) -> LLMEngine:
    engine = simulated_engine(**sizes)
    device_of(engine).record = True
    return engine


def test_a_prompt_is_computed_in_chunks_of_the_budget_then_token_by_token() -> None:
    engine = recording_engine(max_seqs=2, max_batched_tokens=8)
    engine.add_request(request("a", prompt(19), max_tokens=3))
    run(engine)
    assert step_lengths(engine) == [[8], [8], [3], [1], [1]]
    steps = device_of(engine).steps
    assert [s["positions"][0] for s in steps] == [0, 8, 16, 19, 20]
    assert [s["seq_lens"].tolist() for s in steps] == [[8], [16], [19], [20], [21]]


def test_only_the_last_chunk_of_a_prompt_is_sampled() -> None:
    engine = recording_engine(max_seqs=2, max_batched_tokens=8)
    engine.add_request(request("a", prompt(19), max_tokens=2))
    outputs = run(engine)["a"]
    assert len(outputs) == 2
    assert device_of(engine).launches == [
        ("forward.mixed", None),
        ("forward.mixed", None),
        ("forward.mixed", "sample.greedy.mixed"),
        ("forward.decode", "sample.greedy.decode"),
    ]
    assert [s["sample_rows"].tolist() for s in device_of(engine).steps] == [[-1], [-1], [0], [0]]


def test_decoding_rows_come_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    engine = recording_engine(max_seqs=4, max_batched_tokens=8)
    engine.add_request(request("a", prompt(3, 1), max_tokens=5))
    engine.step()
    engine.add_request(request("b", prompt(12, 2), max_tokens=2))
    run(engine)
    assert step_lengths(engine) == [[3], [1, 7], [1, 5], [1, 1], [1]]
    assert device_of(engine).steps[1]["row_ids"].tolist() == [0, 1]


def test_a_prefill_does_not_hold_up_decoding_even_if_it_is_more_urgent() -> None:
    engine = recording_engine(max_seqs=4, max_batched_tokens=8)
    engine.add_request(request("decoding", prompt(2, 2), max_tokens=9))
    engine.step()
    engine.add_request(request("late", prompt(9, 4), max_tokens=1))
    engine.add_request(request("urgent", prompt(17, 3), max_tokens=1, priority=-2))
    run(engine)
    assert step_lengths(engine)[:6] == [[2], [1, 7], [1, 7], [1, 3, 4], [1, 5], [1]]
    assert [s["row_ids"].tolist() for s in device_of(engine).steps[1:5]] == [
        [0, 1],
        [0, 1],
        [0, 1, 2],
        [0, 2],
    ]


def test_the_decode_plan_serves_steps_of_one_token_each_and_mixed_the_others() -> None:
    engine = recording_engine(max_seqs=4, max_batched_tokens=16)
    engine.add_request(request("a", prompt(4, 1), max_tokens=4))
    engine.step()
    engine.step()
    engine.add_request(request("b", prompt(4, 2), max_tokens=2))
    run(engine)
    assert [name for name, _ in device_of(engine).launches] == [
        "forward.mixed",
        "forward.decode",
        "forward.mixed",
        "forward.decode",
    ]


def test_blocks_and_slots_of_each_step_are_exactly_these() -> None:
    engine = recording_engine(num_blocks=8, max_seqs=2, max_batched_tokens=8)
    engine.add_request(request("a", prompt(6, 1), max_tokens=4))
    engine.add_request(request("b", prompt(3, 2), max_tokens=3))
    run(engine)
    steps = device_of(engine).steps
    assert [s["block_tables.kv"][:, :4].tolist() for s in steps] == [
        [[0, 1, -1, -1], [2, -1, -1, -1]],  # a: 6 tokens, b: 2 of 3
        [[0, 1, -1, -1], [2, -1, -1, -1]],  # a's 7th, b's last prompt token
        [[0, 1, -1, -1], [2, -1, -1, -1]],  # a's 8th, b's 4th
        [[0, 1, 3, -1], [2, 4, -1, -1]],  # a's 9th, b's 5th
    ]
    assert steps[0]["slot_mapping.kv"].tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert steps[1]["slot_mapping.kv"].tolist() == [6, 10]
    assert steps[2]["slot_mapping.kv"].tolist() == [7, 11]
    assert steps[3]["slot_mapping.kv"].tolist() == [12, 16]
    engine.add_request(request("c", prompt(9, 3), max_tokens=1))
    run(engine)  # 5, 6, 7 come before the blocks that were given back
    assert device_of(engine).steps[-1]["block_tables.kv"][0, :4].tolist() == [5, 6, 7, -1]
    engine.add_request(request("d", prompt(24, 4), max_tokens=1))
    run(engine)  # those with partial blocks of a, b, c; then full ones, a's last one first, and b's
    assert device_of(engine).steps[-1]["block_tables.kv"][0, :6].tolist() == [3, 4, 7, 1, 0, 2]


def test_requests_start_in_order_of_priority_then_arrival() -> None:
    engine = simulated_engine(max_seqs=1)
    for name, priority in (("c", 5), ("d", 5), ("a", -3), ("b", 0)):
        engine.add_request(request(name, prompt(3, ord(name)), max_tokens=2, priority=priority))
    finished = [o.request_id for o in iter_outputs(engine) if o.finish_reason]
    assert finished == ["a", "b", "c", "d"]


def iter_outputs(engine: LLMEngine):  # type: ignore[no-untyped-def]
    while engine.has_unfinished():
        yield from engine.step()
        engine.scheduler.check_integrity()


def test_all_running_at_a_block_boundary_with_no_free_block_preempts_the_youngest() -> None:
    engine = simulated_engine(num_blocks=4, max_seqs=2)
    requests = [request("old", prompt(7, 1), max_tokens=8), request("young", prompt(7, 2), max_tokens=8)]
    for r in requests:
        engine.add_request(r)
    preempted_at = None
    outputs: dict[str, list[int]] = {"old": [], "young": []}
    for output in iter_outputs(engine):
        outputs[output.request_id] += output.new_token_ids
        if preempted_at is None and engine.scheduler.num_preemptions:
            preempted_at = {name: len(ids) for name, ids in outputs.items()}
    assert engine.scheduler.num_preemptions == 1
    assert preempted_at == {"old": 3, "young": 2}  # both had 8 tokens cached in 4 blocks; the older went on
    for r in requests:
        assert outputs[r.request_id] == expected_tokens(r.prompt_token_ids, r.sampling)


def test_the_lowest_priority_is_preempted_even_if_it_is_the_oldest() -> None:
    engine = simulated_engine(num_blocks=4, max_seqs=2)
    low = request("low", prompt(7, 1), max_tokens=8, priority=9)
    high = request("high", prompt(7, 2), max_tokens=8)
    engine.add_request(low)
    engine.add_request(high)
    finished = [o.request_id for o in iter_outputs(engine) if o.finish_reason]
    assert finished == ["high", "low"] and engine.scheduler.num_preemptions == 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_preempted_requests_resume_with_the_same_tokens(temperature: float) -> None:
    engine = simulated_engine(num_blocks=12, max_seqs=6, max_batched_tokens=16)
    requests = [
        request(f"r{i}", prompt(5 + i, i), max_tokens=25, temperature=temperature, seed=i) for i in range(6)
    ]
    for r in requests:
        engine.add_request(r)
    outputs = run(engine)
    assert engine.scheduler.num_preemptions >= 3
    for r in requests:
        assert tokens(outputs[r.request_id]) == expected_tokens(r.prompt_token_ids, r.sampling)


def test_a_prompt_larger_than_the_pool_is_refused_at_once_while_others_run() -> None:
    engine = simulated_engine(num_blocks=16, max_seqs=4, max_seq_len=128)
    assert engine.info.max_seq_len == 64  # what 16 blocks of 4 hold
    assert "64 tokens" in engine.info.warnings[0] and "128" in engine.info.warnings[0]
    running = request("running", prompt(20, 1), max_tokens=10)
    engine.add_request(running)
    engine.step()
    with pytest.raises(RequestError, match="65 tokens, a sequence may have 64") as error:
        engine.add_request(request("large", prompt(65, 2), max_tokens=1))
    assert error.value.param == "prompt"
    fits = request("fits", prompt(60, 3), max_tokens=4)
    engine.add_request(fits)
    outputs = run(engine)
    assert len(tokens(outputs["running"])) == 9  # one came before `run`
    assert tokens(outputs["fits"]) == expected_tokens(fits.prompt_token_ids, fits.sampling)


def test_abort_frees_rows_and_blocks_at_once_wherever_the_request_is() -> None:
    engine = simulated_engine(num_blocks=16, max_seqs=2, max_batched_tokens=8)
    for name, length in (("decoding", 4), ("prefilling", 30), ("waiting", 4)):
        engine.add_request(request(name, prompt(length, length), max_tokens=20))
    engine.step()
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)
    assert engine.abort("waiting") and engine.stats().num_waiting == 0
    assert engine.abort("prefilling") and engine.abort("decoding")
    assert engine.stats().num_running == 0 and engine.blocks.num_free_blocks == 16
    engine.scheduler.check_integrity()
    assert not engine.abort("waiting") and not engine.abort("unknown")
    ends = engine.step()
    assert {(o.request_id, o.finish_reason) for o in ends} == {
        ("waiting", "abort"),
        ("prefilling", "abort"),
        ("decoding", "abort"),
    }
    assert not engine.has_unfinished() and engine.stats().num_aborted == 3


def test_abort_of_a_preempted_request_leaves_nothing_behind() -> None:
    engine = simulated_engine(num_blocks=4, max_seqs=2)
    engine.add_request(request("old", prompt(7, 1), max_tokens=8))
    engine.add_request(request("young", prompt(7, 2), max_tokens=8))
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert engine.abort("young")
    outputs = run(engine)
    assert outputs["young"][-1].finish_reason == "abort"
    assert outputs["old"][-1].finish_reason == "length"


def test_an_id_can_be_used_again_while_its_aborted_entry_still_waits_in_the_queue() -> None:
    engine = simulated_engine(max_seqs=1)
    engine.add_request(request("busy", prompt(3, 1), max_tokens=6))
    engine.step()
    engine.add_request(request("x", prompt(3, 2), max_tokens=2))
    engine.abort("x")
    again = request("x", prompt(5, 4), max_tokens=3)
    engine.add_request(again)
    outputs = run(engine)["x"]
    assert outputs[0].finish_reason == "abort"
    assert tokens(outputs) == expected_tokens(again.prompt_token_ids, again.sampling)


_REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt length
        st.integers(1, 24),  # max_tokens
        st.sampled_from([0, 0, 0, -1, 3]),  # priority
        st.integers(0, 12),  # steps before it arrives
        st.sampled_from([None, None, None, 1, 4]),  # steps before it is aborted
        st.booleans(),  # random sampling
    ),
    min_size=1,
    max_size=12,
)


Workload = list[tuple[int, int, int, int, int | None, bool]]
_SIZES = (st.integers(16, 40), st.integers(1, 6), st.integers(6, 24))  # blocks, sequences, tokens a step


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(_REQUESTS, *_SIZES)
def test_any_workload_ends_with_every_request_right_and_nothing_leaked(
    workload: Workload, num_blocks: int, max_seqs: int, max_batched_tokens: int
) -> None:
    serve_and_check(workload, num_blocks, max_seqs, max_batched_tokens)


@pytest.mark.long
@hypothesis.settings(max_examples=600, deadline=None)
@hypothesis.given(_REQUESTS, *_SIZES)
def test_hundreds_of_workloads_end_with_every_request_right_and_nothing_leaked(
    workload: Workload, num_blocks: int, max_seqs: int, max_batched_tokens: int
) -> None:
    serve_and_check(workload, num_blocks, max_seqs, max_batched_tokens)


def serve_and_check(workload: Workload, num_blocks: int, max_seqs: int, max_batched_tokens: int) -> None:
    """Requests arrive and are aborted at their steps; every step makes progress, every token is right."""
    engine = simulated_engine(num_blocks, max_seqs, max_seq_len=64, max_batched_tokens=max_batched_tokens)
    requests, outputs, num_steps = {}, {}, 0
    arrivals = sorted(enumerate(workload), key=lambda item: item[1][3])
    aborts: list[tuple[int, str]] = []
    while arrivals or engine.has_unfinished():
        while arrivals and arrivals[0][1][3] <= num_steps:
            index, (length, max_tokens, priority, _, abort_after, is_random) = arrivals.pop(0)
            r = request(
                f"r{index}",
                prompt(length, index),
                max_tokens,
                priority,
                ignore_eos=index % 2 == 0,
                temperature=0.8 if is_random else 0.0,
                seed=index,
            )
            engine.add_request(r)
            requests[r.request_id], outputs[r.request_id] = r, []
            if abort_after is not None:
                aborts.append((num_steps + abort_after, r.request_id))
        for when, request_id in aborts:
            if when == num_steps:
                engine.abort(request_id)
        progress = engine.stats()
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check_integrity()
        if engine.has_unfinished():
            after = engine.stats()
            assert after.num_steps == progress.num_steps + 1, "no step is empty"
        num_steps += 1
        assert num_steps < 3000, "stalled"
    assert engine.blocks.num_free_blocks == num_blocks and engine.rows.num_free == max_seqs
    for request_id, r in requests.items():
        right = expected_tokens(r.prompt_token_ids, r.sampling)
        got = tokens(outputs[request_id])
        reasons = [o.finish_reason for o in outputs[request_id] if o.finish_reason]
        assert len(reasons) == 1
        if reasons == ["abort"]:
            assert got == right[: len(got)]
        else:
            assert got == right
            assert reasons == [
                "stop" if not r.sampling.ignore_eos and right[-1] == EOS_TOKEN_ID else "length"
            ]
