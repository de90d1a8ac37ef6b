"""The cache of all running sequences as blocks: several cache groups behind one manager.

A row (a running request) owns, in every group, the blocks of its block table in order. Free blocks wait in
a ring, first in first out, so a freed block is reused as late as possible. Blocks are taken as a sequence
grows and given back when its row is released: free + used == total, always.

Prefix caching belongs here and nowhere else: `release` would keep full blocks findable by content until
`grow` takes them from the ring, and a lookup would hand a new row blocks that are still in place.
"""

import numpy as np

from castiron.runtime.errors import EngineFormatError
from castiron.runtime.step_abi import CacheGroup


class BlockPool:
    """Block ids 0 .. num_blocks - 1 of one cache group; the free ones in a ring, oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._ring = np.arange(num_blocks, dtype=np.int32)
        self._head = 0  # place of the block freed longest ago

    def take(self, count: int) -> np.ndarray:
        """The `count` blocks freed longest ago, int32 [count]; there must be so many."""
        assert 0 <= count <= self.num_free
        blocks: np.ndarray = self._ring[self._places(self._head, count)]
        self._head = (self._head + count) % self.num_blocks
        self.num_free -= count
        return blocks

    def give_back(self, blocks: np.ndarray) -> None:
        """Put taken blocks (int32 [count]) at the end of the ring."""
        assert self.num_free + len(blocks) <= self.num_blocks
        self._ring[self._places(self._head + self.num_free, len(blocks))] = blocks
        self.num_free += len(blocks)

    def free_blocks(self) -> np.ndarray:
        """The free blocks in the order in which they will be taken."""
        blocks: np.ndarray = self._ring[self._places(self._head, self.num_free)]
        return blocks

    def _places(self, start: int, count: int) -> np.ndarray:
        return (start + np.arange(count)) % self.num_blocks


class PagedGroup:
    """One cache group's pool and the block tables of all rows."""

    def __init__(self, group: CacheGroup, num_blocks: int, max_rows: int) -> None:
        self.name = group.name
        self.block_size = group.block_size
        self.pool = BlockPool(num_blocks)
        self.block_tables = np.full((max_rows, group.table_width), -1, np.int32)  # -1 = unused
        self.num_owned = [0] * max_rows  # blocks of each row

    def num_missing(self, row: int, num_tokens: int) -> int:
        """Blocks the row lacks for `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - self.num_owned[row])

    def grow(self, row: int, count: int) -> None:
        owned = self.num_owned[row]
        self.block_tables[row, owned : owned + count] = self.pool.take(count)
        self.num_owned[row] = owned + count

    def release(self, row: int) -> None:
        owned = self.num_owned[row]
        self.pool.give_back(self.block_tables[row, :owned])
        self.block_tables[row, :owned] = -1
        self.num_owned[row] = 0


class BlockManager:
    """All cache groups; a row has room for a number of tokens in every group or in none."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_blocks: dict[str, int], max_rows: int) -> None:
        """Raises EngineFormatError for a cache group of a kind this runtime doesn't serve."""
        for group in groups:
            if group.kind != "paged":
                raise EngineFormatError(
                    f"cache group {group.name} is of kind {group.kind}, this runtime serves paged "
                    f"groups: use the castiron version that built the engine"
                )
        self.groups = tuple(PagedGroup(group, num_blocks[group.name], max_rows) for group in groups)
        self._room = [0] * max_rows  # tokens each row has room for in every group

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group; the server's gauge of the cache."""
        return self.groups[0].pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.groups[0].pool.num_free

    def grow(self, row: int, num_tokens: int) -> bool:
        """Give the row room for `num_tokens` tokens in all. False, and nothing changed, if blocks lack."""
        if num_tokens <= self._room[row]:
            return True
        missing = [group.num_missing(row, num_tokens) for group in self.groups]
        if any(count > group.pool.num_free for count, group in zip(missing, self.groups, strict=True)):
            return False
        for count, group in zip(missing, self.groups, strict=True):
            if count:
                group.grow(row, count)
        self._room[row] = min(group.num_owned[row] * group.block_size for group in self.groups)
        return True

    def release(self, row: int) -> None:
        """Take all blocks from the row."""
        for group in self.groups:
            group.release(row)
        self._room[row] = 0

    def can_admit(self, num_tokens: int, promised: list[tuple[int, int]]) -> bool:
        """Whether a new row of `num_tokens` fits beside what rows are promised: pairs of row and tokens."""
        for group in self.groups:
            needed = -(-num_tokens // group.block_size)
            needed += sum(group.num_missing(row, tokens) for row, tokens in promised)
            if needed > group.pool.num_free:
                return False
        return True

    def check_integrity(self) -> None:
        """Assert free + used == total, no block owned twice, tables and counts in agreement; for tests."""
        for group in self.groups:
            tables = group.block_tables
            used = tables[tables >= 0]
            free = group.pool.free_blocks()
            everything = np.sort(np.concatenate([used, free]))
            assert len(used) + len(free) == group.pool.num_blocks, (group.name, len(used), len(free))
            assert np.array_equal(everything, np.arange(group.pool.num_blocks)), (
                f"{group.name}: a block owned twice"
            )
            assert np.array_equal((tables >= 0).sum(axis=1), group.num_owned), f"{group.name}: counts differ"
            for row, owned in enumerate(group.num_owned):
                assert (tables[row, :owned] >= 0).all(), f"{group.name}: row {row} has a hole"
        for row, room in enumerate(self._room):
            assert room == min(group.num_owned[row] * group.block_size for group in self.groups)
