"""Which tokens of which requests the next step computes.

There are no phases: a sequence has `num_computed_tokens` of its `num_tokens` in the cache, and a step
computes some of the rest. One that lacks a single token is decoding; a longer rest is prefill, in chunks the
step's token budget allows. Decoding sequences are served first, then running prefills, then new ones; among
equals the lower `order` = (priority, arrival) first. When blocks run out, the running sequence that is last
in that order gives up its row and its blocks and waits again (recompute preemption); the first one in order
is never stopped by another, so something always advances.
"""

import heapq
from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from castiron.runtime.block_manager import BlockManager
from castiron.runtime.row_table import RowTable
from castiron.runtime.sequence import Sequence
from castiron.runtime.step_builder import StepInput

_ORDER = attrgetter("order")


@dataclass(frozen=True)
class ScheduledStep:
    """The sequences of a step, decoding ones first, and what the device is given of them."""

    sequences: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]  # those that get a token, one a logit row
    num_decoding: int  # sequences whose only token here is their last output token
    input: StepInput


class Scheduler:
    """Waiting and running sequences over the rows and blocks of one engine."""

    def __init__(self, rows: RowTable, blocks: BlockManager, max_batched_tokens: int) -> None:
        self.rows = rows
        self.blocks = blocks
        self.max_batched_tokens = max_batched_tokens
        self.num_preemptions = 0
        self._running: list[Sequence] = []  # by order
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap by order (arrivals differ)
        self._sequences: dict[str, Sequence] = {}  # every unfinished one

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def remove(self, request_id: str) -> Sequence | None:
        """Forget a sequence, finished or aborted, and free what it holds; None if it isn't known."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        sequence.is_finished = True
        if sequence.row >= 0:
            # a step that still runs may write its blocks: whoever gets them next writes in a later step
            self._leave_row(sequence)
        return sequence  # one that waits is dropped when it comes to the front of the heap

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step and count its tokens as computed; None if there is nothing to compute now.

        The caller launches the step and, before the next call, gives every sequence of `sampled` its token or
        counts it as pending.
        """
        if not self._sequences:
            return None
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(self.max_batched_tokens)
        if self.num_preemptions == num_preemptions:
            self._admit_waiting(budget)
        scheduled = [s for s in self._running if s.num_scheduled_tokens]
        if not scheduled:
            assert any(s.num_pending_tokens for s in self._sequences.values()), "nothing advances"
            return None
        return self._take_step(scheduled)

    def check_integrity(self) -> None:
        """Assert that rows, blocks and queues agree; for tests, between steps."""
        self.blocks.check_integrity()
        rows = [s.row for s in self._running]
        assert len(set(rows)) == len(rows) and min(rows, default=0) >= 0
        assert len(rows) + self.rows.num_free == self.rows.max_rows
        assert self._running == sorted(self._running, key=_ORDER)
        for group in self.blocks.groups:
            owners = {row for row, owned in enumerate(group.num_owned) if owned}
            assert owners <= set(rows), f"rows {owners - set(rows)} own blocks but don't run"
        for sequence in self._running:
            assert self._sequences[sequence.request_id] is sequence
            assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens + sequence.num_pending_tokens
        waiting = {s.request_id for _, s in self._waiting if self._sequences.get(s.request_id) is s}
        assert waiting | {s.request_id for s in self._running} == set(self._sequences)

    def _schedule_running(self, budget: int) -> int:
        """Give running sequences their tokens, decoding ones first; the budget that is left."""
        decoding = [s for s in self._running if s.num_remaining_tokens == 1]
        prefilling = [s for s in self._running if s.num_remaining_tokens > 1]
        for sequence in decoding + prefilling:
            if sequence.row < 0:
                continue  # preempted a moment ago
            count = min(sequence.num_remaining_tokens, budget)
            if count == 0:
                break
            num_tokens = sequence.num_computed_tokens + count
            while not self.blocks.grow(sequence.row, num_tokens):
                budget += self._preempt_last()
                if sequence.row < 0:
                    break  # it was the last itself
            else:
                sequence.num_scheduled_tokens = count
                budget -= count
        return budget

    def _admit_waiting(self, budget: int) -> None:
        """Start waiting sequences, in order, while a row, budget and blocks for all their tokens are left."""
        promised: list[tuple[int, int]] | None = None
        while self._waiting and budget > 0 and self.rows.num_free:
            sequence = self._waiting[0][1]
            if self._sequences.get(sequence.request_id) is not sequence:
                heapq.heappop(self._waiting)  # aborted while it waited
                continue
            if sequence.num_pending_tokens:
                return  # preempted a moment ago: the token it still gets is read on the host
            if promised is None:
                promised = [(s.row, s.num_tokens + s.num_pending_tokens + 1) for s in self._running]
            if not self.blocks.can_admit(sequence.num_tokens + 1, promised):
                return  # nobody overtakes: a large request isn't starved by small ones
            heapq.heappop(self._waiting)
            sequence.row = self.rows.admit(sequence)
            insort(self._running, sequence, key=_ORDER)
            promised.append((sequence.row, sequence.num_tokens + 1))
            count = min(sequence.num_tokens, budget)
            has_room = self.blocks.grow(sequence.row, count)
            assert has_room
            sequence.num_scheduled_tokens = count
            budget -= count

    def _preempt_last(self) -> int:
        """Let the running sequence that is last in order wait again; the tokens it had in this step."""
        assert len(self._running) > 1, "one sequence alone always fits: validated at admission"
        sequence = self._running[-1]
        self._leave_row(sequence)
        num_refunded = sequence.num_scheduled_tokens
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 0
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self.num_preemptions += 1
        return num_refunded

    def _leave_row(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.blocks.release(sequence.row)
        self.rows.release(sequence.row)
        sequence.row = -1

    def _take_step(self, scheduled: list[Sequence]) -> ScheduledStep:
        """Turn the counts given to sequences into a step and move them past it."""
        scheduled.sort(key=lambda s: s.num_remaining_tokens > 1)  # stable: decoding first, each part in order
        rows = np.array([s.row for s in scheduled], np.int32)
        starts = np.array([s.num_computed_tokens for s in scheduled], np.int32)
        counts = np.array([s.num_scheduled_tokens for s in scheduled], np.int32)
        sampled: list[Sequence] = []
        reaches_end: list[int] = []  # their places in `scheduled`
        num_decoding = 0
        for place, sequence in enumerate(scheduled):
            count, sequence.num_scheduled_tokens = sequence.num_scheduled_tokens, 0
            sequence.num_computed_tokens += count
            if sequence.num_computed_tokens == sequence.num_tokens + sequence.num_pending_tokens:
                sampled.append(sequence)
                reaches_end.append(place)
                num_decoding += count == 1 and sequence.num_output_tokens > 0
        last_tokens = np.cumsum(counts, dtype=np.int32) - 1
        if len(sampled) < len(scheduled):
            logit_tokens, sample_rows = last_tokens[reaches_end], rows[reaches_end]
        else:
            logit_tokens, sample_rows = last_tokens, rows
        return ScheduledStep(
            sequences=tuple(scheduled),
            sampled=tuple(sampled),
            num_decoding=num_decoding,
            input=StepInput(rows, starts, counts, logit_tokens, sample_rows),
        )
