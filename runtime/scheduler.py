"""Which tokens of which requests the next step computes.

There are no phases: a sequence has `num_computed_tokens` of its `num_tokens` in the cache, and a step
computes some of the rest. One that lacks a single token is decoding; a longer rest is prefill, in chunks the
step's token budget allows. Decoding sequences are served first, then running prefills, then new ones; among
equals the lower `order` = (priority, arrival) first. When blocks run out, the running sequence that is last
in that order gives up its row and its blocks and waits again (recompute preemption); the first one in order
is never stopped by another, so something always advances.

Waiting sequences start in order as soon as a row and blocks for all their known tokens are left. One that
doesn't fit yet keeps smaller ones behind it from starting only where they would make it later: what it needs
is reserved for the first moment at which it could start if everything that runs now went on to its
max_tokens, and others pass as long as they leave that in place (reservation.py). From the step first
reserved on, nobody passes any more. So the large one starts in time, and small ones go through meanwhile.

A sequence whose prompt continues, behind what is cached, with blocks that a running one is computing waits
for them if they are at least half of what it would compute. So n answers to one prompt, or a burst of
requests with one long system prompt, compute it once; each computes the last, partial block itself.
"""

from bisect import insort
from dataclasses import dataclass

import numpy as np

from castiron.runtime.block_manager import BlockManager, PrefixHit
from castiron.runtime.reservation import Amounts, Reservation, reserve
from castiron.runtime.row_table import RowTable
from castiron.runtime.sequence import Sequence
from castiron.runtime.step_builder import StepInput
from castiron.runtime.waiting_queue import ORDER, WaitingQueue

MAX_PASSED_OVER = 16  # waiting sequences that may stay behind in a step before the rest isn't looked at


@dataclass(frozen=True)
class ScheduledStep:
    """The sequences of a step, decoding ones first, and what the device is given of them."""

    sequences: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]  # those that get a token, one a logit row
    num_decoding: int  # sequences whose only token here is their last output token
    input: StepInput
    # (sequence, position, count): logit rows behind the sampled ones, of prompt tokens from this position on
    prompt_logits: tuple[tuple[Sequence, int, int], ...] = ()


