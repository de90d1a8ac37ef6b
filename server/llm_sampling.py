"""SamplingParams as callers of LLM write it: the engine's fields, and the stop strings that only text knows."""

from collections.abc import Sequence
from typing import Any

import msgspec

from castiron.runtime import sampling_params
from castiron.runtime.errors import InputError
from castiron.runtime.grammar_compiler import check_grammar
from castiron.runtime.nearest_name import unknown_name
from castiron.server.bad_words import checked_bad_words
from castiron.server.stop_strings import checked_stop_strings
from castiron.server.structured_outputs import grammar_of


class SamplingParams:
    """How an answer is sampled and where it ends.

        SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=100, stop=["###"])

    Besides `stop` (a string, or several, that end an answer and aren't part of it), `bad_words` (that it must not
    contain) and `structured_outputs` ({"json": schema}, {"regex": ...}, {"choice": [...]}, {"grammar": ...},
    {"json_object": True} or {"structural_tag": ...}) it takes the fields of the engine's record in
    runtime/sampling_params.py: temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
    frequency_penalty, logit_bias, allowed_token_ids, bad_words_token_ids, seed, max_tokens, min_tokens, ignore_eos,
    stop_token_ids, logprobs, prompt_logprobs.
    """

    def __init__(
        self,
        *,
        stop: str | Sequence[str] | None = None,
        bad_words: Sequence[str] | None = None,
        structured_outputs: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Raises InputError for an unknown field or a wrong type, RequestError for a value out of range."""
        known = sampling_params.SamplingParams.__struct_fields__
        for name in fields:
            if name not in known:
                raise InputError(
                    unknown_name(
                        "sampling parameter", name, (*known, "stop", "bad_words", "structured_outputs")
                    )
                )
        try:
            self.for_engine = msgspec.convert(fields, sampling_params.SamplingParams)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at ")
            raise InputError(f"{where.strip('`$.')}: {what[:1].lower()}{what[1:]}") from error
        self.for_engine.validate()
        self.stop = checked_stop_strings(stop)
        self.bad_words = checked_bad_words(bad_words)
        self.grammar = grammar_of(None, structured_outputs)
        if self.grammar is not None:
            check_grammar(self.grammar)

    def __repr__(self) -> str:
        fields = msgspec.structs.asdict(self.for_engine) | {
            "stop": self.stop,
            "bad_words": self.bad_words,
            "grammar": self.grammar,
        }
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
