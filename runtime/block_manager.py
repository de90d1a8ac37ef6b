"""The caches of all running sequences: several cache groups behind one manager, and what of them can be found again.

A row (a running request) owns blocks in every group. They are taken as it grows and given back when it is
released; in each group free + cached + used == total, always.

    lookup   which leading tokens of a new sequence are cached in every group
    admit    give a row these blocks: it shares them with whoever uses them
    grow     room for the tokens of the next step
    confirm  the host knows the tokens up to here and the device has computed them: full blocks can be found
    release  blocks nobody uses are free; what was published stays findable until its place is needed

Only confirmed tokens are published: those of a step under way may still be dropped. A preempted or aborted
request's confirmed blocks stay findable, so a preempted one resumes from what is left of them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from castiron.runtime import block_hash
from castiron.runtime.block_hash import Domains, encode_domains, root_key
from castiron.runtime.cache_groups import ManagedGroup, PagedGroup, SlidingWindowGroup, StateGroup, make_group
from castiron.runtime.prefix_tree import PrefixNode, PrefixTree
from castiron.runtime.step_abi import CacheGroup


@dataclass(eq=False, slots=True)
class PrefixKeys:
    """What a sequence's blocks are found by; kept with it, so that a block is hashed once."""

    root_content: bytes  # encoded domains
    by_tree: tuple[list[bytes], ...]  # the root's key, then that of each full block so far


@dataclass(frozen=True)
class PrefixHit:
    """The leading tokens of a sequence that every group has."""

    num_tokens: int = 0
    nodes: tuple[Sequence[PrefixNode], ...] = ()  # for each tree, at least as many as the hit is long


_NO_HIT = PrefixHit()


@dataclass(slots=True)
class _RowPrefix:
    """How far a row's content is known to the trees."""

    keys: PrefixKeys
    tips: list[PrefixNode | None]  # for each tree the last published place; None: its key was taken
    num_places: list[int]  # for each tree, places up to the tip
    computing: list[bytes] = field(default_factory=list)  # keys of the first tree that the row will publish


