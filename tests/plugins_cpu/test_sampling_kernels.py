"""sample_greedy and sample_random against plain references of what they mean."""

from dataclasses import dataclass

import numpy as np
import pytest
from kernel_caller import LEVELS, NUM_LOGITS, call

MAX_LOGPROBS = 20


@dataclass
class Sampled:
    token_ids: np.ndarray  # [rows]
    logprobs: np.ndarray
    top_ids: np.ndarray  # [rows, 20]
    top_logprobs: np.ndarray
    last_token: np.ndarray


def sample(
    logits: np.ndarray,
    *,
    level: str = LEVELS[-1],
    threads: int = 1,
    num_logprobs: int | np.ndarray = -1,
    sample_rows: np.ndarray | None = None,
    random: dict[str, object] | None = None,
) -> Sampled:
    """Sample each row of logits [rows, vocab]; `random` holds per-row arrays or one value for all."""
    rows, vocab = logits.shape
    padded = np.full((rows + 1, vocab + 3), np.nan, np.float32)
    padded[:rows, :vocab] = logits
    result = Sampled(
        np.full(rows + 1, -9, np.int32),
        np.full(rows + 1, np.nan, np.float32),
        np.full((rows + 1, MAX_LOGPROBS), -9, np.int32),
        np.full((rows + 1, MAX_LOGPROBS), np.nan, np.float32),
        np.full(rows + 4, -3, np.int32),
    )
    fields: dict[str, object] = {}
    name = "sample_greedy"
    if random is not None:
        name = "sample_random"
        dtypes = {
            "temperature": (np.float32, 1.0),
            "top_k": (np.int32, 0),
            "top_p": (np.float32, 1.0),
            "min_p": (np.float32, 0.0),
            "seed": (np.uint64, 0),
            "output_position": (np.int32, 0),
        }
        assert set(random) <= set(dtypes)
        for field, (dtype, default) in dtypes.items():
            fields[field] = np.broadcast_to(np.asarray(random.get(field, default), dtype), rows).copy()
    call(
        name,
        level=level,
        threads=threads,
        num_logits=rows,
        logits=padded,
        logits_stride=vocab + 3,
        sample_rows=np.arange(rows, dtype=np.int32) if sample_rows is None else sample_rows.astype(np.int32),
        num_logprobs=np.broadcast_to(np.asarray(num_logprobs, np.int32), rows).copy(),
        last_token=result.last_token,
        sampled_token_ids=result.token_ids,
        sampled_logprobs=result.logprobs,
        top_token_ids=result.top_ids,
        top_logprobs=result.top_logprobs,
        count=NUM_LOGITS,
        vocab=vocab,
        **fields,
    )
    assert result.token_ids[rows] == -9 and np.isnan(result.logprobs[rows]), "wrote beyond the live rows"
    assert (result.top_ids[rows] == -9).all() and np.isnan(result.top_logprobs[rows]).all()
    live = (a[:rows] for a in (result.token_ids, result.logprobs, result.top_ids, result.top_logprobs))
    return Sampled(*live, result.last_token)


