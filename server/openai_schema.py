"""Bodies of the OpenAI API: what is understood, refused by name, or accepted because it is off."""

import re
from typing import Any, Literal, TypeVar, get_args

import msgspec

from castiron.runtime.errors import RequestError
from castiron.runtime.nearest_name import nearest_name
from castiron.server.error_responses import ModelNotFoundError
from castiron.server.json_types import Json, JsonObject

MAX_CHOICES = 128  # prompts of a request times n
MAX_MESSAGES = 4096

_SEED_MASK = 2**64 - 1


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SharedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that both endpoints have; None is "not given". The last twelve are not OpenAI's."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # token id in digits -> bias
    response_format: Any = None  # what the answer must look like: see structured_outputs.py
    user: str | None = None  # who asks, for abuse reports: no effect on the answer
    top_k: int | None = None  # 0 or -1 = off
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Any = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None  # share cached prompts only with requests of the same salt

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    def seed_of(self, choice: int) -> int | None:
        """The seed of one of n choices: they shall differ, and be the same again next time."""
        if self.seed is None or choice == 0:  # what was given is checked as it is
            return self.seed
        return (self.seed + choice) & _SEED_MASK

    def check_shared(self, served_name: str) -> None:
        """Raise RequestError (ModelNotFoundError) for what no type can tell."""
        if self.model is not None and self.model != served_name:
            raise ModelNotFoundError(
                f"the model {self.model[:200]!r} is not served here, {served_name!r} is", "model"
            )
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise RequestError(f"n is {self.n}, expected 1 to {MAX_CHOICES}", "n")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs are not streamed: leave out stream, or them", "prompt_logprobs"
            )


class CompletionRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Any = None  # text, texts, token ids or lists of them: see completions.encode_prompts
    logprobs: int | None = None


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    role: Role
    content: Any = None  # text, or a list of parts of which only text is supported
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class ChatCompletionRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


# OpenAI's fields that aren't there yet -> the values that mean "off" and are accepted (null always is)
UNSUPPORTED_COMPLETION: dict[str, tuple[Json, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
UNSUPPORTED_CHAT: dict[str, tuple[Json, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # of no tools, either is nothing
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

Body = TypeVar("Body", CompletionRequest, ChatCompletionRequest)


def decode_body(data: bytes, kind: type[Body], unsupported: dict[str, tuple[Json, ...]]) -> Body:
    """A request body as its record.

    Raises RequestError naming the field for malformed JSON, unknown fields, wrong types, and fields that
    OpenAI has but this server doesn't honour (unless their value means "off").
    """
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the request body is nested too deeply") from error
    if not isinstance(document, dict):
        raise RequestError("the request body is not a JSON object")
    for name, off_values in unsupported.items():
        if name in document:
            value = document.pop(name)
            if value is not None and not any(value == off and _same_kind(value, off) for off in off_values):
                raise RequestError(f"{name} is not supported by this server: leave it out", name)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error), kind)
        raise RequestError(message, param) from error


def _same_kind(value: Json, off: Json) -> bool:
    return isinstance(value, bool) == isinstance(off, bool)  # False == 0 in Python, not in JSON


def _explain(text: str, kind: type[msgspec.Struct]) -> tuple[str, str | None]:
    """msgspec's message in our words, and the field: "Expected `int`, got `str` - at `$.n`"."""
    what, _, where = text.partition(" - at ")
    path = where.strip("`").removeprefix("$").removeprefix(".").removesuffix("[...]")  # of a mapping's value
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL)
    if unknown:
        field = f"{path}.{unknown[1]}" if path else unknown[1]
        near = None if path else nearest_name(field[:200], kind.__struct_fields__)
        advice = f"did you mean {near}?" if near else "leave it out"
        return f"unknown field {field[:200]}: {advice}", field[:200]
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing:
        field = f"{path}.{missing[1]}" if path else missing[1]
        return f"{field} is missing", field
    wrong = re.fullmatch(r"Invalid enum value (.*)", what, re.DOTALL)
    if wrong and path.endswith(".role"):
        return f"{path} is {wrong[1][:40]}, expected one of {', '.join(get_args(Role))}", path
    what = what[:1].lower() + what[1:].replace("`", "")
    return (f"{path}: {what}" if path else what), path or None


def check_messages(messages: list[Message] | None) -> list[JsonObject]:
    """Messages as templates get them: plain objects, parts checked, `developer` as the `system` it replaced.

    Raises RequestError for none, an empty list, too many messages, or content that isn't text.
    """
    if messages is None:
        raise RequestError("messages is missing, expected a list of {role, content} objects", "messages")
    if not messages:
        raise RequestError("messages is empty, expected at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"there are {len(messages)} messages, at most {MAX_MESSAGES} are allowed", "messages"
        )
    result: list[JsonObject] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        plain: JsonObject = msgspec.to_builtins(message)
        plain["role"] = "system" if message.role == "developer" else message.role
        plain["content"] = _check_content(message, where)
        result.append(plain)
    return result


def _check_content(message: Message, where: str) -> Json:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise RequestError(f"{where} is null, expected text", where)
        # a null content is what comes with tool calls; alone it says nothing
        if not message.tool_calls:
            raise RequestError(f"{where} is null, expected text (or tool_calls)", where)
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is neither text nor a list of parts", where)
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise RequestError(
                f"{place} is not a content part, expected {{'type': 'text', 'text': …}}", place
            )
        if part["type"] != "text":
            raise RequestError(
                f"{place} is of type {str(part['type'])[:40]!r}, only text is supported", place
            )
        if not isinstance(part.get("text"), str) or len(part) != 2:
            raise RequestError(f"{place} must have type and text only, text being a string", place)
    return content
