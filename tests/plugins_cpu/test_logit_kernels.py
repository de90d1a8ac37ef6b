"""mask_logits, adjust_logits, sample_full and count_tokens against their references, bit for bit."""

import numpy as np
import pytest
import torch
from kernel_caller import LEVELS, NUM_LOGITS, call
from sampling_steps import BIASES, CHOICE, PENALTIES, ROWS, VOCABS, Step

from castiron.models.logit_ops import IN_PROMPT
from castiron.models.ops import REFERENCES
from castiron.runtime.step_abi import MAX_LOGPROBS


def strided(values: np.ndarray, pad: int) -> np.ndarray:
    """The rows with `pad` more columns of NaN."""
    return np.pad(values, ((0, 0), (0, pad)), constant_values=np.nan)


def run_elementwise(name: str, step: Step, level: str, threads: int, *names: str) -> np.ndarray:
    """A kernel from logits to y [ROWS, vocab]; checks that it wrote no more."""
    y = np.full((ROWS + 1, step.vocab + 2), 777, np.float32)
    call(
        name, level=level, threads=threads, num_logits=ROWS, logits=strided(step.fields["logits"], 3),
        logits_stride=step.vocab + 3, y=y, y_stride=step.vocab + 2, count=NUM_LOGITS, vocab=step.vocab,
        **step.given(*names),
    )  # fmt: skip
    assert (y[ROWS:] == 777).all() and (y[:, step.vocab :] == 777).all()
    return y[:ROWS, : step.vocab]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("threads", [1, 3])
def test_masks_ban_what_has_no_bit(vocab: int, level: str, threads: int) -> None:
    step = Step(vocab, seed=vocab)
    y = run_elementwise("mask_logits", step, level, threads, "mask_rows", "grammar_masks")
    expected = REFERENCES["mask_logits"](*step.live("logits", "mask_rows", "grammar_masks"))
    np.testing.assert_array_equal(y, expected.numpy())
    np.testing.assert_array_equal(y[1], step.fields["logits"][1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("threads", [1, 3])
def test_allowed_ids_biases_and_penalties_are_the_references(vocab: int, level: str, threads: int) -> None:
    step = Step(vocab, seed=vocab)
    names = ("sample_rows", "token_counts", *PENALTIES, *BIASES)
    y = run_elementwise("adjust_logits", step, level, threads, *names)
    expected = REFERENCES["adjust_logits"](*step.live("logits", *names))
    np.testing.assert_array_equal(y, expected.numpy())


def test_penalties_by_hand() -> None:
    """Repetition divides what is positive and multiplies what is negative; frequency counts, presence doesn't."""
    step = Step(33)
    step.fields["logits"][0, :4] = (2.0, -2.0, 2.0, 2.0)
    step.fields["token_counts"][4, :4] = (IN_PROMPT, IN_PROMPT | 2, 3, 0)
    for name, value in zip(PENALTIES, (2.0, 0.5, 0.25), strict=True):
        step.fields[name][0] = value
    step.fields["allowed_rows"][0] = -1
    y = run_elementwise(
        "adjust_logits", step, LEVELS[-1], 1, "sample_rows", "token_counts", *PENALTIES, *BIASES
    )
    assert y[0, :4].tolist() == [1.0, -4.0 - 0.5 - 0.5, 1.0 - 0.75 - 0.5, 2.0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("threads", [1, 3])
def test_full_sampling_is_the_reference(vocab: int, level: str, threads: int) -> None:
    step = Step(vocab, seed=7 * vocab)
    adjusted = np.random.default_rng(vocab).normal(0, 2, (ROWS + 1, vocab)).astype(np.float32)
    adjusted[4] = -np.inf  # all banned: the lowest id
    names = ("sample_rows", "num_logprobs", "last_token", *CHOICE)
    expected = REFERENCES["sample_full"](
        step.live("logits")[0], torch.from_numpy(adjusted[:ROWS].copy()), *step.live(*names)
    )
    found = {
        "sampled_token_ids": np.full(ROWS + 1, -9, np.int32),
        "sampled_logprobs": np.full(ROWS + 1, np.nan, np.float32),
        "sampled_ranks": np.full(ROWS + 1, -9, np.int32),
        "top_token_ids": np.full((ROWS + 1, MAX_LOGPROBS), -9, np.int32),
        "top_logprobs": np.full((ROWS + 1, MAX_LOGPROBS), np.nan, np.float32),
    }
    call(
        "sample_full", level=level, threads=threads, num_logits=ROWS, logits=strided(step.fields["logits"], 3),
        logits_stride=vocab + 3, adjusted=strided(adjusted, 1), adjusted_stride=vocab + 1, count=NUM_LOGITS,
        vocab=vocab, **step.given(*names), **found,
    )  # fmt: skip
    assert found["sampled_token_ids"][ROWS] == found["sampled_ranks"][ROWS] == -9
    for (name, value), wanted in zip(found.items(), expected, strict=False):
        if "logprobs" in name:
            np.testing.assert_allclose(value[:ROWS], wanted.numpy(), rtol=1e-6, atol=2e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(value[:ROWS], wanted.numpy(), err_msg=name)
    np.testing.assert_array_equal(step.fields["last_token"], expected[5].numpy())
    assert found["sampled_token_ids"][4] == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_with_penalties_count_their_tokens(level: str, threads: int) -> None:
    step = Step(200)
    step.fields["sampled_token_ids"] = np.array([7, 7, 0, 199, 3, 1 << 30], np.int32)
    names = ("token_counts", "sampled_token_ids", "sample_rows", *PENALTIES)
    before = step.fields["token_counts"].copy()
    expected = REFERENCES["count_tokens"](*step.live(*names))
    call(
        "count_tokens",
        level=level,
        threads=threads,
        num_logits=ROWS,
        count=NUM_LOGITS,
        vocab=200,
        **step.given(*names),
    )
    after = step.fields["token_counts"]
    np.testing.assert_array_equal(after, expected.numpy())
    changed = [(int(row), int(token)) for row, token in np.argwhere(after != before)]
    assert changed == [(0, 199), (4, 7), (7, 3)]  # not row 2, which has no penalty, nor -1
