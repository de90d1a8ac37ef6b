"""Log probabilities as outputs carry them: of sampled tokens by the device, of a prompt by the host from logits."""

from collections.abc import Sequence as Items

import numpy as np

from castiron.runtime.messages import TokenLogprobs
from castiron.runtime.sampling_params import SamplingParams
from castiron.runtime.sequence import Sequence


def sampled_logprobs(sampled: dict[str, np.ndarray], index: int, sampling: SamplingParams) -> TokenLogprobs:
    """Of the token in logit row `index` of a step's outputs (step_abi.output_fields)."""
    num_logprobs = sampling.logprobs or 0
    is_likeliest = sampling.temperature == 0 and not sampling.has_penalty and not sampling.has_rules
    return TokenLogprobs(
        sampled=float(sampled["sampled_logprobs"][index]),
        rank=1 if is_likeliest else int(sampled["sampled_ranks"][index]),
        top_token_ids=tuple(sampled["top_token_ids"][index, :num_logprobs].tolist()),
        top_logprobs=tuple(sampled["top_logprobs"][index, :num_logprobs].tolist()),
    )


def prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprobs, ...]:
    """What the output of its newest token carries: all of the prompt's with the first, nothing later."""
    if not sequence.prompt_logprobs or len(sequence.output_token_ids) > 1:
        return ()
    found = tuple(entry for entry in sequence.prompt_logprobs if entry is not None)
    assert len(found) == len(sequence.prompt_token_ids) - 1, "a prompt token without log probabilities"
    return found


def token_logprobs(logits: np.ndarray, token_ids: Items[int], num_top: int) -> list[TokenLogprobs]:
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
