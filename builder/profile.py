"""What the engine will serve at most: asked for, or the target's defaults cut to the model's context."""

from castiron.builder.options import BuildOptions
from castiron.builder.targets import Target
from castiron.models.config import ModelConfig
from castiron.runtime.errors import CheckpointError, InputError
from castiron.runtime.manifest import Profile
from castiron.runtime.manifest_check import MAX_SEQS, MAX_TOKENS


def resolve_profile(options: BuildOptions, target: Target, config: ModelConfig) -> Profile:
    """The profile of a build.

    Raises InputError for limits that contradict each other or the model, CheckpointError for a model whose
    context holds no answer.
    """
    context = config.max_position_embeddings
    if context < 2:
        raise CheckpointError(
            f"the model was made for {context} token, expected at least 2: a prompt token and a new one"
        )
    max_seq_len = options.max_seq_len or min(context, target.max_seq_len)
    if max_seq_len > context:
        raise InputError(
            f"--max-seq-len is {max_seq_len}, the model was made for {context} tokens: ask for at most that"
        )
    max_seqs, max_batched_tokens = options.max_seqs, options.max_batched_tokens
    if max_batched_tokens is None:
        max_batched_tokens = max(target.max_batched_tokens, max_seqs or 0)
    if max_seqs is None:
        max_seqs = min(target.max_seqs, max_batched_tokens)
    if max_seqs > max_batched_tokens:
        raise InputError(
            f"--max-seqs {max_seqs} exceeds --max-batched-tokens {max_batched_tokens}: "
            "every running sequence needs a token of each step"
        )
    for name, value, limit in (
        ("--max-seqs", max_seqs, MAX_SEQS),
        ("--max-seq-len", max_seq_len, MAX_TOKENS),
        ("--max-batched-tokens", max_batched_tokens, MAX_TOKENS),
    ):
        if value > limit:
            raise InputError(f"{name} is {value}, engines allow up to {limit}")
    return Profile(max_seqs=max_seqs, max_seq_len=max_seq_len, max_batched_tokens=max_batched_tokens)
