"""Sampling references: distributions, cuts, ties; and the CPU kernels draw the very same ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from castiron.models import sampling_ops as ops
from castiron.models.philox import gumbel_noise, philox4x32

torch.set_num_threads(1)


def sample(logits: torch.Tensor, **fields: Any) -> list[int]:
    return sample_all(logits, **fields)[0].tolist()


def sample_all(logits: torch.Tensor, **fields: Any) -> tuple[torch.Tensor, ...]:
    rows = logits.shape[0]
    defaults: dict[str, tuple[torch.dtype, float]] = {
        "temperature": (torch.float32, 1.0),
        "top_k": (torch.int32, 0),
        "top_p": (torch.float32, 1.0),
        "min_p": (torch.float32, 0.0),
        "seed": (torch.uint64, 0),
        "output_position": (torch.int32, 0),
    }
    arguments = [
        torch.tensor(np.broadcast_to(fields.get(name, default), rows).tolist(), dtype=dtype)
        for name, (dtype, default) in defaults.items()
    ]
    num_logprobs = torch.full((rows,), fields.get("num_logprobs", -1), dtype=torch.int32)
    sample_rows = torch.full((rows,), -1, dtype=torch.int32)
    last_token = torch.zeros(1, dtype=torch.int32)
    result: tuple[torch.Tensor, ...] = ops.sample_random(
        logits, sample_rows, num_logprobs, last_token, *arguments
    )
    return result


def test_philox_gives_the_published_words() -> None:
    """Known answers of Random123's kat_vectors for philox4x32-10."""
    zeros = philox4x32(np.zeros((1, 4), dtype=np.uint32), 0)
    assert [hex(w) for w in zeros[0]] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    ones = philox4x32(np.full((1, 4), 0xFFFFFFFF, dtype=np.uint32), 0xFFFFFFFFFFFFFFFF)
    assert [hex(w) for w in ones[0]] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def test_noise_depends_on_seed_position_and_id_alone() -> None:
    noise = gumbel_noise(5, 3, 1000)
    assert np.array_equal(gumbel_noise(5, 3, 77), noise[:77])
    assert not np.array_equal(gumbel_noise(6, 3, 77), noise[:77])
    assert not np.array_equal(gumbel_noise(5, 4, 77), noise[:77])
    assert not np.array_equal(gumbel_noise(5 + (1 << 32), 3, 77), noise[:77])
    assert abs(noise.mean() - np.euler_gamma) < 0.15 and np.isfinite(noise).all()


def test_ids_are_drawn_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0, torch.nan]]).repeat(4000, 1)
    drawn = torch.tensor(sample(logits, seed=7, temperature=1.5, output_position=range(4000)))
    counts = torch.bincount(drawn, minlength=5) / 4000
    expected = torch.softmax(logits[0, :4] / 1.5, dim=0)
    assert (counts[:4] - expected).abs().max() < 0.03
    assert counts[4] == 0


@pytest.mark.parametrize(
    ("cut", "allowed"),
    [
        ({"top_k": 2}, {2, 0}),
        ({"top_p": 0.6}, {2}),
        ({"top_p": 0.65}, {2, 0}),
        ({"min_p": 0.3}, {2, 0}),
        ({"min_p": 0.4}, {2}),
        ({"top_k": 3, "top_p": 0.95, "min_p": 0.1}, {2, 0, 1}),
        ({"top_k": 1}, {2}),
    ],
)
def test_cuts_keep_the_most_likely_ids(cut: dict[str, float], allowed: set[int]) -> None:
    """Probabilities 0.24, 0.09, 0.64, 0.03 of ids 0 to 3."""
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0]]).repeat(300, 1)
    assert set(sample(logits, seed=range(300), **cut)) == allowed


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(50, 9)
    assert set(sample(logits, seed=range(50), top_k=3)) == {0, 1, 2}
    assert sample(logits, temperature=0.0) == [0] * 50


def test_greedy_never_chooses_nan_and_counts_logprobs_without_it() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 3.0, 3.0], [torch.nan] * 4])
    ids, logprobs, top_ids, top_logprobs, _ = ops.sample_greedy(
        logits, torch.tensor([-1, -1]), torch.tensor([4, 4]), torch.zeros(1, dtype=torch.int32)
    )
    assert ids.tolist() == [2, 0] and top_ids[0, :4].tolist() == [2, 3, 1, 0]
    expected = torch.log_softmax(torch.tensor([1.0, 3.0, 3.0]), dim=0)
    torch.testing.assert_close(top_logprobs[0, :4], torch.tensor([*expected[[1, 2, 0]].tolist(), 0.0]))
    assert logprobs[1] == -torch.inf


def test_the_cpu_kernels_draw_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "plugins_cpu"))
    from kernel_caller import NUM_LOGITS, call

    rows, vocab = 40, 211
    generator = np.random.default_rng(3)
    logits = (generator.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[::5, 7] = logits[::5, 100] = logits[::5].max(axis=1)
    fields: dict[str, np.ndarray] = {
        "temperature": generator.choice([0.0, 0.7, 1.3], rows).astype(np.float32),
        "top_k": generator.choice([0, 1, 5, 50], rows).astype(np.int32),
        "top_p": generator.choice([1.0, 0.9, 0.3], rows).astype(np.float32),
        "min_p": generator.choice([0.0, 0.05], rows).astype(np.float32),
        "seed": generator.integers(0, 2**64, rows, dtype=np.uint64),
        "output_position": generator.integers(0, 1000, rows).astype(np.int32),
    }
    sample_rows = np.arange(rows, dtype=np.int32)
    num_logprobs = generator.choice([-1, 0, 4, 20], rows).astype(np.int32)
    outputs = {
        "last_token": np.zeros(rows, np.int32),
        "sampled_token_ids": np.zeros(rows, np.int32),
        "sampled_logprobs": np.zeros(rows, np.float32),
        "top_token_ids": np.zeros((rows, 20), np.int32),
        "top_logprobs": np.zeros((rows, 20), np.float32),
    }
    call(
        "sample_random",
        logits=logits,
        sample_rows=sample_rows,
        num_logprobs=num_logprobs,
        logits_stride=vocab,
        count=NUM_LOGITS,
        vocab=vocab,
        num_logits=rows,
        **fields,
        **outputs,
    )
    expected = ops.sample_random(
        torch.from_numpy(logits),
        torch.from_numpy(sample_rows),
        torch.from_numpy(num_logprobs),
        torch.zeros(rows, dtype=torch.int32),
        *(torch.from_numpy(fields[name]) for name in fields),
    )
    names = ("sampled_token_ids", "sampled_logprobs", "top_token_ids", "top_logprobs", "last_token")
    for name, tensor in zip(names, expected, strict=True):
        np.testing.assert_allclose(outputs[name], tensor.numpy(), atol=2e-5, err_msg=name)