def philox_words(seed: int, output_position: int, token: int) -> list[int]:
    """Philox4x32-10 of the counter and key that noise.h documents, in plain integers."""
    mask = 0xFFFFFFFF
    key = [seed & mask, seed >> 32]
    c = [token // 4, output_position, 0, 0]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ key[0], second & mask, (first >> 32) ^ c[3] ^ key[1], first & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c


def gumbel_noise(seed: int, output_position: int, vocab: int) -> np.ndarray:
    words = [philox_words(seed, output_position, token)[token % 4] for token in range(vocab)]
    uniform = ((np.array(words, np.uint64) >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
    return -np.log(-np.log(uniform))


def kept_tokens(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> set[int]:
    """What the filters keep of one row, by sorting."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if min_p == 0.0 or scaled[i] >= np.log(np.float32(min_p))]
    if top_k > 0:
        order = order[:top_k]
    mass = np.exp(scaled[order])
    if top_p < 1.0:
        reached = np.cumsum(mass) >= top_p * mass.sum()
        order = order[: int(np.argmax(reached)) + 1]
    return set(order)


def test_philox_reference_gives_the_published_test_vector() -> None:
    """Random123's kat_vectors: philox4x32-10, counter and key all zero."""
    assert philox_words(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [1, 7, 64, 1003])
def test_greedy_takes_the_lowest_id_of_the_largest_logit(vocab: int, level: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 4, (9, vocab)).astype(np.float32)  # many ties
    for threads in (1, 2, 3):
        result = sample(logits, level=level, threads=threads)
        np.testing.assert_array_equal(result.token_ids, logits.argmax(1))
        np.testing.assert_array_equal(result.last_token[:9], logits.argmax(1))
        assert (result.last_token[9:] == -3).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("random", [None, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 1}])
def test_nan_and_infinite_logits_never_break_a_row(random: dict[str, object] | None, level: str) -> None:
    inf, nan = np.inf, np.nan
    rows = {
        0: [nan, nan, nan, nan, nan],
        3: [nan, 1.0, nan, 2.0, -inf],
        1: [nan, -inf, -inf, nan, -inf],
        2: [-1.0, -2.0, inf, 5.0, nan],
        4: [-inf, -inf, -inf, -inf, -3.0],
    }
    for expected, row in rows.items():
        result = sample(np.array([row], np.float32), level=level, random=random, num_logprobs=3)
        assert result.token_ids[0] == expected
        assert not np.isnan(result.logprobs).any() and not np.isnan(result.top_logprobs).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [3, 50, 5003])
def test_logprobs_are_of_the_raw_softmax_and_only_where_asked_for(vocab: int, level: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((4, vocab)) * 5).astype(np.float32)
    logits[2] = np.round(logits[2])  # ties among the top
    asked = np.array([20, -1, 5, 0])
    result = sample(
        logits, level=level, threads=2, num_logprobs=asked, random={"temperature": 1.7, "seed": [1, 2, 3, 4]}
    )
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max(1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(1, keepdims=True))
    for i, n in enumerate(asked):
        expected = logprobs[i, result.token_ids[i]] if n >= 0 else 0.0
        assert result.logprobs[i] == pytest.approx(expected, abs=3e-6, rel=1e-6)
        count = max(0, min(n, vocab))
        top = sorted(range(vocab), key=lambda t: (-logits[i, t], t))[:count]
        np.testing.assert_array_equal(result.top_ids[i, :count], top)
        np.testing.assert_allclose(result.top_logprobs[i, :count], logprobs[i, top], atol=3e-6, rtol=1e-6)
        assert (result.top_ids[i, count:] == 0).all() and (result.top_logprobs[i, count:] == 0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_without_a_request_row_sets_no_last_token(level: str) -> None:
    logits = np.eye(4, 9, k=2, dtype=np.float32)
    result = sample(logits, level=level, sample_rows=np.array([-1, 6, -1, 0]))
    expected = np.full(8, -3)
    expected[6], expected[0] = 3, 5
    np.testing.assert_array_equal(result.last_token, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [5, 67, 1000])
def test_noise_is_the_documented_philox_construction(vocab: int, level: str) -> None:
    rng = np.random.default_rng(vocab)
    rows = 24
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    seeds = rng.integers(0, 2**64, rows, dtype=np.uint64)
    positions = rng.integers(0, 2**31, rows, dtype=np.int32)
    temperatures = rng.uniform(0.2, 3.0, rows).astype(np.float32)
    result = sample(
        logits,
        level=level,
        threads=3,
        random={"temperature": temperatures, "seed": seeds, "output_position": positions},
    )
    for i in range(rows):
        noise = gumbel_noise(int(seeds[i]), int(positions[i]), vocab)
        score = (logits[i].astype(np.float64) - logits[i].max()) / temperatures[i] + noise
        assert score[result.token_ids[i]] >= score.max() - 1e-4  # float noise may swap what is that close


def test_the_same_seed_and_position_sample_the_same_in_any_batch_order_and_thread_count() -> None:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((7, 997)).astype(np.float32)
    seeds = np.arange(7, dtype=np.uint64) * 977
    random = {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "min_p": 0.001}
    together = sample(logits, random={**random, "seed": seeds}).token_ids
    order = rng.permutation(7)
    shuffled = sample(logits[order], threads=3, random={**random, "seed": seeds[order]}).token_ids
    np.testing.assert_array_equal(shuffled, together[order])
    for i in range(7):
        assert sample(logits[i : i + 1], random={**random, "seed": seeds[i]}).token_ids[0] == together[i]
    elsewhere = sample(logits, random={**random, "seed": seeds, "output_position": 1}).token_ids
    assert (elsewhere != together).any()


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 100},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 3, "top_p": 0.99},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.3},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_sampled_frequencies_follow_the_filtered_distribution(filters: dict[str, float], level: str) -> None:
    """Chi-square over 20,000 seeds; the threshold is passed with p > 1e-4 for up to 11 degrees of freedom."""
    rng = np.random.default_rng(9)
    vocab, draws, temperature = 12, 20_000, 0.8
    logits = (rng.standard_normal(vocab) * 1.2).astype(np.float32)
    kept = sorted(kept_tokens(logits, temperature, **filters))
    assert len(kept) < vocab or not filters or filters.get("top_k") == 100
    random = {"temperature": temperature, "seed": np.arange(draws, dtype=np.uint64), **filters}
    ids = sample(np.tile(logits, (draws, 1)), level=level, threads=2, random=random).token_ids
    counts = np.bincount(ids, minlength=vocab)
    probabilities = np.exp((logits[kept].astype(np.float64) - logits.max()) / temperature)
    expected = draws * probabilities / probabilities.sum()
    assert counts.sum() == counts[kept].sum(), "a filtered token was sampled"
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 38.0


