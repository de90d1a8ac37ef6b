"""Token counts of a request."""

from collections.abc import Sequence

from castiron.server.json_types import JsonObject
from castiron.server.served_model import Choice


def usage_object(choices: Sequence[Choice], choices_per_prompt: int) -> JsonObject:
    """OpenAI's `usage`: every prompt counts once, however many choices it has."""
    prompts = choices[::choices_per_prompt]
    prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in prompts)
    completion_tokens = sum(len(choice.text.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.text.num_cached_tokens for choice in prompts)},
    }
