"""Answers that follow a grammar, from whole engines: what the grammar says holds, whatever the model would say."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from castiron.runtime.errors import InputError, RequestError
from castiron.runtime.grammar_compiler import check_grammar
from castiron.runtime.grammar_spec import MAX_GRAMMAR_CHARS, GrammarSpec
from castiron.runtime.messages import AddRequest
from castiron.server.llm import LLM, Completion
from castiron.server.llm_sampling import SamplingParams
from castiron.server.structured_outputs import grammar_of

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tiny_chat_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_chat_engine, max_seqs=8) as llm:
        yield llm


def params(structured_outputs: dict[str, Any], **others: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 120, "temperature": 1.5, **others}, structured_outputs=structured_outputs
    )


def several(llm: LLM, structured_outputs: dict[str, Any], **others: Any) -> list[Completion]:
    """Random answers side by side with one that has no grammar."""
    asked = [params(structured_outputs, seed=seed, **others) for seed in range(6)]
    free = SamplingParams(max_tokens=40, ignore_eos=True)
    *answers, beside = llm.generate(["a"] * 6 + ["b"], [*asked, free])
    assert beside == llm.generate("b", free)[0]
    return answers


def check_object(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"kind", "n"} and found["kind"] in ("x", "yy") and found["n"] in range(100)


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_json_follows_its_schema(llm: LLM, schema: Any) -> None:
    answers = several(llm, {"json": schema, "disable_any_whitespace": True})
    for answer in answers:
        assert answer.finish_reason == "stop"
        check_object(answer.text)
    assert len({answer.text for answer in answers}) > 1


def test_whatever_is_cut_off_could_still_become_what_was_asked_for(llm: LLM) -> None:
    for answer in several(llm, {"json_object": True}, max_tokens=9):
        assert answer.text.lstrip().startswith("{") or not answer.text.strip()


def test_a_regex_a_choice_and_grammars_are_kept(llm: LLM) -> None:
    for answer in several(llm, {"regex": "[0-9]{3}-(ab|cd)+x"}):
        assert answer.finish_reason == "length" or re.fullmatch("[0-9]{3}-(ab|cd)+x", answer.text)
    choices = ["yes", "no", 'per"haps\n']
    found = {answer.text for answer in several(llm, {"choice": choices})}
    assert found <= set(choices) and len(found) > 1
    for answer in several(llm, {"grammar": 'start: "a" DIGITS "z"\nDIGITS: /[0-9]{2}/'}):
        assert re.fullmatch("a[0-9]{2}z", answer.text)
    for answer in several(llm, {"grammar": 'root ::= "a" digit digit "z"\ndigit ::= [0-9]'}):
        assert re.fullmatch("a[0-9]{2}z", answer.text)


def test_a_strict_pattern_is_enforced(llm: LLM) -> None:
    schema = {"type": "string", "pattern": "^hello there indeed\\!$"}
    for answer in several(llm, {"json": schema}):
        assert answer.text == '"hello there indeed!"'


def test_a_tuple_of_an_old_draft_is_enforced_or_refused(llm: LLM) -> None:
    schema = {
        "type": "array",
        "items": [{"enum": ["s"]}, {"enum": [7]}],
        "additionalItems": False,
        "minItems": 2,
    }
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    try:
        asked = {"json": schema, "disable_any_whitespace": True}
        answers = several(llm, asked)
    except RequestError as error:
        assert error.param == "structured_outputs" and "items" in str(error)
        return
    for answer in answers:
        assert json.loads(answer.text) == ["s", 7]


def test_text_is_free_until_a_trigger_and_then_its_tag(llm: LLM) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    open_ids = llm._front.tokenizer.encode_plain("<f")
    forced = [
        params({"structural_tag": tag}, seed=seed, logit_bias=dict.fromkeys(open_ids[:1], 60.0))
        for seed in range(4)
    ]
    free = [params({"structural_tag": tag}, seed=seed, max_tokens=30) for seed in range(4)]
    assert len({answer.text for answer in llm.generate(["a"] * 4, free)}) == 4
    for answer in llm.generate(["a"] * 4, forced):
        for found in re.finditer(r"<f(.*?)</f>", answer.text, re.DOTALL):
            check_object(found[1].removeprefix(">"))


def test_speculated_answers_are_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    asked = [params({"json": SCHEMA}, seed=seed, max_tokens=25) for seed in range(8)]
    together = llm.generate(["abc"] * 8, asked)
    assert together == [llm.generate("abc", one)[0] for one in asked]


BAD = [
    ({"regex": "("}, "regex"),
    ({"json": {"type": "no such type"}}, "json_schema"),
    ({"json": "{"}, "json_schema"),
    ({"json": "[1]"}, "json_schema"),
    ({"grammar": "start: undefined_rule"}, "lark"),
    ({"grammar": "root ::= undefined"}, "gbnf"),
    ({"choice": []}, "choice"),
    ({"choice": ["a", 5]}, "choice"),
    ({"choice": ["a"] * 2000}, "choice"),
    ({"choice": ["x" * (MAX_GRAMMAR_CHARS + 1)]}, "characters"),
    ({"regex": "a", "choice": ["b"]}, "2 of"),
    ({}, "0 of"),
    ({"no_such": 1}, "unknown member"),
    ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structural tags"),
    ({"structural_tag": {"structures": [{"begin": "a", "end": "b"}], "triggers": ["<"]}}, "triggers"),
    ({"structural_tag": "{"}, "no JSON"),
]


@pytest.mark.parametrize(("field", "message"), BAD, ids=lambda value: str(value)[:40])
def test_what_is_no_grammar_is_refused_and_the_engine_goes_on(
    llm: LLM, field: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        params(field)
    assert "\n" not in str(error.value) and error.value.param == "structured_outputs"
    assert llm.generate("a", params({"choice": ["k"]}))[0].text == "k"


def test_what_fails_only_where_it_is_compiled_ends_its_request_alone(llm: LLM) -> None:
    asked = params({"regex": "a"})
    asked.grammar = GrammarSpec("regex", "(")
    with pytest.raises(RequestError):
        check_grammar(asked.grammar)
    bad = AddRequest("bad", (1, 2), asked.for_engine, grammar=asked.grammar)
    good = AddRequest("good", (1, 2), SamplingParams(max_tokens=3, ignore_eos=True).for_engine)
    outputs = list(llm._engine.generate([bad, good]))
    ends = {o.request_id: o for o in outputs if o.finish_reason is not None}
    assert ends["bad"].finish_reason == "error" and "regex can't be used" in str(ends["bad"].error)
    assert ends["good"].finish_reason == "length"


def test_a_request_may_be_aborted_while_its_grammar_is_compiled(llm: LLM) -> None:
    engine = llm._engine
    request = AddRequest(
        "soon", (1, 2), SamplingParams(max_tokens=3).for_engine, grammar=GrammarSpec("regex", "a*")
    )
    engine.add_request(request)
    assert engine.stats().num_waiting == 1 and engine.has_unfinished()
    with pytest.raises(RequestError, match="in use"):
        engine.add_request(request)
    assert engine.abort("soon")
    outputs = list(itertools.chain.from_iterable(engine.step() for _ in range(2)))
    assert [o.finish_reason for o in outputs] == ["abort"] and not engine.has_unfinished()


def test_bans_of_all_that_the_grammar_allows_end_the_request_with_an_error(llm: LLM) -> None:
    ids = llm._front.tokenizer.encode_plain("k")
    with pytest.raises(RequestError, match="min_tokens"):
        llm.generate("a", params({"choice": ["k"]}, min_tokens=5))
    answer = llm.generate("a", params({"choice": ["k"]}, logit_bias={ids[0]: -100.0}))[0]
    assert answer.text == "k"  # -100 is unlikely, not banned: nothing else is allowed
    answer = llm.generate("a", params({"choice": ["k"]}, bad_words_token_ids=((ids[0],),)))[0]
    assert answer.finish_reason == "error"


def test_request_fields_become_the_grammar_they_mean() -> None:
    assert grammar_of(None, None) is None and grammar_of({"type": "text"}, None) is None
    assert grammar_of({"type": "json_object"}, None) == GrammarSpec("json_object")
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    spec = grammar_of(given, None)
    assert spec is not None and spec.kind == "json_schema" and json.loads(spec.text) == SCHEMA
    for field in (5, {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_object", "more": 1}, []):
        with pytest.raises(RequestError) as error:
            grammar_of(field, None)
        assert error.value.param == "response_format"
    with pytest.raises(RequestError, match="leave one out"):
        grammar_of({"type": "json_object"}, {"regex": "a"})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=GrammarSpec) == spec
    with pytest.raises(InputError, match="structured_outputs"):
        SamplingParams(structured_output={})
