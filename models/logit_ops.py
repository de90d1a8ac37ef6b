"""What changes logits before a token is drawn, and the token counts that penalties need. Registered like ops.py's.

A step whose rows need any of it runs

    logits --mask_logits--> masked --adjust_logits--> adjusted --sample_full--> id --count_tokens--> token_counts
    (log probabilities are those of `masked`)
"""

import torch
from torch import Tensor

from castiron.models.ops import op

MASK_WORD_BITS = 32  # runtime.step_abi.MASK_WORD_BITS
IN_PROMPT = 1 << 31  # runtime.step_abi.IN_PROMPT; the other bits of a token count: times in the output


def _like_logits(logits: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _allowed(words: Tensor, vocab: int) -> Tensor:
    """bool [vocab] of u32[W]: bit i % 32 of word i / 32."""
    bits = torch.arange(MASK_WORD_BITS, dtype=torch.int64)
    return (words.to(torch.int64)[:, None] >> bits & 1).bool().flatten()[:vocab]


def _banned_where(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """logits f32[L, V], -infinity where the row of masks u32[L, W] that rows i32[L] names has no bit; -1 = none."""
    result = logits.clone()
    for index, row in enumerate(rows.tolist()):
        if row >= 0:
            result[index, ~_allowed(masks[row], logits.shape[1])] = -torch.inf
    return result


@op(_like_logits)
def mask_logits(logits: Tensor, mask_rows: Tensor, grammar_masks: Tensor) -> Tensor:
    """logits f32[L, V] with -infinity at the tokens a grammar forbids.

    mask_rows i32[L]: row of grammar_masks u32[L, ceil(V / 32)], a bit set = allowed; -1 = no grammar.
    """
    return _banned_where(logits, mask_rows, grammar_masks)


@op(_like_logits)
def adjust_logits(
    logits: Tensor,
    sample_rows: Tensor,
    token_counts: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    bias_starts: Tensor,
    bias_token_ids: Tensor,
    bias_values: Tensor,
    allowed_rows: Tensor,
    allowed_masks: Tensor,
) -> Tensor:
    """logits f32[L, V] as a token is drawn from them: allowed ids alone, biases added, then the penalties.

    allowed_rows i32[L]: row of allowed_masks u32[L, ceil(V / 32)], -1 = all allowed. Row i has the biases
    bias_starts[i] .. bias_starts[i + 1] - 1 of bias_token_ids and bias_values, each id once; -infinity bans.
    Penalties, of the tokens that token_counts u32[R, V] of row sample_rows[i] (-1 = none) has seen: those in prompt
    or output have a positive logit divided and a negative one multiplied by repetition_penalty f32[L]; those in the
    output lose frequency_penalty f32[L] each time and presence_penalty f32[L] once. Source: the order and formulas
    of vLLM's sampler (v1/sample/ops/penalties.py).
    """
    result = _banned_where(logits, allowed_rows, allowed_masks)
    starts = bias_starts.tolist()
    ids, values = bias_token_ids.flatten(), bias_values.flatten()
    for index in range(logits.shape[0]):
        mine = slice(starts[index], starts[index + 1])
        result[index, ids[mine].long()] += values[mine]
        row = int(sample_rows[index])
        if row < 0:
            continue
        seen = token_counts[row].to(torch.int64)
        counts = (seen & (IN_PROMPT - 1)).float()
        x, repetition = result[index], repetition_penalty[index]
        x = torch.where(seen != 0, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency_penalty[index] * counts
        result[index] = x - presence_penalty[index] * (counts > 0)
    return result


def _like_counts(token_counts: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(token_counts)


@op(_like_counts)
def count_tokens(
    token_counts: Tensor,
    sampled_token_ids: Tensor,
    sample_rows: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
) -> Tensor:
    """token_counts u32[R, V] with one more of sampled_token_ids[i] in row sample_rows[i] (-1 = none).

    Rows whose penalties are all off (1, 0 and 0) are left alone: nobody keeps their counts.
    """
    result = token_counts.to(torch.int64)
    penalized = (repetition_penalty != 1) | (presence_penalty != 0) | (frequency_penalty != 0)
    for row, token, counts in zip(
        sample_rows.tolist(), sampled_token_ids.tolist(), penalized.tolist(), strict=True
    ):
        if row >= 0 and counts:
            result[row, token] += 1
    return result.to(token_counts.dtype)
