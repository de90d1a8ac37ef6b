"""Grammars compiled for one tokenizer by llguidance, and the state of one answer in its grammar.

llguidance is imported here alone, when the first request with a grammar comes. Compiling runs in threads (it leaves
Python's lock alone) and is bounded by llguidance's own limits; what can't be compiled fails its request.
"""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from castiron.runtime.errors import RequestError
from castiron.runtime.grammar_spec import GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

PARAM = "structured_outputs"
_NUM_THREADS = 2
_MESSAGE_CHARS = 300


def llguidance() -> Any:
    """The library. Raises RequestError where it isn't installed."""
    try:
        import llguidance as library
    except ImportError as error:
        raise RequestError(
            f"structured output needs llguidance, which can't be imported ({error}): install it",
            PARAM,
        ) from error
    return library


def check_grammar(spec: GrammarSpec) -> None:
    """Raise RequestError for a grammar that is no grammar, whatever the tokenizer; takes milliseconds."""
    spec.validate()
    library = llguidance()
    message = library.LLMatcher.validate_grammar(grammar_text(spec), None)
    if message and not message.startswith("WARNING"):
        raise RequestError(f"the {spec.kind} can't be used: {_one_line(message)}", PARAM)


def grammar_text(spec: GrammarSpec) -> str:
    """The spec as a grammar of llguidance's. Raises RequestError for text that isn't what the kind says."""
    library = llguidance()
    matcher = library.LLMatcher
    try:
        if spec.kind in ("json_schema", "json_object"):
            schema = json.loads(spec.text) if spec.kind == "json_schema" else {"type": "object"}
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is an object")
            overrides = {"whitespace_flexible": spec.any_whitespace}
            return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides))
        if spec.kind == "regex":
            return str(matcher.grammar_from_regex(spec.text))
        if spec.kind == "choice":
            options = " | ".join(json.dumps(choice) for choice in spec.choices)
            return str(matcher.grammar_from_lark(f"start: {options}"))
        if spec.kind == "structural_tag":
            tags = [
                library.StructTag(
                    trigger=tag.trigger, begin=tag.begin, grammar=json.loads(tag.schema), end=tag.end
                )
                for tag in spec.tags
            ]
            return str(library.StructTag.to_grammar(tags, assume_special=False))
        lark = _gbnf_to_lark(spec.text) if spec.kind == "gbnf" else spec.text
        return str(matcher.grammar_from_lark(lark))
    except RecursionError as error:
        raise RequestError(f"the {spec.kind} is nested too deeply", PARAM) from error
    except Exception as error:  # llguidance's converters raise what they come across
        raise RequestError(f"the {spec.kind} can't be used: {_one_line(str(error))}", PARAM) from error


def _gbnf_to_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return gbnf_to_lark(text)


class Grammar:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    @property
    def has_ended(self) -> bool:
        """Whether nothing may follow any more."""
        return bool(self._matcher.is_stopped())

    def accept(self, token_id: int) -> bool:
        """Go on by a sampled token; False if the grammar doesn't allow it."""
        return bool(self._matcher.consume_token(token_id))

    @staticmethod
    def fill_masks(grammars: Sequence["Grammar"], masks: np.ndarray) -> None:
        """Write what may come next in each: masks uint32 [len(grammars), ceil(vocab_size / 32)], a bit set = allowed.

        Several are filled in parallel, without Python's lock.
        """
        assert masks.flags.c_contiguous and masks.dtype == np.uint32 and len(masks) == len(grammars)
        row_bytes = masks.shape[1] * 4
        if len(grammars) == 1:
            grammars[0]._matcher.unsafe_compute_mask_ptr(masks.ctypes.data, row_bytes)
        elif grammars:
            matchers = [(grammar._matcher, index) for index, grammar in enumerate(grammars)]
            _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, row_bytes, len(grammars))


@functools.cache
def _executor() -> Any:
    return llguidance().LLExecutor()


class GrammarCompiler:
    """Compiles grammars for one engine's tokenizer, in threads."""

    def __init__(
        self, read_tokenizer: Callable[[], bytes], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`read_tokenizer` gives tokenizer.json; called once, with the first grammar."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar")

    def submit(self, spec: GrammarSpec) -> "Future[Grammar]":
        """The compiled grammar, later; its result() raises RequestError if it is none."""
        return self._pool.submit(self.compile, spec)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises RequestError."""
        spec.validate()
        matcher = llguidance().LLMatcher(self._get_tokenizer(), grammar_text(spec), log_level=0)
        if matcher.is_error():
            raise RequestError(f"the {spec.kind} can't be used: {_one_line(matcher.get_error())}", PARAM)
        return Grammar(matcher)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _get_tokenizer(self) -> "LLTokenizer":
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = llguidance().LLTokenizer(
                        self._read_tokenizer().decode(),
                        n_vocab=self._vocab_size,
                        eos_token=self._eos_token_ids,
                    )
                except RequestError:
                    raise
                except Exception as error:  # llguidance raises plain errors for a tokenizer it can't use
                    raise RequestError(
                        f"this engine's tokenizer can't be used for structured output: {_one_line(str(error))}",
                        PARAM,
                    ) from error
            return self._tokenizer


def _one_line(message: str) -> str:
    return " ".join(message.split())[:_MESSAGE_CHARS]
