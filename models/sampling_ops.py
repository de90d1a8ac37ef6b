"""Sampling ops and their plain references. Registered like ops.py's; both update last_token (a state).

Ties go to the lowest token id everywhere. Log probabilities are those of the unmodified distribution.
"""

import numpy as np
import torch
from torch import Tensor

from castiron.models.ops import op
from castiron.models.philox import gumbel_noise

MAX_LOGPROBS = 20  # runtime.step_abi.MAX_LOGPROBS


def _sampled_like(logits: Tensor, sample_rows: Tensor, num_logprobs: Tensor, last_token: Tensor, *_: Tensor):  # type: ignore[no-untyped-def]
    rows = logits.shape[0]
    return (
        logits.new_empty((rows,), dtype=torch.int32),
        logits.new_empty((rows,)),
        logits.new_empty((rows, MAX_LOGPROBS), dtype=torch.int32),
        logits.new_empty((rows, MAX_LOGPROBS)),
        torch.empty_like(last_token),
    )


@op(_sampled_like)
def sample_greedy(
    logits: Tensor, sample_rows: Tensor, num_logprobs: Tensor, last_token: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The most likely id of each row of logits f32[L, V]; a NaN logit is never chosen, if none is left 0 is.

    sample_rows i32[L]: entry of last_token i32[R] that takes the id (-1 = none); num_logprobs i32[L]: -1 =
    none. Returns sampled_token_ids i32[L], sampled_logprobs f32[L], top_token_ids i32[L, 20], top_logprobs
    f32[L, 20] and the new last_token. Ids and log probabilities nobody asked for are 0.
    """
    return _results(logits, _most_likely(logits), sample_rows, num_logprobs, last_token)


@op(_sampled_like)
def sample_random(
    logits: Tensor,
    sample_rows: Tensor,
    num_logprobs: Tensor,
    last_token: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_position: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A random id of each row, drawn from softmax(logits / temperature) cut by top_k, then top_p and min_p.

    temperature f32[L] (0 = greedy), top_k i32[L] (0 = off), top_p f32[L] (1 = off), min_p f32[L] (0 = off),
    seed u64[L], output_position i32[L]. min_p keeps ids at least min_p times as likely as the most likely one,
    top_k of these the most likely, and top_p the fewest of what is left whose probability there reaches top_p
    (vLLM's order). Of those kept, the largest scaled logit + noise(seed, output_position, id) wins (philox.py),
    so an id's noise is the same in any batch. Results as sample_greedy.
    """
    sampled = _drawn(logits, temperature, top_k, top_p, min_p, seed, output_position)
    return _results(logits, sampled, sample_rows, num_logprobs, last_token)


def _ranked_like(logits: Tensor, _: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    token_ids, sampled, top_ids, top, last = _sampled_like(logits, *others)
    return token_ids, sampled, torch.empty_like(token_ids), top_ids, top, last


@op(_ranked_like)
def sample_full(
    logits: Tensor,
    adjusted: Tensor,
    sample_rows: Tensor,
    num_logprobs: Tensor,
    last_token: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_position: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """sample_random's id of each row of adjusted f32[L, V], with log probabilities of logits f32[L, V].

    Returns sampled_token_ids, sampled_logprobs, sampled_ranks i32[L] (1 + ids more likely than the sampled one in
    logits; 0 where num_logprobs is -1), top_token_ids, top_logprobs and the new last_token.
    """
    sampled = _drawn(adjusted, temperature, top_k, top_p, min_p, seed, output_position)
    token_ids, sampled_logprobs, top_ids, top_logprobs, next_token = _results(
        logits, sampled, sample_rows, num_logprobs, last_token
    )
    own = logits[torch.arange(logits.shape[0]), sampled]
    own = torch.where(own.isnan(), -torch.inf, own)
    ranks = 1 + (logits > own[:, None]).sum(1, dtype=torch.int32)
    ranks = torch.where(num_logprobs >= 0, ranks, 0)
    return token_ids, sampled_logprobs, ranks.int(), top_ids, top_logprobs, next_token


def _drawn(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_position: Tensor,
) -> Tensor:
    """The id of each row, i64[L]."""
    sampled = _most_likely(logits)
    for row in range(logits.shape[0]):
        largest = logits[row, sampled[row]]
        if temperature[row] <= 0 or not largest > -torch.inf:
            continue
        scaled = torch.where(logits[row].isnan(), -torch.inf, (logits[row] - largest) / temperature[row])
        kept = _kept(scaled, int(top_k[row]), float(top_p[row]), float(min_p[row]))
        noise = gumbel_noise(int(seed.numpy()[row]), int(output_position[row]), logits.shape[1])
        sampled[row] = int(np.argmax(np.where(kept.numpy(), scaled.numpy() + noise, -np.inf)))
    return sampled


def _most_likely(logits: Tensor) -> Tensor:
    """Lowest id of the largest logit that isn't NaN: i64[L]."""
    usable = torch.where(logits.isnan(), -torch.inf, logits)
    return torch.argmax(usable, dim=1)  # the first of equals, 0 if all are -infinity


def _kept(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """bool [V]: ids that min_p, top_k and top_p leave; scaled f32[V] is 0 at the most likely id."""
    order = torch.argsort(scaled, descending=True, stable=True)  # ties: lowest id first
    if min_p > 0:
        order = order[scaled[order] >= np.log(np.float32(min_p))]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass = torch.exp(scaled[order].double())
        before = torch.cumsum(mass, dim=0) - mass
        order = order[(before < top_p * mass.sum()) | (torch.arange(len(order)) == 0)]
    kept = torch.zeros(scaled.shape[0], dtype=torch.bool)
    kept[order] = True
    return kept


def _results(
    logits: Tensor, sampled: Tensor, sample_rows: Tensor, num_logprobs: Tensor, last_token: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    sampled_logprobs = torch.zeros(rows)
    top_ids = torch.zeros(rows, MAX_LOGPROBS, dtype=torch.int32)
    top_logprobs = torch.zeros(rows, MAX_LOGPROBS)
    next_token = last_token.clone()
    for row in range(rows):
        if num_logprobs[row] >= 0:
            missing = logits[row].isnan()
            usable = torch.where(missing, -torch.inf, logits[row])
            if usable.max() > -torch.inf:
                logprobs = torch.log_softmax(usable.double(), dim=0).float()
            else:
                logprobs = torch.full((vocab,), -torch.inf)
            sampled_logprobs[row] = logprobs[sampled[row]]
            wanted = min(int(num_logprobs[row]), MAX_LOGPROBS, vocab - int(missing.sum()))
            order = torch.argsort(usable, descending=True, stable=True)
            order = order[~missing[order]][:wanted]
            top_ids[row, :wanted] = order.int()
            top_logprobs[row, :wanted] = logprobs[order]
        if sample_rows[row] >= 0:
            next_token[sample_rows[row]] = sampled[row].int()
    return sampled.int(), sampled_logprobs, top_ids, top_logprobs, next_token
