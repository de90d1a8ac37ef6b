"""LLM, the engine as a Python object."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

import castiron
from castiron.runtime.errors import EngineFormatError, InputError, RequestError
from castiron.server.async_llm import AsyncLLM
from castiron.server.generated_text import TextDelta
from castiron.server.llm import LLM
from castiron.server.llm_sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_chat_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_chat_engine, max_seqs=4) as llm:
        yield llm


def test_it_is_what_castiron_exports() -> None:
    assert castiron.LLM is LLM and castiron.AsyncLLM is AsyncLLM and castiron.SamplingParams is SamplingParams


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a", "bcd", "hello there", "x" * 40, [5, 6, 7]]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert together[4].prompt_token_ids == (5, 6, 7)
    assert all(answer.finish_reason == "length" and len(answer.token_ids) == 8 for answer in together)


def test_a_stop_string_ends_one_answer_and_not_the_others(llm: LLM) -> None:
    whole = llm.generate(["a", "bcd"], GREEDY)
    stop = whole[0].text[2:4]
    assert stop and stop not in whole[1].text
    cut, other = llm.generate(["a", "bcd"], GREEDY, stop=stop)
    assert cut.text == whole[0].text[: whole[0].text.index(stop)] and cut.finish_reason == "stop"
    assert other == whole[1]
    assert llm.generate("a", GREEDY)[0] == whole[0]  # nothing is left over from the aborted one


def test_logprobs_come_if_asked_for(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=3, logprobs=4, ignore_eos=True)
    (answer,) = llm.generate("a", sampling)
    assert [logprob.top_token_ids[0] for logprob in answer.logprobs] == list(answer.token_ids)


def test_a_conversation_is_answered_through_the_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "hi<|end|>"}], GREEDY)
    assert answer.prompt_token_ids.count(256) == 1
    left = llm.info.max_seq_len - len(answer.prompt_token_ids)
    assert 1 <= len(llm.chat([{"role": "user", "content": "hi"}]).token_ids) <= left + 10


def test_several_conversations_are_answered_in_their_order(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("hi", "who are you?", "bye")]
    together = llm.chat(conversations, GREEDY)
    assert together == [llm.chat(conversation, GREEDY) for conversation in conversations]
    different = llm.chat(conversations[:2], [GREEDY, SamplingParams(max_tokens=2, ignore_eos=True)])
    assert [len(answer.token_ids) for answer in different] == [8, 2]
    with pytest.raises(InputError, match="2 sampling_params for 3 prompts"):
        llm.chat(conversations, [GREEDY, GREEDY])


def test_progress_is_shown_where_it_is_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY)  # no terminal
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b", "c"], GREEDY, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "3/3" in err
    llm.generate(["a", "b", "c"], GREEDY, progress=False)
    assert capsys.readouterr() == ("", "")


def test_an_engine_process_streams_to_many_tasks_what_llm_answers(llm: LLM, tiny_chat_engine: Path) -> None:
    prompts = ["a", "bcd", "hello there"]
    expected = llm.generate(prompts, GREEDY)
    conversation = [{"role": "user", "content": "hi"}]
    talk = llm.chat(conversation, GREEDY)

    async def collect(stream: AsyncGenerator[TextDelta, None]) -> list[TextDelta]:
        return [delta async for delta in stream]

    async def work() -> None:
        async with await AsyncLLM.start(tiny_chat_engine, max_seqs=4) as served:
            streams = [served.generate(prompt, GREEDY) for prompt in prompts]
            answers = await asyncio.gather(*map(collect, [*streams, served.chat(conversation, GREEDY)]))
            for deltas, wanted in zip(answers, [*expected, talk], strict=True):
                assert "".join(delta.text for delta in deltas) == wanted.text
                assert tuple(t for delta in deltas for t in delta.token_ids) == wanted.token_ids
                assert [delta.finish_reason for delta in deltas] == [None] * 7 + ["length"]
            cut = await collect(served.generate("a", GREEDY, stop=expected[0].text[2:4]))
            assert cut[-1].finish_reason == "stop"
            early = served.generate("a", SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(early)
            await early.aclose()
            with pytest.raises(RequestError, match="empty"):
                served.generate("")
            with pytest.raises(RequestError, match="`top_p`"):
                served.generate("a", SamplingParams(top_p=2.0))
            assert served.info.max_seqs == 4
        with pytest.raises(InputError, match="max_seqs"):
            await AsyncLLM.start(tiny_chat_engine, max_seq=4)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_wrong_use_is_a_named_error(llm: LLM, tiny_chat_engine: Path, tmp_path: Path) -> None:
    for prompt in ("", [], [[]], [-1], [307], [1.5]):
        with pytest.raises(RequestError):
            llm.generate([prompt] if prompt == [] else prompt, GREEDY)  # type: ignore[arg-type, list-item]
    for prompt in (None, 5, {"a": 1}, b"a", [None], ["a", None], ["a", 5], [{"a": 1}]):
        with pytest.raises(RequestError):
            llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
    for messages in (
        None,
        5,
        [],
        ["hi"],
        {"role": "user", "content": "hi"},
        [{"content": "hi"}],
        [{"role": "user"}],
    ):
        with pytest.raises(RequestError):
            llm.chat(messages)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        llm.generate("a", SamplingParams(temperature=-1))
    with pytest.raises(InputError, match="unknown engine option 'max_sequences': did you mean 'max_seqs'"):
        LLM(tiny_chat_engine, max_sequences=2)
    with pytest.raises(InputError, match="`max_seqs` is 100000, the engine was built for"):
        LLM(tiny_chat_engine, max_seqs=100000)
    with pytest.raises(InputError, match="wrong type"):
        LLM(tiny_chat_engine, max_seqs="2")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sampling_params is a dict, expected"):
        llm.generate("a", {"temperature": 1})  # type: ignore[arg-type]
    with pytest.raises((InputError, EngineFormatError)):
        LLM(tmp_path / "none.engine")
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stops": ["x"]}, "unknown sampling parameter 'stops': did you mean 'stop'"),
        ({"max_token": 3}, "unknown sampling parameter 'max_token': did you mean 'max_tokens'"),
        ({"best_of": 3}, "unknown sampling parameter 'best_of', expected one of temperature, .*stop"),
        ({"temperature": "hot"}, "temperature: expected `float`, got `str`"),
        ({"top_p": 2}, "`top_p` is 2.0"),
        ({"stop": [""]}, "a stop string has 0 characters"),
        ({"stop": [5]}, "stop holds something other than strings"),
    ],
)
def test_wrong_sampling_params_are_refused_when_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**fields)


def test_stop_strings_may_come_with_the_sampling_params(llm: LLM) -> None:
    whole = llm.generate(["a", "bcd"], GREEDY)
    stops = [answer.text[2:4] for answer in whole]
    each = [SamplingParams(max_tokens=8, ignore_eos=True, stop=stop) for stop in stops]
    cut = llm.generate(["a", "bcd"], each)
    for answer, uncut, stop in zip(cut, whole, stops, strict=True):
        assert answer.text == uncut.text[: uncut.text.index(stop)] and answer.finish_reason == "stop"
    both = llm.generate("a", each[0], stop=["no such text"])
    assert both[0] == cut[0]
    assert "stop=('" in repr(each[0]) and "max_tokens=8" in repr(each[0])


def test_top_k_of_minus_1_is_off_and_a_negative_seed_its_twos_complement(llm: LLM) -> None:
    def answer(**fields: int) -> str:
        sampling = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True, **fields)
        return llm.generate("a", sampling)[0].text

    assert answer(seed=-1, top_k=-1) == answer(seed=2**64 - 1, top_k=0) != answer(seed=1)


def test_sampling_params_may_be_one_for_each_prompt(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)]
    assert [len(c.token_ids) for c in llm.generate(["a", "b"], each)] == [3, 5]
    with pytest.raises(InputError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], each)
