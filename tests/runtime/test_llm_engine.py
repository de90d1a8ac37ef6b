"""LLMEngine: what requests may ask, what they get, and that they don't disturb each other."""

import math

import msgspec
import numpy as np
import pytest
from simulated_device import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    device_of,
    expected_tokens,
    logits_of,
    prefix_hashes,
    request,
    run,
    simulated_engine,
    tokens,
)

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.errors import RequestError, WorkFailedError
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + i * 7) % VOCAB_SIZE for i in range(length))


def prompt_ending_soon(max_tokens: int) -> tuple[int, ...]:
    """A prompt whose greedy output has EOS after one token and before `max_tokens`."""
    for salt in range(2000):
        candidate = (*prompt(5, salt), salt % VOCAB_SIZE)
        output = expected_tokens(candidate, SamplingParams(max_tokens=max_tokens))
        if output[-1] == EOS_TOKEN_ID and 2 <= len(output) < max_tokens:
            return candidate
    raise AssertionError("no such prompt")


def test_sixteen_concurrent_requests_equal_each_alone() -> None:
    requests = [
        request(f"r{i}", prompt(1 + 5 * i, i), 20, temperature=0.9 * (i % 3 == 0), seed=i) for i in range(16)
    ]
    together = simulated_engine(num_blocks=500, max_seqs=16, max_batched_tokens=48)
    for r in requests:
        together.add_request(r)
    outputs = run(together)
    for r in requests:
        alone = simulated_engine(num_blocks=500, max_seqs=16, max_batched_tokens=256)
        alone.add_request(r)
        assert tokens(outputs[r.request_id]) == tokens(run(alone)[r.request_id])
        assert tokens(outputs[r.request_id]) == expected_tokens(r.prompt_token_ids, r.sampling)


def test_a_step_samples_greedily_unless_a_row_of_it_is_random() -> None:
    engine = simulated_engine()
    engine.add_request(request("greedy", prompt(3, 1), max_tokens=4))
    engine.add_request(request("random", prompt(3, 2), max_tokens=2, temperature=1.0))
    run(engine)
    assert [name for _, name in device_of(engine).launches] == [
        "sample.random.mixed",
        "sample.random.decode",
        "sample.greedy.decode",
        "sample.greedy.decode",
    ]


@pytest.mark.parametrize(
    "changed", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"seed": 8}, {"temperature": 0.6}]
)
def test_every_sampling_parameter_reaches_the_device(changed: dict[str, float]) -> None:
    parameters: dict[str, float] = {"temperature": 0.9, "seed": 7, **changed}
    engine = simulated_engine()
    base = request("base", prompt(4), 12, temperature=0.9, seed=7)
    other = request("other", prompt(4), 12, **parameters)
    engine.add_request(base)
    engine.add_request(other)
    outputs = run(engine)
    assert tokens(outputs["other"]) == expected_tokens(prompt(4), other.sampling)
    assert tokens(outputs["other"]) != tokens(outputs["base"])


def test_without_a_seed_each_request_draws_its_own() -> None:
    engine = simulated_engine()
    for name in "ab":
        engine.add_request(request(name, prompt(4), 24, temperature=1.0))
    outputs = run(engine)
    assert tokens(outputs["a"]) != tokens(outputs["b"])


