"""Chat templates: Jinja, sandboxed, with the conventions of Hugging Face checkpoints."""

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from castiron.runtime.errors import EngineFormatError, RequestError
from castiron.server.json_types import Json, JsonObject

MAX_RENDERED_CHARS = 64 << 20  # a template that repeats its input can't take all memory


class _TemplateRefusalError(Exception):
    """Raised by a template itself through raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusalError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes characters for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote, for training; no effect here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled chat template; renders messages to the text a model reads."""

    def __init__(
        self,
        source: str,
        special_texts: Mapping[str, str],
        rewrite_literal: Callable[[str], str] | None = None,
    ) -> None:
        """`special_texts`: what the template sees as bos_token, eos_token, … `rewrite_literal` is applied to
        every literal that the template writes out (see chat_prompt.py), not to those it compares with.

        Raises EngineFormatError if the source is no valid template.
        """
        self.source = source
        self._special_texts = dict(special_texts)
        environment = _environment()
        try:
            if rewrite_literal is None:
                self._template = environment.from_string(source)
            else:
                tree = environment.parse(source)
                _rewrite_written_literals(tree, rewrite_literal)
                self._template = environment.from_string(tree)
                self._special_texts = {name: rewrite_literal(text) for name, text in special_texts.items()}
        except jinja2.TemplateError as error:
            raise EngineFormatError(
                f"the engine's chat template can't be compiled ({one_line(error)}): "
                "use --raw, or fix the checkpoint's template and rebuild"
            ) from error

    def render(
        self,
        messages: list[JsonObject],
        *,
        tools: list[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: JsonObject | None = None,
    ) -> str:
        """The prompt text. Raises RequestError for what the template refuses or can't handle."""
        values: dict[str, Any] = {
            **self._special_texts,
            **(template_kwargs or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            pieces: list[str] = []
            num_chars = 0
            for piece in self._template.generate(values):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise RequestError(
                        f"the chat template made more than {MAX_RENDERED_CHARS} characters of these messages",
                        "messages",
                    )
            return "".join(pieces)
        except RequestError:
            raise
        except _TemplateRefusalError as error:
            raise RequestError(
                f"the chat template refused the messages: {one_line(error)}", "messages"
            ) from error
        except (
            Exception
        ) as error:  # a template is a program: whatever it hits, the request is what it can't take
            raise RequestError(
                f"the chat template can't render these messages: {one_line(error)}", "messages"
            ) from error


def one_line(error: BaseException) -> str:
    """An exception's message on one line, its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


_WRITTEN = (nodes.Output, nodes.Add, nodes.Concat, nodes.CondExpr, nodes.Assign, nodes.AssignBlock, nodes.Mul)


def _rewrite_written_literals(node: nodes.Node, rewrite: Callable[[str], str]) -> None:
    """Rewrite, in place, the literals that flow into the output; what is compared, searched for or passed to
    functions and filters stays as it is."""
    if isinstance(node, nodes.TemplateData):
        node.data = rewrite(node.data)
        return
    for field, value in node.iter_fields():
        if isinstance(node, nodes.CondExpr | nodes.If | nodes.For) and field in ("test", "iter"):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if isinstance(child, nodes.Const):
                if isinstance(child.value, str) and isinstance(node, _WRITTEN):
                    rewritten = nodes.Const(rewrite(child.value), lineno=child.lineno)
                    if isinstance(value, list):
                        value[index] = rewritten
                    else:
                        setattr(node, field, rewritten)
            elif isinstance(child, nodes.Compare | nodes.Test | nodes.Call | nodes.Getitem | nodes.Getattr):
                continue
            elif isinstance(child, nodes.Filter):
                if child.node is not None and child.name in ("trim", "string", "safe"):
                    _rewrite_written_literals(child, rewrite)
            elif isinstance(child, nodes.Node):
                _rewrite_written_literals(child, rewrite)


def normalize_messages(messages: list[JsonObject]) -> list[JsonObject]:
    """Copies of OpenAI-style messages as templates expect them.

    Arguments of tool calls become objects (clients send JSON text), an empty `tool_calls` is left out, text
    parts are joined. Raises RequestError for arguments that aren't a JSON object.
    """
    result: list[JsonObject] = []
    for index, message in enumerate(messages):
        message = dict(message)
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = "".join(str(part["text"]) for part in content if isinstance(part, dict))
        calls = message.pop("tool_calls", None)
        if isinstance(calls, list) and calls:
            where = f"messages[{index}].tool_calls"
            message["tool_calls"] = [
                _with_parsed_arguments(call, f"{where}[{i}]") for i, call in enumerate(calls)
            ]
        result.append(message)
    return result


def _with_parsed_arguments(call: Json, where: str) -> Json:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise RequestError(
            f"{where} has no function, expected {{'function': {{'name', 'arguments'}}}}", where
        )
    function = dict(call["function"])  # type: ignore[arg-type]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        field = f"{where}.function.arguments"
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RequestError(f"{field} is not valid JSON ({one_line(error)})", field) from error
        if not isinstance(arguments, dict):
            raise RequestError(f"{field} is JSON but not an object", field)
        function["arguments"] = arguments
    return {**call, "function": function}
