"""paged_attention against a float64 reference, and its row stability: same bits in any batch or chunk."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from kernel_caller import LEVELS, call

CACHE_DTYPES = {"f32": np.float32, "f16": np.float16}


@dataclass
class Heads:
    num_heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))


@dataclass
class Sequence:
    """One sequence's keys and values [length, kv_heads, head_dim] and queries [length, heads, head_dim]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def random_sequence(rng: np.random.Generator, length: int, heads: Heads) -> Sequence:
    def normal(count: int) -> np.ndarray:
        return rng.standard_normal((length, count, heads.head_dim)).astype(np.float32)

    return Sequence(normal(heads.num_heads) * 2, normal(heads.kv_heads), normal(heads.kv_heads))


def reference(sequence: Sequence, heads: Heads, dtype: type) -> np.ndarray:
    """Causal attention of every position, float64 [length, heads, head_dim]."""
    group = heads.num_heads // heads.kv_heads
    k = np.repeat(sequence.k.astype(dtype).astype(np.float64), group, axis=1)
    v = np.repeat(sequence.v.astype(dtype).astype(np.float64), group, axis=1)
    scores = np.einsum("qhd,khd->hqk", sequence.q.astype(np.float64), k) * heads.scale
    length = len(sequence.q)
    scores[:, ~np.tril(np.ones((length, length), bool))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def attend(
    parts: list[tuple[Sequence, int, int]],
    heads: Heads,
    cache_dtype: str,
    level: str = LEVELS[-1],
    threads: int = 1,
    seed: int = 0,
) -> list[np.ndarray]:
    """One step: for each (sequence, first, stop) the queries first .. stop, earlier positions being cached.

    Blocks are dealt out in random order, everything not written is NaN, and the arrays have room to spare.
    """
    rng = np.random.default_rng(seed)
    size, dtype = heads.block_size, CACHE_DTYPES[cache_dtype]
    needed = [-(-stop // size) for _, _, stop in parts]
    width = max(needed) + 2
    cache = np.full((sum(needed) + 3, 2, heads.kv_heads, size, heads.head_dim), np.nan, dtype)
    free = rng.permutation(len(cache))
    tables = np.full((len(parts) + 1, width), -1, np.int32)
    seq_lens, query_starts, taken = [], [0], 0
    for i, (sequence, first, stop) in enumerate(parts):
        tables[i, : needed[i]] = free[taken : taken + needed[i]]
        taken += needed[i]
        for position in range(stop):
            block, offset = tables[i, position // size], position % size
            cache[block, 0, :, offset] = sequence.k[position]
            cache[block, 1, :, offset] = sequence.v[position]
        seq_lens.append(stop)
        query_starts.append(query_starts[-1] + stop - first)
    num_tokens, row = query_starts[-1], heads.num_heads * heads.head_dim
    q = np.full((num_tokens + 2, row + 5), np.nan, np.float32)
    q[:num_tokens, :row] = np.concatenate([s.q[a:b] for s, a, b in parts]).reshape(num_tokens, row)
    y = np.full((num_tokens + 2, row + 3), 77.0, np.float32)
    call(
        f"paged_attention.{cache_dtype}",
        level=level,
        threads=threads,
        num_tokens=num_tokens,
        num_seqs=len(parts),
        q=q,
        cache=cache,
        block_tables=tables,
        seq_lens=np.array([*seq_lens, -5], np.int32),
        query_starts=np.array([*query_starts, -7], np.int32),
        y=y,
        q_stride=row + 5,
        y_stride=row + 3,
        num_heads=heads.num_heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        block_size=size,
        table_width=width,
        scale=heads.scale,
    )
    assert (y[num_tokens:] == 77.0).all() and (y[:, row:] == 77.0).all(), "wrote beyond the live rows"
    result = y[:num_tokens, :row].reshape(num_tokens, heads.num_heads, heads.head_dim)
    return [result[query_starts[i] : query_starts[i + 1]].copy() for i in range(len(parts))]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(9, 3, 64),
        Heads(4, 4, 64),
        Heads(4, 1, 32),
        Heads(3, 1, 20, block_size=5),
        Heads(2, 2, 1),
        Heads(2, 1, 100, block_size=64),
        Heads(12, 1, 256, block_size=3),
    ],
    ids=lambda h: f"{h.num_heads}q{h.kv_heads}kv{h.head_dim}d{h.block_size}b",
)
def test_matches_the_reference_for_ragged_batches(heads: Heads, cache_dtype: str, level: str) -> None:
    rng = np.random.default_rng(1)
    lengths = (1, 33, 97, 16, 70)
    sequences = [random_sequence(rng, n, heads) for n in lengths]
    firsts = (0, 32, 0, 3, 41)
    parts = [(s, first, len(s.q)) for s, first in zip(sequences, firsts, strict=True)]
    for threads in (1, 2, 3):
        results = attend(parts, heads, cache_dtype, level, threads)
        for result, (sequence, first, _) in zip(results, parts, strict=True):
            expected = reference(sequence, heads, CACHE_DTYPES[cache_dtype])[first:]
            np.testing.assert_allclose(result, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(4, 2, 20, block_size=7)], ids=["gqa3", "gqa2"])
def test_a_chunk_or_a_decode_step_gives_the_bits_of_the_whole_prompt(
    heads: Heads, cache_dtype: str, level: str
) -> None:
    """Row-stable equality: bit-equal."""
    length = 85
    sequence = random_sequence(np.random.default_rng(2), length, heads)
    [whole] = attend([(sequence, 0, length)], heads, cache_dtype, level)
    for cuts in ((0, 1, 32, 64, length), (0, 7, 50, 51, length), (0, 31, 33, 80, length)):
        for first, stop in pairwise(cuts):
            [chunk] = attend([(sequence, first, stop)], heads, cache_dtype, level, threads=2, seed=first)
            np.testing.assert_array_equal(chunk, whole[first:stop])
    for position in range(length):
        [step] = attend([(sequence, position, position + 1)], heads, cache_dtype, level, seed=position)
        np.testing.assert_array_equal(step[0], whole[position])


@pytest.mark.parametrize("level", LEVELS)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch_and_thread_count(level: str) -> None:
    """Row-stable equality: bit-equal."""
    heads = Heads(6, 2, 48)
    rng = np.random.default_rng(3)
    parts = [
        (random_sequence(rng, n, heads), first, n) for n, first in ((200, 190), (1, 0), (64, 63), (90, 20))
    ]
    alone = [attend([part], heads, "f16", level)[0] for part in parts]
    for threads in (1, 2, 3, 5):
        for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3)):
            together = attend([parts[i] for i in order], heads, "f16", level, threads, seed=threads)
            for i, result in zip(order, together, strict=True):
                np.testing.assert_array_equal(result, alone[i])


def test_large_scores_neither_overflow_nor_lose_the_largest() -> None:
    heads = Heads(2, 1, 64)
    sequence = random_sequence(np.random.default_rng(4), 80, heads)
    sequence.q *= 300.0
    [result] = attend([(sequence, 0, 80)], heads, "f32")
    expected = reference(sequence, heads, np.float32)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, expected, atol=5e-3)


def test_a_long_context_needs_no_more_scratch() -> None:
    heads = Heads(2, 1, 16)
    length = 20_000
    sequence = random_sequence(np.random.default_rng(5), length, heads)
    group = heads.num_heads // heads.kv_heads
    k, v = (np.repeat(a.astype(np.float64), group, axis=1) for a in (sequence.k, sequence.v))
    scores = np.einsum("hd,khd->hk", sequence.q[-1].astype(np.float64), k) * heads.scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hk,khd->hd", weights / weights.sum(-1, keepdims=True), v)
    [result] = attend([(sequence, length - 1, length)], heads, "f32", threads=2)
    np.testing.assert_allclose(result[0], expected, atol=1e-5)
