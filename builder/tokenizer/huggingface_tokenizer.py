"""Tokenizers of Hugging Face folders: tokenizer.json as it is, validated by loading it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from castiron.builder.checkpoint.checkpoint import Checkpoint
from castiron.builder.checkpoint.huggingface_checkpoint import read_json_object
from castiron.builder.tokenizer.tokenizer_facts import TokenizerFacts
from castiron.runtime.errors import CheckpointError

_NO_LIMIT = 10**9  # transformers writes 1e30 for "no limit"


def read_huggingface_tokenizer(checkpoint: Checkpoint) -> TokenizerFacts:
    """Read tokenizer.json, tokenizer_config.json and the chat template of a folder.

    BOS and EOS around a prompt are what tokenizer.json's own post-processor adds. Stop tokens come from
    generation_config.json, then config.json. Raises CheckpointError for a missing or damaged tokenizer.
    """
    folder = checkpoint.folder
    assert folder is not None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file: save the tokenizer with transformers (save_pretrained) first"
        )
    content = path.read_bytes()
    with _library_errors(path):
        tokenizer = Tokenizer.from_buffer(content)
        inner = tokenizer.encode("a", add_special_tokens=False).ids
        outer = tokenizer.encode("a", add_special_tokens=True).ids
    settings_path = folder / "tokenizer_config.json"
    settings = read_json_object(settings_path) if settings_path.is_file() else {}
    if "bos_token" in settings:
        bos = _named_id(settings_path, tokenizer, "bos_token", settings)
    else:
        bos = next(iter(_ids(checkpoint, "bos_token_id")), None)
    eos = _ids(checkpoint, "eos_token_id")
    named_eos = _named_id(settings_path, tokenizer, "eos_token", settings)
    if not eos and named_eos is not None:
        eos = (named_eos,)
    add_bos, add_eos = _surroundings(path, inner, outer, bos, {*eos, named_eos} - {None})
    limit = settings.get("model_max_length")
    return TokenizerFacts(
        tokenizer=tokenizer,
        tokenizer_json=content,
        chat_template=_chat_template(folder, settings),
        bos_token_id=bos,
        eos_token_ids=eos,
        pad_token_id=_named_id(settings_path, tokenizer, "pad_token", settings),
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        model_max_length=int(limit) if isinstance(limit, int | float) and 0 < limit < _NO_LIMIT else None,
    )


@contextmanager
def _library_errors(path: Path) -> Iterator[None]:
    """Any failure of the tokenizers library as a CheckpointError.

    It raises plain Exception for damage it notices; what it doesn't notice panics, a BaseException.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(f"{path}: not a tokenizer this library reads: {reason}") from error


def _named_id(path: Path, tokenizer: Tokenizer, name: str, settings: dict[str, Any]) -> int | None:
    """Id of a token tokenizer_config.json names, as text or as a record with its content."""
    token = settings.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    token_id = tokenizer.get_vocab(with_added_tokens=True).get(token) if isinstance(token, str) else None
    if token_id is None and name != "pad_token":  # a padding token is never used here
        raise CheckpointError(f"{path}: {name} is {token!r}, which isn't a token of tokenizer.json")
    return token_id


def _ids(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """One id or a list of them, from generation_config.json, else from config.json."""
    value = checkpoint.generation_config.get(name)
    if value is None:
        value = checkpoint.config.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    vocab_size = checkpoint.config.get("vocab_size")
    limit = vocab_size if isinstance(vocab_size, int) else 2**31
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < limit:
            raise CheckpointError(f"{checkpoint.name}: {name} is {value!r}, expected token ids below {limit}")
    return tuple(dict.fromkeys(values))


def _surroundings(
    path: Path, inner: list[int], outer: list[int], bos: int | None, eos: Iterable[int | None]
) -> tuple[bool, bool]:
    """Whether the post-processor puts BOS before and EOS after a prompt; anything else isn't supported.

    inner, outer: ids of a short text without and with what the post-processor adds.
    """
    add_bos = bos is not None and outer[:1] == [bos] and inner[:1] != [bos]
    rest = outer[1:] if add_bos else outer
    add_eos = len(rest) == len(inner) + 1 and rest[-1] in eos
    if (rest[:-1] if add_eos else rest) != inner:
        raise CheckpointError(
            f"{path}: surrounds a prompt with tokens other than BOS and EOS, which isn't supported"
        )
    return add_bos, add_eos


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: isn't valid UTF-8") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is None:
        return ""
    if not isinstance(template, str) or not _is_encodable(template):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of them"
        )
    return template


def _is_encodable(text: str) -> bool:
    """Whether it is Unicode text; JSON can hold lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