@pytest.mark.parametrize("level", LEVELS)
def test_filters_keep_exactly_the_reference_set_on_hard_rows(level: str) -> None:
    """With temperature 100 the kept tokens are nearly uniform, so 400 draws of a small set show all of it."""
    rng = np.random.default_rng(10)
    ties = np.zeros(40, np.float32)
    steps = np.repeat(np.arange(8, dtype=np.float32), 5)[rng.permutation(40)]
    close = (1.0 + np.arange(40) * 2.0**-23).astype(np.float32)[rng.permutation(40)]
    masked = np.where(np.arange(40) % 3 == 0, rng.standard_normal(40), -np.inf).astype(np.float32)
    draws = 400
    for logits in (ties, steps, close, masked):
        for top_k in (1, 3, 7):
            kept = kept_tokens(logits, 100.0, top_k=top_k)
            random = {"temperature": 100.0, "top_k": top_k, "seed": np.arange(draws)}
            ids = sample(np.tile(logits, (draws, 1)), level=level, random=random).token_ids
            assert set(ids.tolist()) == kept
    # equal tokens: top_p takes the fewest that reach the mass, lowest ids first
    random = {"temperature": 1.0, "top_p": 0.1, "seed": np.arange(draws)}
    ids = sample(np.tile(ties, (draws, 1)), level=level, random=random).token_ids
    assert set(ids.tolist()) in ({0, 1, 2, 3}, {0, 1, 2, 3, 4})  # 0.1 in float is above 4 / 40


def test_temperatures_are_per_row_and_zero_is_greedy() -> None:
    rng = np.random.default_rng(11)
    logits = rng.standard_normal((3, 500)).astype(np.float32)
    random = {"temperature": [0.0, 1e-6, 50.0], "seed": [5, 6, 7]}
    ids = sample(logits, random=random).token_ids
    assert ids[0] == logits[0].argmax() and ids[1] == logits[1].argmax()
    assert ids[2] != logits[2].argmax()
