"""The kinds of cache group: what rows own of each, what of it they need, and what a prefix hit needs.

    PagedGroup          blocks of the row's tokens, all of them (full attention; MLA latents alike)
    SlidingWindowGroup  blocks of the last tokens only: older ones are given back
    StateGroup          a slot that summarizes all tokens (recurrent state), and checkpoints of it

Places are a row's blocks in order: place p holds tokens p * block_size .. (p + 1) * block_size - 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from castiron.runtime.block_pool import BlockPool
from castiron.runtime.errors import EngineFormatError
from castiron.runtime.prefix_tree import PrefixNode
from castiron.runtime.step_abi import CacheGroup

Forget = Callable[[PrefixNode], None]
MAX_STEPS_AHEAD = 2  # steps whose tokens may be in the cache before the host has confirmed any of them
ZERO_SLOT = 0  # of a state group: what a new sequence reads
_STATE_SLOTS = 2  # a sequence writes one slot and may read another
_STATE_CHECKPOINTS = 2  # slots besides, by default, for each sequence


class ManagedGroup(ABC):
    """One cache group's blocks and which row has which.

    `nodes` are the known prefixes of a sequence, one a place; hits are whole blocks.
    """

    def __init__(self, group: CacheGroup, pool: BlockPool) -> None:
        self.name = group.name
        self.block_size = group.block_size
        self.pool = pool

    @abstractmethod
    def longest_hit(self, nodes: Sequence[PrefixNode], num_tokens: int) -> int:
        """How many of the first `num_tokens` (whole blocks) a new row could have without computing them."""

    @abstractmethod
    def num_needed(self, num_tokens: int, nodes: Sequence[PrefixNode], num_hit_tokens: int) -> int:
        """Free blocks that a new row of `num_tokens` tokens takes, cached ones that it hits included."""

    @abstractmethod
    def num_missing(self, row: int, num_tokens: int) -> int:
        """Free blocks that the row takes to have room for `num_tokens` tokens in all, right now."""

    def num_promised(self, row: int, num_tokens: int) -> int:
        """Free blocks that the row may take step by step until it has computed `num_tokens` tokens."""
        return self.num_missing(row, num_tokens)

    @abstractmethod
    def adopt(self, row: int, nodes: Sequence[PrefixNode], num_hit_tokens: int) -> None:
        """Give a new row the blocks of its hit."""

    @abstractmethod
    def grow(self, row: int, num_tokens: int) -> int:
        """Give the row room to compute up to `num_tokens` tokens; how many it has room for now."""

    @abstractmethod
    def publish(self, row: int, place: int, node: PrefixNode) -> None:
        """Let the row's content up to the end of this place be found, if it has it in a block of its own."""

    @abstractmethod
    def release(self, row: int) -> None:
        """Take everything from the row."""

    @abstractmethod
    def used_blocks(self) -> dict[int, list[int]]:
        """Row -> the blocks it uses, of rows that use some. Asserts that the row's records agree; for tests."""