class BlockManager:
    """All cache groups; a row has room for a number of tokens in every group or in none."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_blocks: dict[str, int],
        max_rows: int,
        *,
        max_batched_tokens: int = 1,
        domains: Domains | None = None,
    ) -> None:
        """`domains`: what all cached blocks have in common (block_hash.engine_domains); None: no prefix cache.

        Raises EngineFormatError for a cache group of a kind this runtime doesn't know.
        """
        self._domains = domains
        sizes = sorted({group.block_size for group in groups})
        trees = {size: PrefixTree(size) for size in sizes}
        self._trees = tuple(trees.values())
        self.groups: tuple[ManagedGroup, ...] = tuple(
            make_group(
                group,
                num_blocks[group.name],
                max_rows,
                trees[group.block_size].release,
                max_batched_tokens,
                domains is not None,
            )
            for group in groups
        )
        self.paged = tuple(group for group in self.groups if isinstance(group, PagedGroup))
        self.states = tuple(group for group in self.groups if isinstance(group, StateGroup))
        self._windows = tuple(group for group in self.paged if isinstance(group, SlidingWindowGroup))
        self._of_tree = tuple(tuple(g for g in self.groups if g.block_size == size) for size in sizes)
        self._tree_of = tuple(sizes.index(group.block_size) for group in self.groups)
        self._alignment = math.lcm(*sizes)
        self.unit = math.gcd(*sizes)  # tokens; `confirm` has something to do only where a unit ends
        self._room = [0] * max_rows  # tokens each row has room for in every group
        self._prefixes: list[_RowPrefix | None] = [None] * max_rows
        self._computing: dict[bytes, int] = {}  # key -> the row that will publish it

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group; the server's gauge of the cache."""
        return self.groups[0].pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the first group that can be taken, cached ones included."""
        return self.groups[0].pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks of the first group that are free and can be found by their content."""
        return self.groups[0].pool.num_cached

    def new_keys(self, domains: Domains) -> PrefixKeys | None:
        """For a sequence that differs from others in these domains; None without a prefix cache."""
        if self._domains is None:
            return None
        content = encode_domains((*self._domains, *domains))
        return PrefixKeys(content, tuple([root_key(content)] for _ in self._trees))

    def lookup(self, keys: PrefixKeys | None, token_ids: np.ndarray) -> PrefixHit:
        """The longest hit of a sequence with these tokens (int32) that leaves at least one to compute."""
        if keys is None:
            return PrefixHit()
        content = token_ids.tobytes()
        nodes = []
        num_tokens = len(token_ids) - 1
        for tree, tree_keys in zip(self._trees, keys.by_tree, strict=True):
            tree.extend_keys(tree_keys, content)
            nodes.append(tree.walk(tree_keys, keys.root_content, content))
            num_tokens = min(num_tokens, len(nodes[-1]) * tree.block_size)
        while True:  # until all groups agree; what one lacks may make another start over with less
            longest = num_tokens = num_tokens - num_tokens % self._alignment
            for group, tree_index in zip(self.groups, self._tree_of, strict=True):
                longest = min(longest, group.longest_hit(nodes[tree_index], num_tokens))
            if longest == num_tokens:
                return PrefixHit(num_tokens, tuple(nodes)) if num_tokens else PrefixHit()
            num_tokens = longest

    def num_coming_tokens(self, keys: PrefixKeys | None, hit: PrefixHit, num_tokens: int) -> int:
        """By how many tokens the hit of a sequence of `num_tokens` will be longer once rows that are computing
        the same have gone on.
        """
        if keys is None:
            return 0
        size = self._trees[0].block_size
        end = hit.num_tokens
        for key in keys.by_tree[0][1 + end // size :]:
            if key not in self._computing:
                break
            end += size
        end = min(end, num_tokens - 1)
        return end - end % self._alignment - hit.num_tokens

    def left_beside(self, promised: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Free blocks of each group once rows have what they are promised: pairs of row and tokens."""
        left = [group.pool.num_free for group in self.groups]
        room = self._room
        for row, num_tokens in promised:
            if num_tokens > room[row]:  # else it has them: most rows, most of the time
                for index, group in enumerate(self.groups):
                    left[index] -= group.num_promised(row, num_tokens)
        return tuple(left)

    def num_needed(self, num_tokens: int, hit: PrefixHit = _NO_HIT) -> tuple[int, ...]:
        """Free blocks of each group that a new row of `num_tokens` tokens takes: at least one."""
        by_tree = hit.nodes or ((),) * len(self._trees)
        return tuple(
            [
                group.num_needed(num_tokens, by_tree[tree_index], hit.num_tokens)
                for group, tree_index in zip(self.groups, self._tree_of, strict=True)
            ]
        )

    def admit(self, row: int, keys: PrefixKeys | None, hit: PrefixHit) -> None:
        """Give an empty row the blocks of its hit, and let what it computes be found."""
        if keys is None:
            return
        tips, num_places = [], []
        for index, tree in enumerate(self._trees):
            count = hit.num_tokens // tree.block_size
            if count:
                tip: PrefixNode | None = hit.nodes[index][count - 1]
                assert tip is not None
                tree.hold(tip)
            else:
                tip = tree.root(keys.by_tree[index][0], keys.root_content)
            tips.append(tip)
            num_places.append(count)
        coming = []
        if tips[0] is not None:
            coming = [k for k in keys.by_tree[0][1 + num_places[0] :] if k not in self._computing]
        self._computing.update(dict.fromkeys(coming, row))
        self._prefixes[row] = _RowPrefix(keys, tips, num_places, coming)
        if hit.num_tokens:
            for group, tree_index in zip(self.groups, self._tree_of, strict=True):
                group.adopt(row, hit.nodes[tree_index], hit.num_tokens)
            self._room[row] = hit.num_tokens

    def grow(self, row: int, num_tokens: int) -> bool:
        """Give the row room for `num_tokens` tokens in all. False, and nothing changed, if blocks lack."""
        if num_tokens <= self._room[row]:
            return True
        if any(group.num_missing(row, num_tokens) > group.pool.num_free for group in self.groups):
            return False
        self._room[row] = min([group.grow(row, num_tokens) for group in self.groups])
        return True

    def chunk_tokens(self, start: int, count: int) -> int:
        """How many of `count` tokens from `start` on a prefill step should compute.

        Where states are cached a chunk ends where a checkpoint can be hit, if it reaches such a place.
        """
        if self._domains is not None and self.states:
            end = start + count
            end -= end % self._alignment
            if end > start:
                return end - start
        return count

    def confirm(self, row: int, num_tokens: int, token_ids: np.ndarray) -> None:
        """The row's first `num_tokens` tokens are computed, and known: token_ids int32 [at least num_tokens].

        Publishes the blocks that are full by now and gives back what no later token reads.
        """
        prefix = self._prefixes[row]
        if prefix is not None:
            for index in range(len(self._trees)):
                self._publish(row, prefix, index, num_tokens, token_ids)
        for group in self._windows:
            group.drop(row, num_tokens)

    def release(self, row: int) -> None:
        """Take all blocks from the row."""
        for group in self.groups:
            group.release(row)
        self._room[row] = 0
        prefix, self._prefixes[row] = self._prefixes[row], None
        if prefix is not None:
            for tree, tip in zip(self._trees, prefix.tips, strict=True):
                if tip is not None:
                    tree.release(tip)
            self._stop_computing(row, prefix.computing)

    def rows_in_use(self) -> set[int]:
        """Rows that own blocks; for tests."""
        return {row for group in self.groups for row in group.used_blocks()}

    def check_integrity(self) -> None:
        """Assert free + cached + used == total, exact reference counts, tables, trees and counts in agreement;
        for tests, between steps.
        """
        holders: list[list[PrefixNode]] = [[] for _ in self._trees]
        for group, tree_index in zip(self.groups, self._tree_of, strict=True):
            group.pool.check_integrity(block for used in group.used_blocks().values() for block in used)
            holders[tree_index] += group.pool.published()
        for prefix in self._prefixes:
            if prefix is not None:
                for tree_index, tip in enumerate(prefix.tips):
                    holders[tree_index] += [tip] if tip is not None else []
        for tree, held in zip(self._trees, holders, strict=True):
            tree.check_integrity(held)
        rows = {row for row, prefix in enumerate(self._prefixes) if prefix is not None}
        assert set(self._computing.values()) <= rows, "a row that is gone computes something"

    def _publish(
        self, row: int, prefix: _RowPrefix, index: int, num_tokens: int, token_ids: np.ndarray
    ) -> None:
        """Publish the places of one tree that are full."""
        tree, keys = self._trees[index], prefix.keys.by_tree[index]
        size = tree.block_size
        for place in range(prefix.num_places[index], num_tokens // size):
            tip = prefix.tips[index]
            if tip is None:
                return
            content = token_ids[place * size : (place + 1) * size].tobytes()
            if len(keys) == place + 1:
                keys.append(block_hash.block_key(keys[place], content))
            tip = prefix.tips[index] = tree.extend(tip, keys[place + 1], content)
            prefix.num_places[index] = place + 1
            if index == 0:
                self._stop_computing(row, prefix.computing if tip is None else [keys[place + 1]])
            if tip is not None:
                for group in self._of_tree[index]:
                    group.publish(row, place, tip)

    def _stop_computing(self, row: int, keys: list[bytes]) -> None:
        for key in keys:
            if self._computing.get(key) == row:
                del self._computing[key]
