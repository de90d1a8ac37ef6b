"""Rotary embedding and cache writes against numpy."""

import numpy as np
import pytest
from kernel_caller import LEVELS, NUM_TOKENS, call

CACHE_DTYPES = {"f32": np.float32, "f16": np.float16}
NUM_BLOCKS = 5
# heads, kv_heads, head_dim, half, block_size
SHAPES = [(9, 3, 64, 32, 16), (4, 2, 20, 10, 5), (3, 1, 100, 16, 16), (2, 2, 7, 3, 4), (1, 1, 2, 1, 1)]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [tokens, heads, head_dim], cos and sin [tokens, half]; float32, each product rounded."""
    half = cos.shape[1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


def strided(x: np.ndarray, extra: int) -> np.ndarray:
    """[tokens, heads, head_dim] as rows of a wider, longer matrix; all else is NaN."""
    matrix = np.full((len(x) + 2, x[0].size + extra), np.nan, np.float32)
    matrix[: len(x), : x[0].size] = x.reshape(len(x), -1)
    return matrix


def slots(num_tokens: int, block_size: int) -> np.ndarray:
    """Distinct random slots, every third token skipped."""
    chosen = np.random.default_rng(7).permutation(NUM_BLOCKS * block_size)[:num_tokens].astype(np.int64)
    chosen[2::3] = -1
    return np.append(chosen, -(2**40))


def written(cache: np.ndarray, k: np.ndarray, v: np.ndarray, slot_mapping: np.ndarray) -> np.ndarray:
    """What the cache must hold afterwards."""
    expected, size = cache.copy(), cache.shape[3]
    for token in range(len(k)):
        slot = slot_mapping[token]
        if slot >= 0:
            expected[slot // size, 0, :, slot % size] = k[token].astype(cache.dtype)
            expected[slot // size, 1, :, slot % size] = v[token].astype(cache.dtype)
    return expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_cos_and_sin_are_accurate_for_float_angles(scaling: float, level: str) -> None:
    positions = np.array([0, 1, 2, 77, 8191, 131071, 1_000_000, -5], np.int32)
    half = 37
    inv_freq = (500000.0 ** -(np.arange(half) / half)).astype(np.float32)
    for threads in (1, 2, 3):
        cos, sin = (np.full((8, half), 9, np.float32) for _ in range(2))
        call("rope_cos_sin", level=level, threads=threads, num_tokens=7, positions=positions,
             inv_freq=inv_freq, cos=cos, sin=sin, count=NUM_TOKENS, half=half, scaling=scaling)  # fmt: skip
        angles = (positions[:7].astype(np.float32)[:, None] * inv_freq).astype(np.float64)
        np.testing.assert_allclose(cos[:7], np.cos(angles) * scaling, atol=2e-7)
        np.testing.assert_allclose(sin[:7], np.sin(angles) * scaling, atol=2e-7)
        assert (cos[7] == 9).all() and (sin[7] == 9).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_apply_rope(shape: tuple[int, ...], in_place: bool, level: str) -> None:
    heads, _, head_dim, half, _ = shape
    x, cos, sin = normal(1, 5, heads, head_dim), normal(2, 6, half), normal(3, 6, half)
    width = heads * head_dim
    for threads in (1, 2, 3):
        source = strided(x, 3)
        target = source if in_place else np.full_like(source, np.nan)
        call("apply_rope", level=level, threads=threads, num_tokens=5, x=source, cos=cos, sin=sin, y=target,
             x_stride=width + 3, y_stride=width + 3, count=NUM_TOKENS, num_heads=heads, head_dim=head_dim,
             half=half)  # fmt: skip
        expected = rotate(x, cos[:5], sin[:5]).reshape(5, -1)
        np.testing.assert_array_equal(target[:5, :width], expected)
        assert np.isnan(target[5:]).all() and np.isnan(target[:, width:]).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kv_write_fills_the_slots_and_nothing_else(
    shape: tuple[int, ...], cache_dtype: str, level: str
) -> None:
    _, kv_heads, head_dim, _, block_size = shape
    num_tokens = min(11, NUM_BLOCKS * block_size)
    k, v = normal(1, num_tokens, kv_heads, head_dim), normal(2, num_tokens, kv_heads, head_dim)
    slot_mapping = slots(num_tokens, block_size)
    width = kv_heads * head_dim
    for threads in (1, 2, 3):
        cache = normal(3, NUM_BLOCKS, 2, kv_heads, block_size, head_dim).astype(CACHE_DTYPES[cache_dtype])
        expected = written(cache, k, v, slot_mapping)
        call(f"kv_write.{cache_dtype}", level=level, threads=threads, num_tokens=num_tokens, k=strided(k, 1),
             v=strided(v, 4), cache=cache, slot_mapping=slot_mapping, k_stride=width + 1, v_stride=width + 4,
             count=NUM_TOKENS, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim)  # fmt: skip
        np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_kv_write_is_rope_then_write(shape: tuple[int, ...], cache_dtype: str, level: str) -> None:
    heads, kv_heads, head_dim, half, block_size = shape
    num_tokens = min(11, NUM_BLOCKS * block_size)
    q, k = normal(1, num_tokens, heads, head_dim), normal(2, num_tokens, kv_heads, head_dim)
    v = normal(3, num_tokens, kv_heads, head_dim)
    cos, sin = normal(4, num_tokens, half), normal(5, num_tokens, half)
    slot_mapping = slots(num_tokens, block_size)
    for threads in (1, 2, 3):
        for in_place in (False, True):
            cache = normal(6, NUM_BLOCKS, 2, kv_heads, block_size, head_dim).astype(CACHE_DTYPES[cache_dtype])
            expected = written(cache, rotate(k, cos, sin), v, slot_mapping)
            source = strided(q, 3)
            target = source if in_place else np.full_like(source, np.nan)
            call(f"rope_kv_write.{cache_dtype}", level=level, threads=threads, num_tokens=num_tokens,
                 q=source, k=strided(k, 1), v=strided(v, 4), cos=cos, sin=sin, q_out=target, cache=cache,
                 slot_mapping=slot_mapping, q_stride=heads * head_dim + 3, k_stride=kv_heads * head_dim + 1,
                 v_stride=kv_heads * head_dim + 4, q_out_stride=heads * head_dim + 3, count=NUM_TOKENS,
                 num_heads=heads, kv_heads=kv_heads, head_dim=head_dim, half=half,
                 block_size=block_size)  # fmt: skip
            np.testing.assert_array_equal(cache, expected)
            np.testing.assert_array_equal(
                target[:num_tokens, : heads * head_dim], rotate(q, cos, sin).reshape(num_tokens, -1)
            )
            assert np.isnan(target[num_tokens:]).all()


@pytest.mark.parametrize("level", LEVELS)
def test_half_precision_conversion_is_ieee_in_both_directions(level: str) -> None:
    """Subnormals, ties to even, overflow, infinities and NaN, through kv_write and back through attention."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    finite = halves[np.isfinite(halves)].astype(np.float32)
    between = (finite[:-1] + finite[1:]) / 2  # ties
    values = np.concatenate([
        finite, between,
        np.nextafter(between, np.float32(np.inf)), np.nextafter(between, np.float32(-np.inf)),
        np.array([65519, 65520, -65520, 1e30, np.inf, -np.inf, 1e-8, -1e-8, 2.98e-8, 2.99e-8], np.float32),
    ])  # fmt: skip
    head_dim = 64
    values = np.append(values, np.zeros(-len(values) % head_dim, np.float32)).reshape(-1, 1, head_dim)
    num_tokens = len(values)
    cache = np.zeros((1, 2, 1, num_tokens, head_dim), np.float16)
    call("kv_write.f16", level=level, num_tokens=num_tokens, k=values, v=values, cache=cache,
         slot_mapping=np.arange(num_tokens, dtype=np.int64), k_stride=head_dim, v_stride=head_dim,
         count=NUM_TOKENS, kv_heads=1, block_size=num_tokens, head_dim=head_dim)  # fmt: skip
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(cache[0, 0, 0], values[:, 0].astype(np.float16))
    # a sequence of one token reads its own value back exactly
    cache[0, 1, 0, 0] = halves[np.arange(0x0001, 0x0001 + 64)]
    cache[0, 0, 0, 0] = 0
    y = np.empty((1, 1, head_dim), np.float32)
    one = np.ones((1, 1, head_dim), np.float32)
    table, seq_lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    query_starts = np.arange(2, dtype=np.int32)
    call("paged_attention.f16", level=level, num_tokens=1, num_seqs=1, q=one, cache=cache, block_tables=table,
         seq_lens=seq_lens, query_starts=query_starts, y=y, q_stride=head_dim, y_stride=head_dim, num_heads=1,
         kv_heads=1, head_dim=head_dim, block_size=num_tokens, table_width=1, scale=1.0)  # fmt: skip
    np.testing.assert_array_equal(y[0, 0], cache[0, 1, 0, 0].astype(np.float32))
