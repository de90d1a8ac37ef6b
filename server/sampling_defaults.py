"""Sampling parameters of a request: what it says, else the model's generation config, else greedy."""

from collections.abc import Mapping

from castiron.runtime.sampling_params import SamplingParams, Words

_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_params(
    generation_defaults: Mapping[str, float],
    *,
    max_tokens: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: tuple[int, ...] | None = None,
    bad_words_token_ids: Words = (),
    seed: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """None means not given. Raises RequestError for values out of range."""
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    values = {name: generation_defaults[name] for name in _DEFAULTED if name in generation_defaults}
    values.update({name: value for name, value in given.items() if value is not None})
    params = SamplingParams(
        temperature=float(values.get("temperature", 0.0)),
        top_k=int(values.get("top_k", 0)),
        top_p=float(values.get("top_p", 1.0)),
        min_p=float(values.get("min_p", 0.0)),
        repetition_penalty=float(values.get("repetition_penalty", 1.0)),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(logit_bias or {}),
        allowed_token_ids=allowed_token_ids,
        bad_words_token_ids=bad_words_token_ids,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    params.validate()
    return params
