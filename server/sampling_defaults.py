"""Sampling parameters of a request: what it says, else the model's generation config, else greedy."""

from collections.abc import Mapping

from castiron.runtime.errors import RequestError
from castiron.runtime.sampling_params import SamplingParams

_DEFAULTED = ("temperature", "top_k", "top_p", "min_p")


def sampling_params(
    generation_defaults: Mapping[str, float],
    *,
    max_tokens: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    logprobs: int | None = None,
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """None means not given; top_k -1 is off, as elsewhere. Raises RequestError for values out of range."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    values = {name: generation_defaults[name] for name in _DEFAULTED if name in generation_defaults}
    values.update({name: value for name, value in given.items() if value is not None})
    top_k_value = values.get("top_k", 0)
    params = SamplingParams(
        temperature=float(values.get("temperature", 0.0)),
        top_k=0 if top_k_value == -1 else int(top_k_value),
        top_p=float(values.get("top_p", 1.0)),
        min_p=float(values.get("min_p", 0.0)),
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
    )
    params.validate()
    return params


def tokens_left(num_prompt_tokens: int, max_seq_len: int, wanted: int | None, param: str = "prompt") -> int:
    """`wanted` new tokens, or all that fit if None. Raises RequestError if there is no room for one."""
    left = max_seq_len - num_prompt_tokens
    if left < 1:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, but a sequence of this engine holds {max_seq_len} "
            f"including at least 1 new one: shorten the prompt to {max_seq_len - 1} tokens",
            param,
        )
    return left if wanted is None else wanted