class Scheduler:
    """Waiting and running sequences over the rows and blocks of one engine."""

    def __init__(
        self, rows: RowTable, blocks: BlockManager, max_batched_tokens: int, max_logits: int
    ) -> None:
        self.rows = rows
        self.blocks = blocks
        self.max_batched_tokens = max_batched_tokens
        self.max_logits = max_logits  # rows of logits a step may ask for: one a row at least
        self._spare_logits = 0  # of the step that is put together, beside one for each sequence
        self.num_preemptions = 0
        self.num_cache_query_tokens = 0
        self.num_cache_hit_tokens = 0
        self._num_steps = 0
        self._running: list[Sequence] = []  # by order
        self._waiting = WaitingQueue()
        self._sequences: dict[str, Sequence] = {}  # every unfinished one

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self._waiting.add(sequence)

    def remove(self, request_id: str) -> Sequence | None:
        """Forget a sequence, finished or aborted, and free what it holds; None if it isn't known."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        sequence.is_finished = True
        if sequence.row >= 0:
            # a step that still runs may write its blocks: whoever gets them next writes in a later step
            self._leave_row(sequence)
        else:
            self._waiting.remove(sequence)
        return sequence

    def confirm(self, step: ScheduledStep) -> None:
        """Take note that the host has read this step, and all before it."""
        starts, counts = step.input.starts, step.input.counts
        ends = starts + counts
        unit = self.blocks.unit
        for place in np.flatnonzero(ends // unit != starts // unit).tolist():
            sequence = step.sequences[place]
            if sequence.row >= 0:  # it starts again only once all its older steps are read
                assert sequence.num_computed_tokens >= ends[place]
                self.blocks.confirm(sequence.row, int(ends[place]), self.rows.token_ids[sequence.row])

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step and count its tokens as computed; None if there is nothing to compute now.

        The caller launches the step and, before the next call, gives every sequence of `sampled` its token or
        counts it as pending.
        """
        if not self._sequences:
            return None
        num_preemptions = self.num_preemptions
        self._spare_logits = self.max_logits - len(self._running)
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
        assert self._running == sorted(self._running, key=ORDER)
        assert list(self._waiting) == sorted(self._waiting, key=ORDER)
        owners = self.blocks.rows_in_use()
        assert owners <= set(rows), f"rows {owners - set(rows)} own blocks but don't run"
        for sequence in self._running:
            assert self._sequences[sequence.request_id] is sequence
            assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens + sequence.num_pending_tokens
        unfinished = [*self._waiting, *self._running]
        assert len(unfinished) == len(self._sequences)
        assert {s.request_id: s for s in unfinished} == self._sequences

    def _schedule_running(self, budget: int) -> int:
        """Give running sequences their tokens, decoding ones first; the budget that is left."""
        decoding, prefilling = [], []
        for sequence in self._running:
            count = sequence.num_remaining_tokens
            if count == 1:
                decoding.append((sequence, 1))
            elif count > 1:
                prefilling.append((sequence, count))
        for sequence, count in decoding + prefilling:
            if budget == 0:
                break
            if sequence.row < 0:
                continue  # preempted a moment ago
            if count > 1:
                count = self.blocks.chunk_tokens(
                    sequence.num_computed_tokens, self._within_logits(sequence, min(count, budget))
                )
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
        """Start waiting sequences while a row, budget and blocks for all their tokens are left."""
        left: Amounts | None = None  # blocks of each group beside what running ones are promised
        front: Sequence | None = None  # the first that waits for blocks
        reservation: Reservation | None = None
        place = 0
        while place < min(len(self._waiting), MAX_PASSED_OVER) and budget > 0 and self.rows.num_free:
            if self._spare_logits < 1:
                return  # a prompt's log probabilities take them: in the next step
            if left is None:
                left = self.blocks.left_beside(
                    (s.row, s.num_tokens + s.num_pending_tokens + 1) for s in self._running
                )
            if min(left) <= 0:
                return  # whoever starts takes a block of each group
            sequence = self._waiting[place]
            place += 1
            assert sequence.num_pending_tokens == 0, "what was preempted a step ago has been read"
            hit = self._lookup(sequence)
            if self._waits_for_prefix(sequence, hit):
                continue
            needed = self.blocks.num_needed(sequence.num_tokens + 1, hit)
            if any(count > free for count, free in zip(needed, left, strict=True)):
                front = front or sequence
                continue
            if front is not None:
                reservation = reservation or self._reserve(front)
                end = self._num_steps + sequence.num_steps_left(self.max_batched_tokens)
                if self._num_steps >= front.start_by or not reservation.lets_pass(end, self._most(sequence)):
                    continue
                reservation = None  # one more will run
            place -= 1
            budget -= self._start(sequence, hit, budget)
            left = tuple([free - count for count, free in zip(needed, left, strict=True)])

    def _lookup(self, sequence: Sequence) -> PrefixHit:
        if sequence.skip_cache_read or sequence.prefix_keys is None:
            return PrefixHit()
        return self.blocks.lookup(sequence.prefix_keys, sequence.known_tokens)

    def _waits_for_prefix(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Whether running sequences are computing enough of what this one would have to."""
        if sequence.skip_cache_read:
            return False
        num_coming = self.blocks.num_coming_tokens(sequence.prefix_keys, hit, sequence.num_tokens)
        return num_coming > 0 and 2 * num_coming >= sequence.num_tokens - hit.num_tokens

    def _start(self, sequence: Sequence, hit: PrefixHit, budget: int) -> int:
        """Let a waiting sequence run; how many tokens it gets in this step."""
        self._waiting.remove(sequence)
        row = sequence.row = self.rows.admit(sequence)
        insort(self._running, sequence, key=ORDER)
        self.blocks.admit(row, sequence.prefix_keys, hit)
        sequence.num_computed_tokens = hit.num_tokens
        sequence.start_by = -1
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = hit.num_tokens
        if sequence.prefix_keys is not None and not sequence.skip_cache_read:
            self.num_cache_query_tokens += sequence.num_tokens
            self.num_cache_hit_tokens += hit.num_tokens
        self._spare_logits -= 1
        count = self._within_logits(sequence, min(sequence.num_tokens - hit.num_tokens, budget))
        count = sequence.num_scheduled_tokens = self.blocks.chunk_tokens(hit.num_tokens, count)
        has_room = self.blocks.grow(row, hit.num_tokens + count)
        assert has_room
        return count

    def _within_logits(self, sequence: Sequence, count: int) -> int:
        """How many of `count` tokens it may compute, if it wants the logits of its prompt: a row of logits each."""
        if not sequence.prompt_logprobs or sequence.num_computed_tokens >= len(sequence.prompt_token_ids):
            return count
        count = min(count, 1 + self._spare_logits)
        self._spare_logits -= count - 1
        return count

    def _reserve(self, front: Sequence) -> Reservation:
        """What is kept for the sequence that waits for blocks; the step by which it starts never moves back."""
        total = (*(group.pool.num_blocks for group in self.blocks.groups), self.rows.max_rows)
        needed = (*self.blocks.num_needed(front.num_tokens + 1), 1)
        running = [
            (self._num_steps + s.num_steps_left(self.max_batched_tokens), self._most(s))
            for s in self._running
        ]
        reservation = reserve(total, needed, running)
        if front.start_by < 0:
            front.start_by = reservation.start_by
        return reservation

    def _most(self, sequence: Sequence) -> Amounts:
        """What a sequence may hold at most until it ends: blocks of each group and a row."""
        if not sequence.most_held:
            num_tokens = len(sequence.prompt_token_ids) + sequence.sampling.max_tokens
            sequence.most_held = (*self.blocks.num_needed(num_tokens), 1)
        return sequence.most_held

    def _preempt_last(self) -> int:
        """Let the running sequence that is last in order wait again; the tokens it had in this step."""
        assert len(self._running) > 1, "one sequence alone always fits: validated at admission"
        sequence = self._running[-1]
        self._leave_row(sequence)
        num_refunded = sequence.num_scheduled_tokens
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 0
        self._waiting.add(sequence)
        self.num_preemptions += 1
        return num_refunded

    def _leave_row(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.blocks.release(sequence.row)
        self.rows.release(sequence.row)
        sequence.row = -1

    def _take_step(self, scheduled: list[Sequence]) -> ScheduledStep:
        """Turn the counts given to sequences into a step and move them past it."""
        self._num_steps += 1
        chunks = [s for s in scheduled if s.num_scheduled_tokens > 1]
        if chunks:  # single tokens first, each part in order
            scheduled = [s for s in scheduled if s.num_scheduled_tokens == 1] + chunks
        rows = np.array([s.row for s in scheduled], np.int32)
        starts = np.array([s.num_computed_tokens for s in scheduled], np.int32)
        counts = np.array([s.num_scheduled_tokens for s in scheduled], np.int32)
        sampled: list[Sequence] = []
        reaches_end: list[int] = []  # their places in `scheduled`
        wants_logits: list[int] = []  # places of those whose prompt's log probabilities are asked for
        num_decoding = 0
        for place, sequence in enumerate(scheduled):
            count, sequence.num_scheduled_tokens = sequence.num_scheduled_tokens, 0
            num_computed = sequence.num_computed_tokens = sequence.num_computed_tokens + count
            num_pending = sequence.num_pending_tokens
            if sequence.prompt_logprobs:
                wants_logits.append(place)
            if num_computed == sequence.num_tokens + num_pending:
                sampled.append(sequence)
                reaches_end.append(place)
                if count == 1 and (num_pending or sequence.output_token_ids):
                    num_decoding += 1
        last_tokens = np.cumsum(counts, dtype=np.int32) - 1
        if len(sampled) < len(scheduled):
            logit_tokens, sample_rows = last_tokens[reaches_end], rows[reaches_end]
        else:
            logit_tokens, sample_rows = last_tokens, rows
        prompt_logits: list[tuple[Sequence, int, int]] = []
        for place in wants_logits:
            sequence, start = scheduled[place], int(starts[place])
            count = min(start + int(counts[place]), len(sequence.prompt_token_ids) - 1) - start
            if count > 0:
                first = int(last_tokens[place]) + 1 - int(counts[place])
                logit_tokens = np.append(logit_tokens, np.arange(first, first + count, dtype=np.int32))
                prompt_logits.append((sequence, start, count))
        return ScheduledStep(
            sequences=tuple(scheduled),
            sampled=tuple(sampled),
            num_decoding=num_decoding,
            input=StepInput(rows, starts, counts, logit_tokens, sample_rows),
            prompt_logits=tuple(prompt_logits),
        )
