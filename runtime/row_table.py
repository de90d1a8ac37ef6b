"""What each running request brings to a step, one row a request, as arrays the step builder gathers from."""

from collections import deque

import numpy as np

from castiron.runtime.grammar_compiler import Grammar
from castiron.runtime.logit_rules import LogitRules
from castiron.runtime.sampling_params import SamplingParams
from castiron.runtime.sequence import Sequence
from castiron.runtime.step_abi import IN_PROMPT

# named as step_abi's
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed", "num_logprobs")
PENALTY_FIELDS = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class RowTable:
    """Rows 0 .. max_rows - 1: token ids and sampling parameters. A row belongs to one running sequence.

    Row r here, in the block tables and in the device's memory class `rows` is the same row.
    """

    def __init__(self, max_rows: int, max_seq_len: int, vocab_size: int) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.token_ids = np.zeros(
            (max_rows, max_seq_len), np.int32
        )  # pages that are never written cost nothing
        self.prompt_lens = np.zeros(max_rows, np.int32)
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.num_logprobs = np.full(max_rows, -1, np.int32)
        self.repetition_penalty = np.ones(max_rows, np.float32)
        self.presence_penalty = np.zeros(max_rows, np.float32)
        self.frequency_penalty = np.zeros(max_rows, np.float32)
        self.rules: list[LogitRules | None] = [None] * max_rows
        self.grammars: list[Grammar | None] = [None] * max_rows
        self.needs_full = np.zeros(max_rows, np.bool_)  # penalties or rules
        self._new_counts: list[tuple[int, np.ndarray]] = []
        self._free = deque(range(max_rows))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def admit(self, sequence: Sequence) -> int:
        """Give the sequence a row holding all its tokens; one must be free."""
        row = self.acquire(sequence.prompt_token_ids + tuple(sequence.output_token_ids))
        sampling: SamplingParams = sequence.sampling
        self.prompt_lens[row] = len(sequence.prompt_token_ids)
        self.temperature[row] = sampling.temperature
        self.top_k[row] = max(0, sampling.top_k)  # -1 = off, too
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sequence.seed
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        for name in PENALTY_FIELDS:
            getattr(self, name)[row] = getattr(sampling, name)
        self.rules[row] = None
        if sampling.has_rules:
            self.rules[row] = LogitRules(sampling, sequence.stop_token_ids, self.vocab_size)
        if sampling.has_penalty:
            self._new_counts.append((row, self._count(sequence)))
        self.grammars[row] = sequence.grammar
        self.needs_full[row] = sampling.has_penalty or sampling.has_rules or sequence.grammar is not None
        return row

    def take_new_counts(self) -> list[tuple[int, np.ndarray]]:
        """Rows with penalties admitted since the last call, and their step_abi token_counts, uint32 [vocab]."""
        counts, self._new_counts = self._new_counts, []
        return counts

    def _count(self, sequence: Sequence) -> np.ndarray:
        counts = np.bincount(np.array(sequence.output_token_ids, np.int64), minlength=self.vocab_size).astype(
            np.uint32
        )
        counts[list(sequence.prompt_token_ids)] |= np.uint32(IN_PROMPT)
        return counts

    def acquire(self, token_ids: tuple[int, ...]) -> int:
        """Take a free row for these tokens, without sampling parameters."""
        row = self._free.popleft()
        self.token_ids[row, : len(token_ids)] = token_ids
        return row

    def expect_tokens(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """The tokens at these places are pending: until they are known a step reads them on the device."""
        self.token_ids[rows, positions] = -1 - rows

    def release(self, row: int) -> None:
        assert row not in self._free
        self._free.append(row)
