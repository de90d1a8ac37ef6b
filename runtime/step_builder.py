"""Fills a step's block: from rows and token ranges to every field of the step ABI, in whole arrays."""

from dataclasses import dataclass

import numpy as np

from castiron.runtime.block_manager import BlockManager
from castiron.runtime.grammar_compiler import Grammar
from castiron.runtime.row_table import PENALTY_FIELDS, SAMPLING_FIELDS, RowTable
from castiron.runtime.step_abi import HEADER_FIELDS, HEADER_WORDS

_NEUTRAL_SAMPLING = {  # where nothing is sampled
    "sample_rows": -1,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "num_logprobs": -1,
    "output_position": 0,
}


@dataclass(frozen=True)
class StepInput:
    """What a step computes. Sequence i is row `rows[i]`, tokens starts[i] .. starts[i] + counts[i] - 1."""

    rows: np.ndarray  # int32 [num_seqs]
    starts: np.ndarray  # int32 [num_seqs], tokens in the cache before the step
    counts: np.ndarray  # int32 [num_seqs], >= 1
    logit_tokens: np.ndarray  # int32 [num_logits], index among the step's tokens; may be empty
    sample_rows: np.ndarray  # int32, of the first logit tokens; of the others the logits alone are wanted
    is_full: bool = False  # sampled by the full variant, which reads penalties, biases and masks


def fill_step(
    views: dict[str, np.ndarray], step: StepInput, rows: RowTable, blocks: BlockManager, step_index: int
) -> int:
    """Write every live field of `views` (step_abi names, undefined contents); returns the logit rows filled.

    The rows must own blocks for the tokens of the step. A step that wants no logits gets one row, the last
    token's, which is not sampled: live counts are never 0.
    """
    num_seqs = len(step.rows)
    query_starts = views["query_starts"]
    query_starts[0] = 0
    np.cumsum(step.counts, out=query_starts[1 : num_seqs + 1])
    num_tokens = int(query_starts[num_seqs])
    if num_tokens == num_seqs:  # one token each
        max_query_len, token_rows, positions = 1, step.rows, step.starts
    else:
        max_query_len = int(step.counts.max())
        token_rows = np.repeat(step.rows, step.counts)
        positions = np.arange(num_tokens, dtype=np.int32)
        positions -= np.repeat(query_starts[:num_seqs] - step.starts, step.counts)
    views["positions"][:num_tokens] = positions
    views["token_ids"][:num_tokens] = rows.token_ids[token_rows, positions]
    views["row_ids"][:num_seqs] = step.rows
    np.add(step.starts, step.counts, out=views["seq_lens"][:num_seqs])

    for group in blocks.paged:
        tables = group.block_tables
        np.take(tables, step.rows, axis=0, out=views[f"block_tables.{group.name}"][:num_seqs], mode="clip")
        places, offsets = np.divmod(positions, np.int32(group.block_size))
        slots = views[f"slot_mapping.{group.name}"][:num_tokens]  # int64: slots may pass 2^31
        np.multiply(tables[token_rows, places], group.block_size, out=slots, dtype=np.int64)
        slots += offsets
    for states in blocks.states:
        np.take(
            states.read_slots, step.rows, out=views[f"state_read_slots.{states.name}"][:num_seqs], mode="clip"
        )
        np.take(
            states.write_slots,
            step.rows,
            out=views[f"state_write_slots.{states.name}"][:num_seqs],
            mode="clip",
        )

    num_logits = _fill_sampling(views, step, rows, positions, num_tokens)
    num_biases, num_allowed = _fill_rules(views, step, rows) if step.is_full else (0, 0)
    num_grammars = _fill_grammars(views, step, rows) if step.is_full else 0
    header = views["header"]
    header[:HEADER_WORDS] = 0
    live = (num_tokens, num_seqs, num_logits, max_query_len, 0, num_biases)
    header[: len(HEADER_FIELDS)] = (
        *live,
        step_index & 0x7FFFFFFF,
        step_index >> 31,
        num_grammars,
        num_allowed,
    )
    return num_logits


def _fill_sampling(
    views: dict[str, np.ndarray], step: StepInput, rows: RowTable, positions: np.ndarray, num_tokens: int
) -> int:
    num_logits = len(step.logit_tokens)
    if num_logits == 0:
        num_logits = 1
        views["logit_rows"][0] = num_tokens - 1
    else:
        views["logit_rows"][:num_logits] = step.logit_tokens
    num_sampled = len(step.sample_rows)
    if num_sampled:
        owners = step.sample_rows
        views["sample_rows"][:num_sampled] = owners
        for name in SAMPLING_FIELDS:
            np.take(getattr(rows, name), owners, out=views[name][:num_sampled], mode="clip")
        # the token after position p is output token p + 1 - prompt_len
        sampled_positions = positions[step.logit_tokens[:num_sampled]]
        views["output_position"][:num_sampled] = sampled_positions + 1 - rows.prompt_lens[owners]
    if num_sampled < num_logits:
        for name, value in _NEUTRAL_SAMPLING.items():
            views[name][num_sampled:num_logits] = value
    return num_logits


def _fill_rules(views: dict[str, np.ndarray], step: StepInput, rows: RowTable) -> tuple[int, int]:
    """Penalties, biases and allowed ids of the sampled rows; how many biases and masks there are."""
    owners, num_sampled, num_logits = step.sample_rows, len(step.sample_rows), len(step.logit_tokens)
    for name, neutral in zip(PENALTY_FIELDS, (1.0, 0.0, 0.0), strict=True):
        np.take(getattr(rows, name), owners, out=views[name][:num_sampled], mode="clip")
        views[name][num_sampled:num_logits] = neutral
    allowed_rows = views["allowed_rows"]
    allowed_rows[:num_logits] = -1
    starts = views["bias_starts"]
    token_ids, values = views["bias_token_ids"].reshape(-1), views["bias_values"].reshape(-1)
    num_biases = num_masks = 0
    for place, row in enumerate(owners.tolist()):
        starts[place] = num_biases
        rules = rows.rules[row]
        if rules is None:
            continue
        if rules.allowed is not None:
            views["allowed_masks"][num_masks] = rules.allowed
            allowed_rows[place] = num_masks
            num_masks += 1
        prompt_len = int(rows.prompt_lens[row])
        output_len = int(views["output_position"][place])
        biases = rules.biases_at(rows.token_ids[row, prompt_len : prompt_len + output_len])
        end = num_biases + len(biases)
        token_ids[num_biases:end] = list(biases)
        values[num_biases:end] = list(biases.values())
        num_biases = end
    starts[num_sampled : num_logits + 1] = num_biases
    return num_biases, num_masks


def _fill_grammars(views: dict[str, np.ndarray], step: StepInput, rows: RowTable) -> int:
    """Masks of the sampled rows that have a grammar; how many there are."""
    mask_rows = views["mask_rows"]
    mask_rows[: len(step.logit_tokens)] = -1
    grammars: list[Grammar] = []
    for place, row in enumerate(step.sample_rows.tolist()):
        grammar = rows.grammars[row]
        if grammar is not None:
            mask_rows[place] = len(grammars)
            grammars.append(grammar)
    if grammars:
        Grammar.fill_masks(grammars, views["grammar_masks"][: len(grammars)])
    return len(grammars)
