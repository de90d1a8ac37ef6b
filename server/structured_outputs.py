"""Request fields that say what an answer must look like, as a GrammarSpec: OpenAI's response_format, vLLM's
structured_outputs.
"""

import asyncio
from typing import Any

import msgspec

from castiron.runtime.errors import RequestError
from castiron.runtime.grammar_compiler import check_grammar
from castiron.runtime.grammar_spec import GrammarSpec, StructuralTag

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


CHECK_TIMEOUT_S = 5.0


async def checked_grammar(response_format: Any, structured_outputs: Any) -> GrammarSpec | None:
    """The grammar the fields ask for, found to be one: in a thread, for a limited time. Raises RequestError."""
    spec = grammar_of(response_format, structured_outputs)
    if spec is not None:
        try:
            await asyncio.wait_for(asyncio.to_thread(check_grammar, spec), CHECK_TIMEOUT_S)
        except TimeoutError:
            raise RequestError(
                f"the {spec.kind} takes more than {CHECK_TIMEOUT_S:g} s to check: make it simpler",
                "structured_outputs",
            ) from None
    return spec


def grammar_of(response_format: Any, structured_outputs: Any) -> GrammarSpec | None:
    """The grammar that the two fields ask for together, at most one. Raises RequestError naming the field."""
    formatted = _of_response_format(response_format)
    structured = _of_structured_outputs(structured_outputs)
    if formatted is not None and structured is not None:
        raise RequestError(
            "response_format and structured_outputs are both given: leave one out", "structured_outputs"
        )
    return formatted or structured


def _of_response_format(field: Any) -> GrammarSpec | None:
    if field is None:
        return None
    where = "response_format"
    kind = _member(field, "type", str, where)
    if kind == "text":
        _no_others(field, ("type",), where)
        return None
    if kind == "json_object":
        _no_others(field, ("type",), where)
        return GrammarSpec("json_object")
    if kind == "json_schema":
        _no_others(field, ("type", "json_schema"), where)
        inner = _member(field, "json_schema", dict, where)
        _no_others(inner, ("name", "description", "schema", "strict"), f"{where}.json_schema")
        schema = _member(inner, "schema", (dict, bool), f"{where}.json_schema")
        return GrammarSpec("json_schema", _json(schema))
    if kind == "structural_tag":
        return _structural_tag({name: value for name, value in field.items() if name != "type"}, where)
    raise RequestError(
        f"{where}.type is {kind!r:.40}, expected text, json_object, json_schema or structural_tag", where
    )


def _of_structured_outputs(field: Any) -> GrammarSpec | None:
    if field is None:
        return None
    where = "structured_outputs"
    if not isinstance(field, dict):
        raise RequestError(f"{where} is no object, expected one of {', '.join(_KINDS)} in one", where)
    _no_others(field, (*_KINDS, "disable_any_whitespace"), where)
    given = {name: value for name, value in field.items() if name in _KINDS and value not in (None, False)}
    if len(given) != 1:
        raise RequestError(f"{where} has {len(given)} of {', '.join(_KINDS)}, expected one", where)
    (name, value), flexible = *given.items(), field.get("disable_any_whitespace") is not True
    if name == "json_object":
        return GrammarSpec("json_object", any_whitespace=flexible)
    if name == "json":
        text = value if isinstance(value, str) else _json(value)
        return GrammarSpec("json_schema", text, any_whitespace=flexible)
    if name == "choice":
        if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            raise RequestError(f"{where}.choice is no list of texts", where)
        return GrammarSpec("choice", choices=tuple(value))
    if name == "structural_tag":
        tag = _decoded(value, where) if isinstance(value, str) else value
        if isinstance(tag, dict):
            tag = {key: item for key, item in tag.items() if key != "type"}
        return _structural_tag(tag, where)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} is no text", where)
    if name == "regex":
        return GrammarSpec("regex", value)
    return GrammarSpec("gbnf" if "::=" in value else "lark", value)


def _structural_tag(field: Any, where: str) -> GrammarSpec:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}: each structure begins with one trigger."""
    if not isinstance(field, dict):
        raise RequestError(f"{where}: a structural tag is an object of structures and triggers", where)
    _no_others(field, ("structures", "triggers"), where)
    triggers = _member(field, "triggers", list, where)
    tags = []
    for index, structure in enumerate(_member(field, "structures", list, where)):
        place = f"{where}.structures[{index}]"
        _no_others(structure, ("begin", "schema", "end"), place)
        begin = _member(structure, "begin", str, place)
        found = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
        if not found:
            raise RequestError(f"{place}.begin starts with none of the triggers", where)
        schema = structure.get("schema", {})
        tags.append(
            StructuralTag(max(found, key=len), begin, _json(schema), _member(structure, "end", str, place))
        )
    return GrammarSpec("structural_tag", tags=tuple(tags))


def _member(field: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    if not isinstance(field, dict):
        raise RequestError(f"{where} is no object", where.partition(".")[0])
    if not isinstance(field.get(name), kind):
        raise RequestError(f"{where}.{name} is missing or of the wrong type", where.partition(".")[0])
    return field[name]


def _no_others(field: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(field, dict):
        raise RequestError(f"{where} is no object", where.partition(".")[0])
    for name in field:
        if name not in names:
            raise RequestError(
                f"{where} has an unknown member {name!r:.40}, expected {', '.join(names)}",
                where.partition(".")[0],
            )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _decoded(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise RequestError(f"{where} holds text that is no JSON: {error}", where) from error
