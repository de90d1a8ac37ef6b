"""Log probabilities of a prompt's own tokens, computed on the host from the logits of the steps that prefill it."""

from collections.abc import Sequence

import numpy as np

from castiron.runtime.messages import TokenLogprobs


def token_logprobs(logits: np.ndarray, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """For each row of logits float32 [n, vocab_size] that of its token, its rank, and the `num_top` most likely ids.

    Ties go to the lowest id; a NaN logit counts as -infinity.
    """
    return [_of_row(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True)]


def _of_row(row: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    row = np.where(np.isnan(row), -np.inf, row)
    largest = row.max()
    shifted = row.astype(np.float64) - (largest if np.isfinite(largest) else 0.0)
    log_total = np.log(np.exp(shifted).sum()) if largest > -np.inf else 0.0
    top = _most_likely(row, num_top)
    return TokenLogprobs(
        sampled=float(np.float32(shifted[token_id] - log_total)),
        rank=1 + int((row > row[token_id]).sum()),
        top_token_ids=tuple(top.tolist()),
        top_logprobs=tuple((shifted[top] - log_total).astype(np.float32).tolist()),
    )


def _most_likely(row: np.ndarray, count: int) -> np.ndarray:
    count = min(count, len(row))
    if count == 0:
        return np.empty(0, np.int64)
    least = np.partition(row, -count)[-count]
    candidates = np.flatnonzero(row >= least)  # ascending: a stable sort leaves ties in the order of ids
    return candidates[np.argsort(-row[candidates], kind="stable")[:count]]
