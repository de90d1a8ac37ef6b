"""Bucket ladders: the capacities plans are made for. Kernels clip to live counts: padding costs no work."""

import itertools
from collections.abc import Iterator

from castiron.runtime.manifest import Profile
from castiron.runtime.step_abi import Bucket

MAX_DECODE_QUERY_LEN = 8  # tokens a sequence in a decode step, for speculation

DECODE, MIXED = "decode", "mixed"


def decode_bucket(max_seqs: int, max_tokens: int) -> Bucket:
    """A bucket of steps in which a sequence has 1 to MAX_DECODE_QUERY_LEN tokens."""
    return Bucket(
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_logits=max_seqs,
        max_query_len=min(MAX_DECODE_QUERY_LEN, max_tokens),
    )


def mixed_bucket(max_tokens: int, max_seqs: int) -> Bucket:
    """A bucket of steps that hold prefill chunks too."""
    max_seqs = min(max_seqs, max_tokens)
    return Bucket(max_tokens=max_tokens, max_seqs=max_seqs, max_logits=max_seqs, max_query_len=max_tokens)


def top_buckets(profile: Profile) -> list[tuple[str, Bucket]]:
    """Two buckets as large as the profile: for targets whose kernels lose nothing by large capacities."""
    return [
        (DECODE, decode_bucket(profile.max_seqs, profile.max_seqs)),
        (MIXED, mixed_bucket(profile.max_batched_tokens, profile.max_seqs)),
    ]


def ladder_buckets(profile: Profile) -> list[tuple[str, Bucket]]:
    """Both ladders, for targets whose grids and tactics depend on the capacity.

    decode: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... max_seqs tokens, of one sequence each or of fewer sequences
    with up to MAX_DECODE_QUERY_LEN; mixed: 128, 256, 512, 1024, ... max_batched_tokens tokens.
    """
    buckets = []
    for seqs in _capped(_decode_sizes(), profile.max_seqs):
        buckets.append((DECODE, decode_bucket(seqs, seqs)))
    for tokens in _capped(_mixed_sizes(), profile.max_batched_tokens):
        buckets.append((MIXED, mixed_bucket(tokens, profile.max_seqs)))
    return buckets


def _decode_sizes() -> Iterator[int]:
    yield from (1, 2, 4, 8)
    for power in itertools.count(4):
        yield 1 << power
        yield 3 << (power - 1)


def _mixed_sizes() -> Iterator[int]:
    for power in itertools.count(7):
        yield 1 << power


def _capped(sizes: Iterator[int], top: int) -> list[int]:
    return [*itertools.takewhile(lambda size: size < top, sizes), top]
