"""The blocks of one cache group: who uses them, which are free, and what free ones still contain.

A block is used by one or more rows (its reference count), or free. A free block that holds a known prefix is
cached: it may be used again as it is until its place is needed. Blocks that hold nothing of use are given out
first, the one freed longest ago first; then cached ones, least recently used first.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

import numpy as np

from castiron.runtime.prefix_tree import PrefixNode


class BlockPool:
    """Block ids first_block .. num_blocks - 1. free + cached + used == their number, always."""

    def __init__(
        self, num_blocks: int, forget: Callable[[PrefixNode], None], *, first_block: int = 0
    ) -> None:
        """`forget` is told of a node when its block is evicted."""
        self.num_blocks = num_blocks - first_block
        self.ref_counts = [0] * num_blocks  # rows that use each block
        self._empty = deque(range(first_block, num_blocks))
        self._cached: OrderedDict[int, PrefixNode] = OrderedDict()  # free ones, least recently used first
        self._nodes: dict[int, PrefixNode] = {}  # what published blocks contain, used or cached
        self._blocks: dict[PrefixNode, int] = {}
        self._forget = forget

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, used by one row from now on; there must be so many."""
        assert 0 <= count <= self.num_free
        taken = []
        for _ in range(count):
            if self._empty:
                block = self._empty.popleft()
            else:
                block, node = self._cached.popitem(last=False)
                del self._nodes[block], self._blocks[node]
                self._forget(node)
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """One row more uses a published block."""
        if self.ref_counts[block] == 0:
            del self._cached[block]
        self.ref_counts[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """A row no longer uses these; of those freed by it, the first will be taken first."""
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} is given back twice"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                node = self._nodes.get(block)
                if node is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = node

    def publish(self, block: int, node: PrefixNode) -> bool:
        """Let a used block be found by its content; False, changing nothing, if another block has the same."""
        assert self.ref_counts[block] > 0 and block not in self._nodes
        if node in self._blocks:
            return False
        self._nodes[block] = node
        self._blocks[node] = block
        node.num_holders += 1
        return True

    def find(self, node: PrefixNode) -> int | None:
        """The block that contains the end of this prefix."""
        return self._blocks.get(node)

    def free_blocks(self) -> list[int]:
        """The free blocks in the order in which they will be taken."""
        return [*self._empty, *self._cached]

    def published(self) -> list[PrefixNode]:
        return list(self._blocks)

    def check_integrity(self, uses: Iterable[int]) -> None:
        """Assert that blocks are used as `uses` says (a block once for each row) and free otherwise; for tests."""
        counts = Counter(uses)
        free = self.free_blocks()
        assert not counts.keys() & set(free), "a used block is free"
        assert len(set(free)) == len(free), "a block is free twice"
        assert len(free) + len(counts) == self.num_blocks, (len(free), len(counts), self.num_blocks)
        wrong = np.flatnonzero(np.array([counts[b] for b in range(len(self.ref_counts))]) != self.ref_counts)
        assert len(wrong) == 0, f"reference counts of blocks {wrong.tolist()} are wrong"
        assert self._blocks == {node: block for block, node in self._nodes.items()}
        assert self._cached == {b: n for b, n in self._nodes.items() if counts[b] == 0}
        assert not set(self._empty) & self._nodes.keys()
