"""Log probabilities as JSON objects in the form of OpenAI's chat API; the command line prints the same."""

from collections.abc import Sequence

from castiron.runtime.messages import TokenLogprobs
from castiron.server.json_types import Json, JsonObject
from castiron.server.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no -infinity


def finite(logprob: float) -> float:
    """The log probability, or OpenAI's stand-in for one of zero."""
    return max(logprob, LOWEST_LOGPROB)


def token_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> JsonObject:
    """{"token", "logprob", "bytes"} of one token."""
    token_bytes = tokenizer.token_bytes(token_id)
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": None if token_bytes is None else list(token_bytes),
    }


def chat_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[Json]:
    """One entry a token, each with its `top_logprobs`."""
    entries: list[Json] = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        entry = token_entry(tokenizer, token_id, logprob.sampled)
        entry["top_logprobs"] = [
            token_entry(tokenizer, top_id, top)
            for top_id, top in zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
        ]
        entries.append(entry)
    return entries


def prompt_entries(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[Json]:
    """vLLM's form: null for the first token, then an object from ids to {"logprob", "rank", "decoded_token"} each."""
    entries: list[Json] = [None]
    for token_id, of_token in zip(prompt_token_ids[1:], logprobs, strict=True):
        top = zip(
            of_token.top_token_ids,
            of_token.top_logprobs,
            range(1, 1 + len(of_token.top_token_ids)),
            strict=True,
        )
        entry: JsonObject = {
            str(top_id): _prompt_entry(tokenizer, top_id, value, rank) for top_id, value, rank in top
        }
        own = _prompt_entry(tokenizer, token_id, of_token.sampled, of_token.rank)
        entries.append({str(token_id): own, **entry})
    return entries


def _prompt_entry(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> JsonObject:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