class PagedGroup(ManagedGroup):
    """Block tables over one pool; a row keeps the blocks of all its tokens."""

    def __init__(self, group: CacheGroup, pool: BlockPool, max_rows: int) -> None:
        super().__init__(group, pool)
        self.block_tables = np.full((max_rows, group.table_width), -1, np.int32)  # -1 = unused
        self._first = [0] * max_rows  # the first place each row owns
        self._end = [0] * max_rows  # the place after its last

    def longest_hit(self, nodes: Sequence[PrefixNode], num_tokens: int) -> int:
        for place in range(num_tokens // self.block_size):
            if self.pool.find(nodes[place]) is None:
                return place * self.block_size
        return num_tokens

    def num_needed(self, num_tokens: int, nodes: Sequence[PrefixNode], num_hit_tokens: int) -> int:
        hit = self._hit_blocks(nodes, num_hit_tokens)
        num_cached = sum(self.pool.ref_counts[block] == 0 for block in hit)
        num_places = -(-num_tokens // self.block_size) - num_hit_tokens // self.block_size
        return num_cached + self.at_most(num_places, len(hit))

    def num_missing(self, row: int, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - self._end[row])

    def num_promised(self, row: int, num_tokens: int) -> int:
        return self.at_most(self.num_missing(row, num_tokens), self._end[row] - self._first[row])

    def adopt(self, row: int, nodes: Sequence[PrefixNode], num_hit_tokens: int) -> None:
        blocks = self._hit_blocks(nodes, num_hit_tokens)
        for block in blocks:
            self.pool.share(block)
        first = self.first_place(num_hit_tokens)
        self.block_tables[row, first : first + len(blocks)] = blocks
        self._first[row], self._end[row] = first, first + len(blocks)

    def grow(self, row: int, num_tokens: int) -> int:
        end = self._end[row]
        count = -(-num_tokens // self.block_size) - end
        if count > 0:
            self.block_tables[row, end : end + count] = self.pool.take(count)
            self._end[row] = end = end + count
        return end * self.block_size

    def publish(self, row: int, place: int, node: PrefixNode) -> None:
        self.pool.publish(int(self.block_tables[row, place]), node)

    def release(self, row: int) -> None:
        self._give_back(row, self._first[row], self._end[row])
        self._first[row] = self._end[row] = 0

    def first_place(self, num_tokens: int) -> int:
        """The first place that a token behind `num_tokens` tokens reads."""
        return 0

    def at_most(self, num_places: int, num_owned: int) -> int:
        """Of so many places more, those that a row which owns `num_owned` has at once beside these."""
        return num_places

    def used_blocks(self) -> dict[int, list[int]]:
        used = {}
        for row, table in enumerate(self.block_tables.tolist()):
            first, end = self._first[row], self._end[row]
            assert min(table[first:end], default=0) >= 0, f"{self.name}: row {row} has a hole"
            assert set(table[:first] + table[end:]) <= {-1}, (
                f"{self.name}: row {row} has blocks it doesn't count"
            )
            if first < end:
                used[row] = table[first:end]
        return used

    def _hit_blocks(self, nodes: Sequence[PrefixNode], num_hit_tokens: int) -> list[int]:
        places = range(self.first_place(num_hit_tokens), num_hit_tokens // self.block_size)
        blocks = [self.pool.find(nodes[place]) for place in places]
        return [block for block in blocks if block is not None]  # none is missing: longest_hit looked

    def _give_back(self, row: int, first: int, end: int) -> None:
        """Last place first: the start of a prefix, which more requests share, is kept longer than its end."""
        owned = self.block_tables[row, first:end]
        self.pool.give_back(owned[::-1].tolist())
        owned[:] = -1


class SlidingWindowGroup(PagedGroup):
    """Block tables whose places before the window are given back (-1 again) once their tokens are confirmed.

    Until then they stay, so that what a long chunk wrote can be published; a row needs room for the window
    and for all tokens that may be unconfirmed.
    """

    def __init__(self, group: CacheGroup, pool: BlockPool, max_rows: int, max_batched_tokens: int) -> None:
        super().__init__(group, pool, max_rows)
        self._window = group.window
        self._most_blocks = _window_blocks(group, max_batched_tokens)

    def longest_hit(self, nodes: Sequence[PrefixNode], num_tokens: int) -> int:
        end = num_tokens // self.block_size  # all places from `place` to here are there
        for place in range(end - 1, -1, -1):
            if self.pool.find(nodes[place]) is None:
                end = place
            elif place <= self.first_place(end * self.block_size):
                break
        return end * self.block_size

    def drop(self, row: int, num_tokens: int) -> None:
        """Give back what no token from `num_tokens` on reads."""
        first = min(self.first_place(num_tokens), self._end[row])
        if first > self._first[row]:
            self._give_back(row, self._first[row], first)
            self._first[row] = first

    def first_place(self, num_tokens: int) -> int:
        return max(0, num_tokens + 1 - self._window) // self.block_size

    def at_most(self, num_places: int, num_owned: int) -> int:
        return min(num_places, max(0, self._most_blocks - num_owned))


class StateGroup(ManagedGroup):
    """A slot a row, which each step reads and writes; a place's content is the state after its last token, so
    block_size is the distance of checkpoints.

    A step that ends with a place leaves a checkpoint: the next one reads that slot and writes a fresh one, and
    once confirmed the checkpoint can be found. A hit reads a checkpoint and writes a slot of its own.
    """

    def __init__(self, group: CacheGroup, pool: BlockPool, max_rows: int, *, keep_checkpoints: bool) -> None:
        super().__init__(group, pool)
        self.read_slots = np.zeros(max_rows, np.int32)  # of each row's newest step
        self.write_slots = np.full(max_rows, -1, np.int32)  # -1 = none yet
        self._read_tokens = [0] * max_rows  # tokens that the slot read summarizes
        self._num_tokens = [0] * max_rows  # and the slot written
        self._keep_checkpoints = keep_checkpoints

    def longest_hit(self, nodes: Sequence[PrefixNode], num_tokens: int) -> int:
        for place in range(num_tokens // self.block_size - 1, -1, -1):
            if self.pool.find(nodes[place]) is not None:
                return (place + 1) * self.block_size
        return 0

    def num_needed(self, num_tokens: int, nodes: Sequence[PrefixNode], num_hit_tokens: int) -> int:
        slot = self._hit_slot(nodes, num_hit_tokens)
        return _STATE_SLOTS - 1 + (slot is None or self.pool.ref_counts[slot] == 0)

    def num_missing(self, row: int, num_tokens: int) -> int:
        if num_tokens <= self._num_tokens[row]:
            return 0
        if self.write_slots[row] < 0:
            return 1
        read = int(self.read_slots[row])
        leaves_one = read not in (ZERO_SLOT, self.write_slots[row]) and self.pool.ref_counts[read] == 1
        return int(self._is_checkpoint(row) and not leaves_one)

    def adopt(self, row: int, nodes: Sequence[PrefixNode], num_hit_tokens: int) -> None:
        slot = self._hit_slot(nodes, num_hit_tokens)
        if slot is not None:
            self.pool.share(slot)
            self.read_slots[row] = slot
        self._read_tokens[row] = self._num_tokens[row] = num_hit_tokens

    def grow(self, row: int, num_tokens: int) -> int:
        """The next step, which ends at `num_tokens`, reads what the last one wrote."""
        if num_tokens > self._num_tokens[row]:
            written = int(self.write_slots[row])
            if written >= 0:
                self._leave_read_slot(row)
                self.read_slots[row] = written
                self._read_tokens[row] = self._num_tokens[row]
            if written < 0 or self._is_checkpoint(row):
                self.write_slots[row] = self.pool.take(1)[0]
            self._num_tokens[row] = num_tokens
        return self._num_tokens[row]

    def publish(self, row: int, place: int, node: PrefixNode) -> None:
        num_tokens = (place + 1) * self.block_size
        if num_tokens == self._num_tokens[row]:
            self.pool.publish(int(self.write_slots[row]), node)
        elif num_tokens == self._read_tokens[row]:
            self.pool.publish(int(self.read_slots[row]), node)

    def release(self, row: int) -> None:
        self._leave_read_slot(row)
        if self.write_slots[row] >= 0:
            self.pool.give_back([int(self.write_slots[row])])
        self.read_slots[row], self.write_slots[row] = ZERO_SLOT, -1
        self._read_tokens[row] = self._num_tokens[row] = 0

    def used_blocks(self) -> dict[int, list[int]]:
        used = {}
        for row, (read, written) in enumerate(
            zip(self.read_slots.tolist(), self.write_slots.tolist(), strict=True)
        ):
            assert written != ZERO_SLOT, f"{self.name}: row {row} writes the slot of zeros"
            if slots := {read, written} - {ZERO_SLOT, -1}:
                used[row] = sorted(slots)
        return used

    def _is_checkpoint(self, row: int) -> bool:
        """Whether what the row wrote last must stay as it is."""
        return self._keep_checkpoints and self._num_tokens[row] % self.block_size == 0

    def _leave_read_slot(self, row: int) -> None:
        read = int(self.read_slots[row])
        if read not in (ZERO_SLOT, int(self.write_slots[row])):
            self.pool.give_back([read])

    def _hit_slot(self, nodes: Sequence[PrefixNode], num_hit_tokens: int) -> int | None:
        return self.pool.find(nodes[num_hit_tokens // self.block_size - 1]) if num_hit_tokens else None


def make_group(
    group: CacheGroup,
    num_blocks: int,
    max_rows: int,
    forget: Forget,
    max_batched_tokens: int,
    keep_checkpoints: bool,
) -> ManagedGroup:
    """The group of that kind. Raises EngineFormatError for one this runtime doesn't know."""
    if group.kind == "state":
        pool = BlockPool(num_blocks, forget, first_block=ZERO_SLOT + 1)
        return StateGroup(group, pool, max_rows, keep_checkpoints=keep_checkpoints)
    if group.kind != "paged":
        raise EngineFormatError(
            f"cache group {group.name} is of kind {group.kind}, this runtime knows paged and state groups: use "
            f"the castiron version that built the engine"
        )
    pool = BlockPool(num_blocks, forget)
    if group.window:
        return SlidingWindowGroup(group, pool, max_rows, max_batched_tokens)
    return PagedGroup(group, pool, max_rows)


def blocks_of_sequence(group: CacheGroup, num_tokens: int, max_batched_tokens: int) -> int:
    """Blocks (slots) that one sequence of this length can use."""
    if group.kind == "state":
        return _STATE_SLOTS + _STATE_CHECKPOINTS
    num_blocks = -(-num_tokens // group.block_size)
    return min(num_blocks, _window_blocks(group, max_batched_tokens)) if group.window else num_blocks


def tokens_of_blocks(group: CacheGroup, num_blocks: int, max_batched_tokens: int) -> int:
    """Tokens of the longest sequence that so many blocks (slots) hold when nothing else runs."""
    all_tokens = group.table_width * group.block_size
    if group.kind == "state":
        return all_tokens if num_blocks > _STATE_SLOTS else 0
    if group.window and num_blocks >= _window_blocks(group, max_batched_tokens):
        return all_tokens
    return num_blocks * group.block_size


def _window_blocks(group: CacheGroup, max_batched_tokens: int) -> int:
    """Blocks that hold a window behind the tokens of all steps under way, and two cut by its ends."""
    return -(-(group.window - 1 + MAX_STEPS_AHEAD * max_batched_tokens) // group.block_size) + 2
