"""What a person may set when an engine is loaded; limits may only lower what the engine was built for."""

import msgspec

from castiron.runtime.errors import EngineFormatError, InputError
from castiron.runtime.manifest import Profile


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serving options; None leaves the choice to the engine file or to this machine."""

    kv_memory_bytes: int | None = (
        None  # for all KV caches; None: what the limits can use, at most half the free memory
    )
    num_threads: int | None = None  # compute threads of the CPU device; None: the cores this process may use
    max_seqs: int | None = None  # sequences running at once
    max_seq_len: int | None = None  # tokens of a sequence, prompt and output together
    max_batched_tokens: int | None = None  # tokens of one step
    record: str | None = None  # file that gets every request and step, to be replayed (request_trace.py)
    prefix_cache: bool = True  # requests share the cached blocks of the prefix they have in common


class ServingLimits(msgspec.Struct, frozen=True):
    """The limits an engine serves with, all resolved."""

    max_seqs: int
    max_seq_len: int
    max_batched_tokens: int


def resolve_limits(options: EngineOptions, profile: Profile) -> ServingLimits:
    """The profile, lowered by the options.

    Raises InputError (got, allowed) for an option that isn't positive or that exceeds the profile, or for
    limits whose step could not hold one token of every sequence; EngineFormatError if the profile can't.
    """
    if not 1 <= profile.max_seqs <= profile.max_batched_tokens:
        raise EngineFormatError(
            f"the engine's profile has max_seqs {profile.max_seqs} and max_batched_tokens "
            f"{profile.max_batched_tokens}, expected 1 <= max_seqs <= max_batched_tokens: rebuild the engine"
        )
    for name in ("kv_memory_bytes", "num_threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"`{name}` is {value}, expected a positive integer")
    limits = ServingLimits(
        max_seqs=_lowered(options.max_seqs, "max_seqs", profile.max_seqs),
        max_seq_len=_lowered(options.max_seq_len, "max_seq_len", profile.max_seq_len),
        max_batched_tokens=_lowered(
            options.max_batched_tokens, "max_batched_tokens", profile.max_batched_tokens
        ),
    )
    if limits.max_batched_tokens < limits.max_seqs:
        raise InputError(
            f"`max_batched_tokens` {limits.max_batched_tokens} is below `max_seqs` {limits.max_seqs}: a step "
            f"must hold one token of every sequence, lower `max_seqs` too"
        )
    return limits


def _lowered(value: int | None, name: str, built: int) -> int:
    if value is None:
        return built
    if value < 1:
        raise InputError(f"`{name}` is {value}, expected a positive integer")
    if value > built:
        raise InputError(
            f"`{name}` is {value}, the engine was built for {built}: lower it or rebuild the engine"
        )
    return value
