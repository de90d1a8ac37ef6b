"""Whether a request can be served at all, checked before it is sent to the engine loop or queued in it."""

import itertools

import numpy as np

from castiron.runtime.engine_info import EngineInfo
from castiron.runtime.errors import RequestError
from castiron.runtime.messages import AddRequest
from castiron.runtime.plan_table import FULL, RANDOM
from castiron.runtime.sampling_params import SamplingParams

MAX_CACHE_SALT = 256  # characters


def validate_request(request: AddRequest, info: EngineInfo) -> None:
    """Raise RequestError (got, allowed, the field) unless this engine can finish the request.

    A request that passes can always run, if need be alone: admission never waits for what can't come.
    """
    sampling = request.sampling
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise RequestError("the prompt is empty, expected at least one token", "prompt")
    sampling.validate()
    # lengths before contents: an oversized prompt is refused without looking at its tokens
    left = tokens_left(num_prompt_tokens, info.max_seq_len, advice=longer_sequences(info))
    if sampling.max_tokens > left:
        raise RequestError(
            f"`max_tokens` is {sampling.max_tokens} and the prompt has {num_prompt_tokens} tokens, together "
            f"{num_prompt_tokens + sampling.max_tokens}; a sequence may have {info.max_seq_len}: lower "
            f"`max_tokens` to {left} or shorten the prompt",
            "max_tokens",
        )
    _check_token_ids(request.prompt_token_ids, info.vocab_size, "prompt")
    for name, token_ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", tuple(sampling.logit_bias)),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words", tuple(itertools.chain.from_iterable(sampling.bad_words_token_ids))),
    ):
        if token_ids:
            _check_token_ids(token_ids, info.vocab_size, name)
    if request.grammar is not None:
        _check_grammar(request, info)
    if FULL not in info.sample_variants:
        for name, is_off in _off_without_full(sampling).items():
            if not is_off:
                raise RequestError(
                    f"`{name}` is given, this engine's target has no kernels for it: leave it out", name
                )
    if request.cache_salt is not None:
        _check_cache_salt(request.cache_salt)
    if sampling.temperature > 0 and RANDOM not in info.sample_variants:
        raise RequestError(
            f"`temperature` is {sampling.temperature}, this engine samples greedily only: set it to 0",
            "temperature",
        )


def _off_without_full(sampling: SamplingParams) -> dict[str, bool]:
    """Fields that need the full sampling variant, by name, and whether they are off."""
    return {
        "repetition_penalty": sampling.repetition_penalty == 1,
        "presence_penalty": sampling.presence_penalty == 0,
        "frequency_penalty": sampling.frequency_penalty == 0,
        "logit_bias": not sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids is None,
        "bad_words": not sampling.bad_words_token_ids,
        "min_tokens": sampling.min_tokens == 0,
    }


def _check_grammar(request: AddRequest, info: EngineInfo) -> None:
    """Sizes and what can't go with it; whether it is a grammar at all is found when it is compiled."""
    assert request.grammar is not None
    request.grammar.validate()
    lacks = "" if info.has_tokenizer else "tokenizer"
    lacks = lacks if FULL in info.sample_variants else "kernels for it"
    if lacks:
        raise RequestError(
            f"structured output is asked for, this engine has no {lacks}: leave it out", "structured_outputs"
        )
    if request.sampling.min_tokens:
        raise RequestError(
            "`min_tokens` can't go with structured output: its grammar says when it ends", "min_tokens"
        )


def _check_cache_salt(salt: str) -> None:
    if type(salt) is not str or not 1 <= len(salt) <= MAX_CACHE_SALT or not salt.isprintable():
        raise RequestError(
            f"`cache_salt` is {salt!r:.40}, expected text of 1 to {MAX_CACHE_SALT} printable characters",
            "cache_salt",
        )


def longer_sequences(info: EngineInfo) -> str:
    """What whoever loads this engine can do so that sequences may be longer; "" if nothing."""
    if info.max_seq_len < info.asked_seq_len:  # the KV cache is what limits
        return "raise `kv_memory_bytes`"
    if info.max_seq_len < info.built_seq_len:
        return "load the engine with a higher `max_seq_len`"
    if 0 < info.built_seq_len < info.context_len:
        return "rebuild the engine with a larger `max_seq_len`"
    return ""


def tokens_left(num_prompt_tokens: int, max_seq_len: int, param: str = "prompt", advice: str = "") -> int:
    """How many new tokens fit behind the prompt. Raises RequestError (the counts, `param`) if none does.

    `advice` is longer_sequences() for one who loads the engine; clients of a server can't follow it.
    """
    if num_prompt_tokens >= max_seq_len:
        todo = [f"shorten the prompt to {max_seq_len - 1} tokens"] if max_seq_len > 1 else []
        todo += [advice] if advice else []
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, a sequence may have {max_seq_len} with at least 1 new "
            f"one: {' or '.join(todo) or 'this engine can answer nothing'}",
            param,
        )
    return max_seq_len - num_prompt_tokens


def _check_token_ids(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    try:
        array = np.array(token_ids)
    except ValueError:  # nested
        array = np.empty(0)
    if array.dtype.kind in "iu" and array.ndim == 1:
        bad = array[(array < 0) | (array >= vocab_size)]
        if len(bad) == 0:
            return
        got = f"token id {bad[0]}"
    else:  # text, floats, booleans, integers past 64 bits
        got = next(
            (f"token id {t!r:.40}" for t in token_ids if type(t) is not int or not 0 <= t < vocab_size),
            "something other than token ids",
        )
    raise RequestError(f"{param} has {got}, expected integers from 0 to {vocab_size - 1}", param)
