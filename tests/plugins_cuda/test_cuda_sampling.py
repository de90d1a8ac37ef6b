"""sample_greedy and sample_random against their plain references, and against the distributions they draw from."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from castiron.models.ops import REFERENCES
from castiron.models.philox import gumbel_noise
from castiron.models.sampling_ops import MAX_LOGPROBS
from castiron.plugins_cuda.specs import SPECS

pytest.importorskip("cuda.bindings", reason="kernels are launched through cuda-bindings")
from cuda_kernel_caller import NUM_LOGITS, call, poisoned

pytestmark = pytest.mark.gpu

SPARE = 3  # rows of capacity beyond the live ones
REQUEST_ROWS = 70_000  # entries of last_token
UNTOUCHED = -3
DEFAULTS = {
    "temperature": (np.float32, 1.0), "top_k": (np.int32, 0), "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0), "seed": (np.uint64, 0), "output_position": (np.int32, 0),
}  # fmt: skip


VARIANT = ""  # suffix of the kernels' names


@pytest.fixture(autouse=True, params=["", ".cta"], ids=["cluster", "cta"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with a cluster of CTAs a row, and with one CTA."""
    monkeypatch.setattr(sys.modules[__name__], "VARIANT", request.param)
    return request.param


@dataclass
class Sampled:
    token_ids: np.ndarray  # [rows]
    logprobs: np.ndarray
    top_ids: np.ndarray  # [rows, 20]
    top_logprobs: np.ndarray
    last_token: np.ndarray  # [REQUEST_ROWS]


def random_fields(rows: int, random: dict[str, Any]) -> dict[str, np.ndarray]:
    """All fields of sample_random for each row; `random` holds per-row arrays or one value for all."""
    assert set(random) <= set(DEFAULTS)
    return {
        name: np.broadcast_to(np.asarray(random.get(name, default), dtype), rows).copy()
        for name, (dtype, default) in DEFAULTS.items()
    }


def sample(
    logits: np.ndarray,
    *,
    random: dict[str, Any] | None = None,
    num_logprobs: int | np.ndarray = -1,
    sample_rows: np.ndarray | None = None,
    extra: int = 4,
    late: bool = True,
    repeat: bool = True,
) -> Sampled:
    """Sample each row of logits f32 [rows, vocab], `extra` columns apart; checks what must stay untouched."""
    rows, vocab = logits.shape
    whole = torch.full((rows + SPARE, vocab + extra), float("nan"), device="cuda")
    whole[:rows, :vocab] = torch.from_numpy(np.ascontiguousarray(logits))

    def step(values: np.ndarray, fill: int) -> torch.Tensor:
        padded = np.concatenate([values, np.full(SPARE, fill, values.dtype)])
        return torch.from_numpy(padded.view(np.int64) if padded.dtype == np.uint64 else padded).cuda()

    rows_set = np.arange(rows) if sample_rows is None else sample_rows
    fields: dict[str, Any] = {
        "sample_rows": step(rows_set.astype(np.int32), 5),
        "num_logprobs": step(np.broadcast_to(np.asarray(num_logprobs, np.int32), rows), 20),
    }
    name = "sample_greedy"
    if random is not None:
        name = "sample_random"
        fields |= {key: step(values, 1) for key, values in random_fields(rows, random).items()}

    def once() -> tuple[torch.Tensor, ...]:
        capacity = rows + SPARE
        last_token = torch.full((REQUEST_ROWS,), UNTOUCHED, dtype=torch.int32, device="cuda")
        token_ids = poisoned(capacity, dtype=torch.int32)
        logprobs = poisoned(capacity, dtype=torch.float32)
        top_ids = poisoned(capacity, MAX_LOGPROBS, dtype=torch.int32)
        top_logprobs = poisoned(capacity, MAX_LOGPROBS, dtype=torch.float32)
        call(
            SPECS[name + VARIANT], num_logits=rows, capacities={"max_logits": capacity},
            late=("logits",) if late else (),
            logits=whole, logits_stride=vocab + extra, last_token=last_token, sampled_token_ids=token_ids,
            sampled_logprobs=logprobs, top_token_ids=top_ids, top_logprobs=top_logprobs, count=NUM_LOGITS,
            vocab=vocab, **fields,
        )  # fmt: skip
        for output in (token_ids, logprobs, top_ids, top_logprobs):
            assert (output[rows:].view(torch.int32) == -1).all(), "wrote beyond the live rows"
        return *(output[:rows] for output in (token_ids, logprobs, top_ids, top_logprobs)), last_token

    results = once()
    if repeat:
        for a, b in zip(results, once(), strict=True):
            assert a.view(torch.int32).equal(b.view(torch.int32)), "a second run differs"
    return Sampled(*(result.cpu().numpy() for result in results))