def test_eos_ends_a_request_and_is_its_last_token() -> None:
    ending = prompt_ending_soon(20)
    engine = simulated_engine()
    engine.add_request(request("a", ending, 20, ignore_eos=False))
    outputs = run(engine)["a"]
    assert tokens(outputs)[-1] == EOS_TOKEN_ID and EOS_TOKEN_ID not in tokens(outputs)[:-1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", EOS_TOKEN_ID)
    assert all(o.finish_reason is None and o.stop_token_id is None for o in outputs[:-1])


def test_ignored_eos_does_not_end_a_request_but_stop_tokens_still_do() -> None:
    ending = prompt_ending_soon(20)
    engine = simulated_engine()
    engine.add_request(request("runs on", ending, 20, ignore_eos=True))
    engine.add_request(request("stops", ending, 20, ignore_eos=True, stop_token_ids=(EOS_TOKEN_ID,)))
    outputs = run(engine)
    assert len(tokens(outputs["runs on"])) == 20 and outputs["runs on"][-1].finish_reason == "length"
    assert outputs["stops"][-1].stop_token_id == EOS_TOKEN_ID


def test_a_stop_token_ends_a_request_with_its_own_id() -> None:
    output = expected_tokens(prompt(6), SamplingParams(max_tokens=10, ignore_eos=True))
    stop = output[4]
    engine = simulated_engine()
    engine.add_request(request("a", prompt(6), 10, stop_token_ids=(stop,)))
    outputs = run(engine)["a"]
    assert tokens(outputs) == output[: output.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", stop)


def test_max_tokens_ends_a_request_with_reason_length() -> None:
    engine = simulated_engine()
    engine.add_request(request("a", prompt(6), 3))
    outputs = run(engine)["a"]
    assert len(tokens(outputs)) == 3
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("length", None)


def test_a_request_may_fill_the_whole_length_and_the_whole_cache() -> None:
    engine = simulated_engine(num_blocks=8, max_seq_len=32)
    full = request("a", prompt(31), 1)
    engine.add_request(full)
    longest = request("b", prompt(1), 31)
    engine.add_request(longest)
    outputs = run(engine)
    assert tokens(outputs["a"]) == expected_tokens(full.prompt_token_ids, full.sampling)
    assert tokens(outputs["b"]) == expected_tokens(longest.prompt_token_ids, longest.sampling)


@pytest.mark.parametrize("num_logprobs", [0, 1, 3, 20])
def test_logprobs_are_of_the_raw_distribution_and_as_many_as_asked(num_logprobs: int) -> None:
    engine = simulated_engine()
    engine.add_request(request("a", prompt(5), 3, logprobs=num_logprobs, temperature=2.0, seed=1))
    engine.add_request(request("silent", prompt(5, 1), 3))
    outputs = run(engine)
    assert all(o.logprobs == () for o in outputs["silent"])
    content = list(prompt(5))
    for output in outputs["a"]:
        logits = logits_of(prefix_hashes(np.array(content))[-1]).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        (got,) = output.logprobs
        assert math.isclose(got.sampled, logprobs[output.new_token_ids[0]], rel_tol=1e-4)
        assert got.top_token_ids == tuple(np.argsort(-logprobs, kind="stable")[:num_logprobs].tolist())
        assert np.allclose(got.top_logprobs, -np.sort(-logprobs)[:num_logprobs], atol=1e-4)
        content += output.new_token_ids


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"prompt": ()}, "prompt", "empty"),
        ({"prompt": (1, -1)}, "prompt", "token id -1, expected integers from 0 to 96"),
        ({"prompt": (1, VOCAB_SIZE)}, "prompt", "token id 97"),
        ({"prompt": (2**40,)}, "prompt", "token id 1099511627776"),
        ({"prompt": (2**70,)}, "prompt", "token id 1180591620717411303424"),
        ({"prompt": (1.5,)}, "prompt", "token id 1.5"),
        ({"prompt": (True,)}, "prompt", "token id True"),
        ({"prompt": ("a",)}, "prompt", "token id 'a'"),
        ({"prompt": ((1, 2), (3,))}, "prompt", "expected integers"),
        ({"prompt": ((1, 2), (3, 4))}, "prompt", "expected integers"),
        (
            {"prompt": prompt(129)},
            "prompt",
            "129 tokens, a sequence may have 128 with at least 1 new one: shorten the prompt to 127 tokens",
        ),
        ({"prompt": prompt(128)}, "prompt", "128 tokens"),
        (
            {"prompt": prompt(125)},
            "max_tokens",
            "together 129; a sequence may have 128: lower `max_tokens` to 3",
        ),
        ({"max_tokens": 0}, "max_tokens", "`max_tokens` is 0"),
        ({"max_tokens": 2**31 - 1}, "max_tokens", "`max_tokens` is 2147483647"),
        ({"min_tokens": 2}, "min_tokens", "no kernels for it"),
        ({"temperature": -1.0}, "temperature", "`temperature` is -1.0"),
        ({"temperature": math.nan}, "temperature", "`temperature` is nan"),
        ({"top_p": 0.0}, "top_p", "`top_p` is 0.0"),
        ({"logprobs": 21}, "logprobs", "`logprobs` is 21"),
        ({"seed": 2**64}, "seed", "`seed` is"),
        ({"seed": -(2**63) - 1}, "seed", "`seed` is"),
        ({"top_k": -2}, "top_k", "`top_k` is -2"),
        ({"stop_token_ids": (97,)}, "stop_token_ids", "token id 97"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_field_and_nothing_changes(
    changes: dict[str, object], param: str, message: str
) -> None:
    engine = simulated_engine()
    settings = {"prompt": prompt(3), "max_tokens": 4} | changes
    ids = settings.pop("prompt")
    bad = AddRequest("bad", ids, SamplingParams(**settings))  # type: ignore[arg-type]
    for act in (engine.validate, engine.add_request):
        with pytest.raises(RequestError) as error:
            act(bad)
        assert error.value.param == param and message in str(error.value) and "\n" not in str(error.value)
    assert not engine.has_unfinished()


def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = simulated_engine()
    engine.add_request(request("a", prompt(3), 2))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request(request("a", prompt(4), 2))
    run(engine)
    engine.add_request(request("a", prompt(4), 2))
    assert len(tokens(run(engine)["a"])) == 2


def test_random_sampling_is_refused_by_an_engine_without_it() -> None:
    engine = simulated_engine()
    engine.info = msgspec.structs.replace(engine.info, sample_variants=("greedy",))
    with pytest.raises(RequestError, match="samples greedily only"):
        engine.validate(request("a", prompt(3), temperature=0.5))
    engine.validate(request("a", prompt(3)))


def test_generate_yields_until_all_are_done_and_leaving_early_aborts_the_rest() -> None:
    engine = simulated_engine()
    requests = [request("a", prompt(3), 2), request("b", prompt(4), 30)]
    outputs = list(engine.generate(requests))
    assert [len(tokens([o for o in outputs if o.request_id == n])) for n in "ab"] == [2, 30]
    for output in engine.generate(requests):
        if output.finish_reason:
            break
    assert output.request_id == "a"
    assert engine.stats().num_aborted == 1 and not engine.has_unfinished()
    assert {o.request_id for o in engine.generate([request("c", prompt(3), 2)])} == {"c"}


def test_generate_runs_nothing_if_one_request_is_refused() -> None:
    engine = simulated_engine()
    with pytest.raises(RequestError):
        list(engine.generate([request("a", prompt(3)), request("b", ())]))
    run(engine)
    assert device_of(engine).launches == []


def test_a_negative_seed_is_its_twos_complement_and_a_top_k_of_minus_1_is_off() -> None:
    engine = simulated_engine()
    engine.add_request(request("negative", prompt(5), 8, temperature=1.0, seed=-3, top_k=-1))
    sampling = SamplingParams(temperature=1.0, seed=2**64 - 3, max_tokens=8, ignore_eos=True)
    assert tokens(run(engine)["negative"]) == expected_tokens(prompt(5), sampling)


def test_lowered_limits_hold() -> None:
    options = EngineOptions(max_seqs=2, max_seq_len=40, max_batched_tokens=8)
    engine = simulated_engine(options=options)
    device_of(engine).record = True
    assert (engine.info.max_seqs, engine.info.max_seq_len, engine.info.max_batched_tokens) == (2, 40, 8)
    with pytest.raises(RequestError, match="together 41; a sequence may have 40"):
        engine.validate(request("long", prompt(38), 3))
    for i in range(5):
        engine.add_request(request(f"r{i}", prompt(11, i), 5))
    run(engine)
    for step in device_of(engine).steps:
        assert len(step["token_ids"]) <= 8 and len(step["row_ids"]) <= 2


def test_stats_count_tokens_steps_and_blocks() -> None:
    engine = simulated_engine(num_blocks=20, max_batched_tokens=8)
    engine.add_request(request("a", prompt(10), 5))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks) == (1, 0, 20, 18)
    run(engine)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generated_tokens) == (6, 10, 5)
    assert (stats.num_finished, stats.num_aborted, stats.num_preemptions) == (1, 0, 0)
    assert stats.num_free_blocks == 20 and stats.busy_s > 0


def test_a_device_failure_leaves_step_as_an_error() -> None:
    engine = simulated_engine()
    device_of(engine).fail_at_launch = 1
    engine.add_request(request("a", prompt(3), 5))
    engine.step()
    with pytest.raises(WorkFailedError):
        engine.step()


def test_token_ids_from_an_earlier_step_on_the_device_are_the_ones_the_host_saw() -> None:
    engine = simulated_engine()
    engine.add_request(request("a", prompt(3), 6))
    engine.add_request(request("b", prompt(5, 1), 6))
    while engine.has_unfinished():
        outputs = engine.step()
        for output in outputs:
            row = {"a": 0, "b": 1}[output.request_id]
            assert device_of(engine).last_token[row] == output.new_token_ids[0]
