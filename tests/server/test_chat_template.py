"""Templates behave as they do for Hugging Face checkpoints."""

import datetime
import json

import pytest

from castiron.runtime.errors import RequestError
from castiron.server.chat_template import ChatTemplate, normalize_messages
from castiron.server.json_types import JsonObject


def render(source: str, *contents: str, **options: object) -> str:
    messages: list[JsonObject] = [{"role": "user", "content": content} for content in contents]
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)  # type: ignore[arg-type]


def test_blocks_are_trimmed() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n[{{ m.content }}]\n  {% endfor %}\nend"
    assert render(source, "a", "b") == "<s>\n[a]\n[b]\nend"


def test_tojson_keeps_characters_and_order() -> None:
    value = render("{{ messages[0] | tojson }}", "<é'>")
    assert value == '{"role": "user", "content": "<é\'>"}'
    assert json.loads(render("{{ messages | tojson(indent=2) }}", "x")) == [{"role": "user", "content": "x"}]
    assert "\n  " in render("{{ messages | tojson(indent=2) }}", "x")


def test_loop_controls_and_generation_blocks_work() -> None:
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(source, "a", "b", "c") == "a"
    assert render("{% generation %}x{% endgeneration %}y", "a") == "xy"


def test_strftime_now_gives_today() -> None:
    assert render("{{ strftime_now('%Y-%m-%d') }}", "a") == datetime.datetime.now().strftime("%Y-%m-%d")


def test_a_templates_refusal_is_told_on_one_line() -> None:
    with pytest.raises(RequestError, match="roles must alternate: see docs") as error:
        render("{{ raise_exception('roles must alternate:\n see docs') }}", "a")
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.no_such() }}",
        "{{ messages[5].content + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_what_a_template_can_not_do_is_the_requests_error(source: str) -> None:
    with pytest.raises(RequestError):
        render(source, "a")


def test_a_template_can_not_fill_the_memory() -> None:
    with pytest.raises(RequestError):
        render("{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}", "x" * 1000)


def call(arguments: object) -> JsonObject:
    function: JsonObject = {"name": "f", "arguments": arguments}  # type: ignore[dict-item]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def test_tool_arguments_given_as_json_text_are_parsed() -> None:
    source = (
        "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    )
    for arguments in ('{"a": 1, "b": "x"}', {"a": 1, "b": "x"}):
        messages = normalize_messages([call(arguments)])
        assert ChatTemplate(source, {}).render(messages) == "a=1;b=x;"


def test_empty_tool_arguments_are_an_empty_object() -> None:
    assert normalize_messages([call("")])[0]["tool_calls"][0]["function"]["arguments"] == {}  # type: ignore


@pytest.mark.parametrize("arguments", ["{", "[1]", '"text"', "nonsense"])
def test_unparsable_tool_arguments_are_refused_naming_the_field(arguments: str) -> None:
    with pytest.raises(RequestError) as error:
        normalize_messages([call(arguments)])
    assert error.value.param == "messages[0].tool_calls[0].function.arguments"


def test_empty_tool_calls_are_treated_as_absent() -> None:
    messages = normalize_messages([{"role": "assistant", "content": "x", "tool_calls": []}])
    assert messages == [{"role": "assistant", "content": "x"}]
    assert ChatTemplate("{{ messages[0].tool_calls is defined }}", {}).render(messages) == "False"


def test_normalizing_leaves_the_callers_messages_alone() -> None:
    messages = [call('{"a": 1}')]
    before = json.dumps(messages)
    normalize_messages(messages)
    assert json.dumps(messages) == before


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_messages([{"role": "user", "content": parts}])[0]["content"] == "ab"  # type: ignore[list-item]
