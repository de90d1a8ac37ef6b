"""Sampling parameters of an API request's choices."""

from castiron.runtime.engine_info import EngineInfo
from castiron.runtime.errors import RequestError
from castiron.runtime.sampling_params import SamplingParams
from castiron.server.bad_words import bad_words_token_ids
from castiron.server.openai_schema import SharedFields
from castiron.server.sampling_defaults import sampling_params
from castiron.server.tokenizer import Tokenizer


def sampling_of(
    body: SharedFields,
    choice: int,
    info: EngineInfo,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    logprobs: int | None,
) -> SamplingParams:
    """Of one of the n choices; what isn't given has the model's default. Raises RequestError."""
    allowed = body.allowed_token_ids
    return sampling_params(
        info.generation_defaults,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words_token_ids=bad_words_token_ids(body.bad_words, tokenizer),
        seed=body.seed_of(choice),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """JSON's keys are text: {"50256": -100}."""
    biases = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise RequestError(
                f"`logit_bias` has the key {key!r:.40}, expected a token id in digits", "logit_bias"
            )
        biases[int(key)] = bias
    return biases
