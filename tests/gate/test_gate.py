"""The gate must fail what is wrong: a gate that can't fail proves nothing."""

import numpy as np
from gate_report import greedy_coverage, measure, perplexity


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (500, 300)).astype(np.float32)


def test_equal_logits_pass():
    assert measure([logits()], [logits()]).failures() == []


def test_a_constant_shift_of_all_logits_passes():
    assert measure([logits()], [logits() + 3]).failures() == []


def test_unrelated_logits_fail_every_condition():
    assert len(measure([logits()], [logits(1)]).failures()) == 4


def test_a_scale_error_of_ten_percent_fails():
    assert measure([logits()], [logits() * 1.1]).failures()


def test_one_badly_wrong_position_fails():
    ours = logits()
    ours[7, ours[7].argmin()] = 30.0
    assert any("regret" in failure for failure in measure([logits()], [ours]).failures())


def test_greedy_coverage_counts_tokens_before_the_first_difference():
    assert greedy_coverage([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6


def test_perplexity_of_uniform_logits_is_the_vocabulary_size():
    np.testing.assert_allclose(perplexity(np.zeros((8, 50)), [1] * 8, 3), 50)
