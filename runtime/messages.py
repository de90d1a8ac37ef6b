"""Records that cross the boundary between the front (text, HTTP) and the engine loop (token ids only)."""

import msgspec

from castiron.runtime.grammar_spec import GrammarSpec
from castiron.runtime.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Admit a request; validated by LLMEngine.validate before it is sent."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0  # lower runs first
    cache_salt: str | None = None  # the prefix cache is shared only with requests of the same salt
    grammar: GrammarSpec | None = None  # what the answer must look like


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities at one output position, of the unmodified distribution (before temperature)."""

    sampled: float
    rank: int  # of the sampled token: 1 + how many are more likely; 0 = not computed by this engine
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class RequestOutput(msgspec.Struct, frozen=True, tag="output"):
    """What a step produced for one request."""

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per new token, if asked for
    finish_reason: str | None = None  # "stop" (EOS or a stop token), "length", "abort", "error"
    stop_token_id: int | None = None  # the token that ended it (it is the last of new_token_ids)
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    error: str | None = None
    # with the first token, if asked for: of each prompt token but the first
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


FrontToEngine = AddRequest | AbortRequest