def reference(
    logits: np.ndarray, random: dict[str, Any] | None, num_logprobs: np.ndarray, sample_rows: np.ndarray
) -> Sampled:
    rows = len(logits)
    inputs = [
        torch.from_numpy(logits),
        torch.from_numpy(sample_rows.astype(np.int32)),
        torch.from_numpy(num_logprobs.astype(np.int32)),
        torch.full((REQUEST_ROWS,), UNTOUCHED, dtype=torch.int32),
    ]
    if random is None:
        results = REFERENCES["sample_greedy"](*inputs)
    else:
        fields = random_fields(rows, random)
        results = REFERENCES["sample_random"](*inputs, *(torch.from_numpy(fields[name]) for name in DEFAULTS))
    return Sampled(*(result.numpy() for result in results))


def scaled_logits(logits: np.ndarray, temperature: float) -> np.ndarray:
    """f32 [vocab], as the reference rounds them."""
    return (logits - np.nanmax(logits)) / np.float32(temperature)


def kept_tokens(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """bool [vocab]: what the filters leave, by sorting."""
    order = np.argsort(-scaled, kind="stable")
    if min_p > 0:
        order = order[scaled[order] >= np.log(np.float32(min_p))]
    if top_k > 0:
        order = order[:top_k]
    mass = np.exp(scaled[order].astype(np.float64))
    keep = np.ones(len(order), bool)
    if top_p < 1:
        keep &= np.cumsum(mass) - mass < np.float64(np.float32(top_p)) * mass.sum()
    keep[0] = True
    kept = np.zeros(len(scaled), bool)
    kept[order[keep]] = True
    return kept


def assert_drawn_as_documented(logits: np.ndarray, token_ids: np.ndarray, random: dict[str, Any]) -> None:
    """Each token is kept and, to what float noise may swap, the one with the largest score."""
    fields = random_fields(len(logits), random)
    for i, row in enumerate(logits):
        scaled = scaled_logits(row, fields["temperature"][i])
        kept = kept_tokens(scaled, fields["top_k"][i], fields["top_p"][i], fields["min_p"][i])
        noise = gumbel_noise(int(fields["seed"][i]), int(fields["output_position"][i]), len(row))
        score = np.where(kept, scaled + noise, -np.inf)
        assert kept[token_ids[i]], f"row {i}: {token_ids[i]} isn't kept"
        assert score[token_ids[i]] >= score.max() - 1e-4, f"row {i}"


def test_the_reference_noise_has_the_published_test_vector() -> None:
    """Random123's kat_vectors: philox4x32-10, counter and key all zero."""
    from castiron.models.philox import philox4x32

    words = philox4x32(np.zeros((1, 4), np.uint32), 0)[0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


VOCABS = [1, 3, 7, 33, 64, 1003, 32_000, 128_256, 151_669, 262_144]


@pytest.mark.parametrize(
    "vocab", [v if v != 1003 else pytest.param(v, marks=pytest.mark.sanitize) for v in VOCABS]
)
@pytest.mark.parametrize("extra", [0, 4, 5])
def test_greedy_takes_the_lowest_id_of_the_largest_logit(vocab: int, extra: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 4, (9, vocab)).astype(np.float32)  # many ties
    logits[5:] = rng.standard_normal((4, vocab))
    logits[0] = -0.0
    logits[0, vocab // 2 :] = 0.0  # equal to -0
    result = sample(logits, extra=extra)
    np.testing.assert_array_equal(result.token_ids, logits.argmax(1))
    np.testing.assert_array_equal(result.last_token[:9], logits.argmax(1))
    assert (result.last_token[9:] == UNTOUCHED).all()
    assert not result.logprobs.any() and not result.top_ids.any() and not result.top_logprobs.any()


def test_greedy_finds_the_largest_logit_wherever_it_is() -> None:
    vocab = 9001
    places = np.unique(np.concatenate([np.arange(0, vocab, 137), [3, 4, 1127, 1128, vocab - 2, vocab - 1]]))
    logits = np.zeros((len(places), vocab), np.float32)
    logits[np.arange(len(places)), places] = 1.0
    np.testing.assert_array_equal(sample(logits, extra=3).token_ids, places)
    np.testing.assert_array_equal(sample(logits, random={"temperature": 0.0}).token_ids, places)


@pytest.mark.parametrize("random", [None, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 1}])
def test_nan_and_infinite_logits_never_break_a_row(random: dict[str, Any] | None) -> None:
    inf, nan = np.inf, np.nan
    rows = {
        0: [nan, nan, nan, nan, nan],
        3: [nan, 1.0, nan, 2.0, -inf],
        1: [nan, -inf, -inf, nan, -inf],
        2: [-1.0, -2.0, inf, 5.0, nan],
        4: [-inf, -inf, -inf, -inf, -3.0],
    }
    logits = np.array(list(rows.values()), np.float32)
    result = sample(logits, random=random, num_logprobs=3)
    np.testing.assert_array_equal(result.token_ids, list(rows))
    assert not np.isnan(result.logprobs).any() and not np.isnan(result.top_logprobs).any()
    np.testing.assert_array_equal(result.top_ids[1, :3], [3, 1, 4])
    np.testing.assert_array_equal(result.top_ids[3, :3], [2, 3, 0])
    assert result.logprobs[3] == 0.0 and (result.top_logprobs[3, :3] == [0.0, -inf, -inf]).all()


def test_filters_pass_nan_and_infinite_logits_over() -> None:
    inf, nan = np.inf, np.nan
    row = np.array([nan, 1.0, -inf, 1.5, nan, -inf, 0.5], np.float32)
    draws = 512
    for filters in ({}, {"top_k": 5}, {"top_p": 0.99}, {"top_k": 6, "top_p": 0.999, "min_p": 1e-6}):
        random = {"seed": np.arange(draws), "temperature": 2.0, **filters}
        assert set(sample(np.tile(row, (draws, 1)), random=random).token_ids) == {1, 3, 6}
    row = np.array([1.0, inf, inf, nan, 2.0], np.float32)
    drawn = sample(np.tile(row, (draws, 1)), random={"seed": np.arange(draws), "top_p": 0.9}).token_ids
    assert set(drawn) == {1, 2}


@pytest.mark.parametrize("random", [None, {"temperature": 1.7, "seed": [1, 2, 3, 4, 5], "top_p": 0.9}])
@pytest.mark.parametrize("vocab", [3, 50, 5003, 128_256])
def test_logprobs_are_of_the_raw_softmax_and_only_where_asked_for(
    vocab: int, random: dict[str, Any] | None
) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((5, vocab)) * 5).astype(np.float32)
    logits[2] = np.round(logits[2])  # ties among the top
    logits[4, 1:] = -np.inf
    asked, rows_set = np.array([20, -1, 5, 0, 30]), np.array([7, -1, 0, 3, 2])
    result = sample(logits, random=random, num_logprobs=asked, sample_rows=rows_set)
    expected = reference(logits, random, asked, rows_set)
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)
    np.testing.assert_array_equal(result.last_token, expected.last_token)
    np.testing.assert_array_equal(result.top_ids, expected.top_ids)
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=3e-6, rtol=1e-6)
    np.testing.assert_allclose(result.top_logprobs, expected.top_logprobs, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("vocab", [5, 67, 1000, 32_000, 151_669])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_noise_is_the_documented_philox_construction(vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    rows = 24
    logits = (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)
    random = {
        "seed": rng.integers(0, 2**64, rows, dtype=np.uint64),
        "output_position": rng.integers(0, 2**31, rows, dtype=np.int32),
        "temperature": rng.uniform(0.2, 3.0, rows).astype(np.float32),
    }
    assert_drawn_as_documented(logits, sample(logits, random=random).token_ids, random)


def test_the_same_seed_and_position_sample_the_same_in_any_batch() -> None:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((7, 997)).astype(np.float32)
    seeds = np.arange(7, dtype=np.uint64) * np.uint64(977)
    random = {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "min_p": 0.001}
    together = sample(logits, random={**random, "seed": seeds}).token_ids
    order = rng.permutation(7)
    shuffled = sample(logits[order], random={**random, "seed": seeds[order]}, extra=1).token_ids
    np.testing.assert_array_equal(shuffled, together[order])
    for i in range(7):
        assert sample(logits[i : i + 1], random={**random, "seed": seeds[i]}).token_ids[0] == together[i]
    elsewhere = sample(logits, random={**random, "seed": seeds, "output_position": 1}).token_ids
    assert (elsewhere != together).any()


@pytest.mark.parametrize("vocab", [pytest.param(12, marks=pytest.mark.sanitize), 1000, 128_256])
@pytest.mark.parametrize("shape", ["flat", "steep", "ties", "equal"])
def test_filtered_draws_match_the_sorted_reference(vocab: int, shape: str) -> None:
    rng = np.random.default_rng(vocab)
    filters = [
        {"top_k": 2}, {"top_k": 50}, {"top_k": vocab - 1}, {"top_k": vocab + 5}, {"top_p": 0.5}, {"top_p": 0.9},
        {"top_p": 0.999}, {"top_p": 1e-6}, {"min_p": 0.2}, {"min_p": 1.0}, {"min_p": 1e-4},
        {"top_k": 50, "top_p": 0.8}, {"top_k": 40, "top_p": 0.95, "min_p": 0.05}, {"top_k": 7, "top_p": 0.3},
    ]  # fmt: skip
    rows = len(filters)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    logits *= {"flat": 0.5, "steep": 6.0, "ties": 2.0, "equal": 0.0}[shape]
    if shape == "ties":
        logits = np.round(logits)
    random = {
        **{
            name: np.array([f.get(name, default) for f in filters])
            for name, (_, default) in DEFAULTS.items()
            if name in ("top_k", "top_p", "min_p")
        },
        "seed": np.arange(rows) + 11,
        "temperature": rng.uniform(0.5, 1.5, rows).astype(np.float32),
    }
    assert_drawn_as_documented(logits, sample(logits, random=random).token_ids, random)


@pytest.mark.parametrize(
    "vocab,top_k,top_p,kept", [(5000, 37, 1.0, 37), (4000, 0, 0.01, 40), (600, 100, 0.25, 25)]
)
def test_ties_at_the_cut_are_kept_by_id(vocab: int, top_k: int, top_p: float, kept: int) -> None:
    """Equal logits: exactly the lowest `kept` ids are drawn, all of them in 4,000 draws."""
    draws = 4000
    random = {
        "seed": np.arange(draws),
        "top_k": top_k,
        "top_p": np.nextafter(np.float32(top_p), np.float32(0)),
    }
    if top_p == 1.0:
        random["top_p"] = 1.0
    drawn = sample(np.zeros((draws, vocab), np.float32), random=random, late=False).token_ids
    assert set(drawn) == set(range(kept))


def chi_square(logits: np.ndarray, temperature: float, draws: int, **filters: Any) -> tuple[float, int]:
    """Statistic and degrees of freedom of `draws` tokens of distinct seeds and positions; checks the kept set."""
    scaled = scaled_logits(logits, temperature)
    kept = kept_tokens(scaled, filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0))
    counts = np.zeros(len(logits))
    half = draws // 2  # a launch has up to 65,535 rows
    for first in (0, half):
        seeds = np.arange(first, first + half, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 % 2**63)
        random = {
            "temperature": temperature,
            "seed": seeds,
            "output_position": np.arange(half) % 977,
            **filters,
        }
        ids = sample(np.tile(logits, (half, 1)), random=random, late=False, repeat=False).token_ids
        counts += np.bincount(ids, minlength=len(logits))
    assert counts[~kept].sum() == 0, "a filtered token was drawn"
    mass = np.exp(scaled[kept].astype(np.float64))
    expected = 2 * half * mass / mass.sum()
    return float(((counts[kept] - expected) ** 2 / expected).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize(
    "filters",
    [
        {}, {"top_k": 2}, {"top_k": 4}, {"top_k": 100}, {"top_p": 0.5}, {"top_p": 0.9}, {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.8}, {"top_k": 3, "top_p": 0.99}, {"top_k": 6, "top_p": 0.7, "min_p": 0.3},
    ],
    ids=str,
)  # fmt: skip
def test_drawn_frequencies_follow_the_filtered_distribution(filters: dict[str, Any]) -> None:
    """The threshold is passed with p > 1e-4 for up to 11 degrees of freedom."""
    logits = (np.random.default_rng(9).standard_normal(12) * 1.2).astype(np.float32)
    statistic, _ = chi_square(logits, 0.8, 100_000, **filters)
    assert statistic < 38.0


def test_drawn_frequencies_follow_the_softmax_over_all_parts_of_a_row() -> None:
    logits = np.random.default_rng(10).standard_normal(256).astype(np.float32)
    statistic, freedom = chi_square(logits, 1.0, 130_000)
    assert freedom == 255 and statistic < 348.0  # p = 1e-4


def test_logits_beyond_two_to_the_31_elements() -> None:
    vocab, stride = 1000, 2**30
    values = torch.randn(3, vocab)
    logits = torch.empty(2 * stride + vocab, device="cuda")
    for row in range(3):
        logits[row * stride : row * stride + vocab] = values[row].cuda()
    token_ids = poisoned(3, dtype=torch.int32)
    outputs = {
        "sampled_token_ids": token_ids,
        "sampled_logprobs": poisoned(3, dtype=torch.float32),
        "top_token_ids": poisoned(3, MAX_LOGPROBS, dtype=torch.int32),
        "top_logprobs": poisoned(3, MAX_LOGPROBS, dtype=torch.float32),
        "last_token": torch.zeros(3, dtype=torch.int32, device="cuda"),
    }
    call(
        SPECS["sample_greedy" + VARIANT], num_logits=3, count=NUM_LOGITS, vocab=vocab, logits=logits,
        logits_stride=stride,
        sample_rows=torch.arange(3, dtype=torch.int32, device="cuda"),
        num_logprobs=torch.full((3,), 1, dtype=torch.int32, device="cuda"), **outputs,
    )  # fmt: skip
    assert token_ids.tolist() == values.argmax(1).tolist()
