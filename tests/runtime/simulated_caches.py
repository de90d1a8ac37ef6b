"""Cache groups of a device without a model: what a kernel would keep of each token, and checks of what it reads.

A token leaves its id, its position and the hash of the whole prefix up to it, as a real cache depends on the
whole prefix. So a block shared with the wrong sequence, overwritten, or read where it isn't any more, shows.
"""

import numpy as np

from castiron.runtime.step_abi import CacheGroup

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def prefix_hashes(token_ids: np.ndarray, start: int = 0, before: int = 0) -> np.ndarray:
    """uint64 [n]: a hash of each prefix, depending on every token and its place.

    The tokens may stand behind `start` others whose hash is `before`.
    """
    with np.errstate(over="ignore"):
        places = np.arange(start, start + len(token_ids), dtype=np.uint64)
        mixed = (
            (token_ids.astype(np.uint64) + np.uint64(1))
            * (places * np.uint64(2) + np.uint64(1))
            * _MULTIPLIER
        )
        return np.cumsum(mixed ^ (mixed >> np.uint64(29)), dtype=np.uint64) + np.uint64(before)


class SimulatedBlocks:
    """A paged group, with a sliding window or without."""

    def __init__(self, group: CacheGroup, num_blocks: int) -> None:
        self.group = group
        self.store = np.zeros((num_blocks * group.block_size, 3), np.uint64)  # token id, position + 1, hash

    def check_step(self, fields: dict[str, np.ndarray], num_tokens: int, num_seqs: int) -> None:
        """The tokens of a step have slots of their own, in blocks that no other sequence reads."""
        slots = fields[f"slot_mapping.{self.group.name}"][:num_tokens]
        assert len(set(slots.tolist())) == num_tokens and slots.min() >= 0, "slots of a step are distinct"
        tables = fields[f"block_tables.{self.group.name}"][:num_seqs]
        blocks, counts = np.unique(tables[tables >= 0], return_counts=True)
        shared = set(blocks[counts > 1].tolist())
        assert not shared & set((slots // self.group.block_size).tolist()), "a shared block is never written"

    def run(
        self, fields: dict[str, np.ndarray], i: int, queries: slice, token_ids: np.ndarray, start: int
    ) -> np.ndarray:
        """Write the new tokens of sequence i, read what they see, and return the hashes of their prefixes."""
        group, end = self.group, start + len(token_ids)
        table = fields[f"block_tables.{group.name}"][i].astype(np.int64)
        lowest = max(0, start + 1 - group.window) if group.window else 0
        places = np.arange(lowest, end)
        assert (table[places // group.block_size] >= 0).all(), "what is read has a block"
        if group.window == 0:
            owned = int((table >= 0).sum())
            assert (table[:owned] >= 0).all() and (table[owned:] == -1).all()
        slots = table[places // group.block_size] * group.block_size + places % group.block_size
        written = slots[start - lowest :]
        assert (fields[f"slot_mapping.{group.name}"][queries] == written).all()
        before = int(self.store[slots[start - lowest - 1], 2]) if start else 0
        self.store[written, 0] = token_ids
        self.store[written, 1] = np.arange(start, end) + 1
        self.store[written, 2] = prefix_hashes(token_ids, start, before)
        content = self.store[slots]
        assert (content[:, 1] == places + 1).all(), "a sequence reads its own positions in order"
        with np.errstate(over="ignore"):
            first = int(content[0, 2] - prefix_hashes(content[:1, 0], lowest)[0])
            assert (content[:, 2] == prefix_hashes(content[:, 0], lowest, first)).all(), "of one prefix"
        return content[start - lowest :, 2]


class SimulatedStates:
    """A state group: a slot is the number of its tokens and the hash of all of them."""

    def __init__(self, group: CacheGroup, num_slots: int) -> None:
        self.group = group
        self.store = np.full((num_slots, 2), 77, np.uint64)
        self.store[0] = 0

    def check_step(self, fields: dict[str, np.ndarray], num_tokens: int, num_seqs: int) -> None:
        """Every sequence writes a slot that no other one reads or writes."""
        written = fields[f"state_write_slots.{self.group.name}"][:num_seqs].tolist()
        read = fields[f"state_read_slots.{self.group.name}"][:num_seqs].tolist()
        assert len(set(written)) == num_seqs and min(written) > 0
        for i, slot in enumerate(written):
            assert slot not in read[:i] + read[i + 1 :]

    def run(
        self, fields: dict[str, np.ndarray], i: int, queries: slice, token_ids: np.ndarray, start: int
    ) -> np.ndarray:
        """Move sequence i's state past its new tokens; the hashes of their prefixes."""
        count, before = self.store[fields[f"state_read_slots.{self.group.name}"][i]].tolist()
        assert count == start, f"the state read is that after {count} tokens, expected {start}"
        hashes = prefix_hashes(token_ids, start, before)
        self.store[fields[f"state_write_slots.{self.group.name}"][i]] = (start + len(token_ids), hashes[-1])
        return hashes


def simulated_cache(group: CacheGroup, num_blocks: int) -> SimulatedBlocks | SimulatedStates:
    return (SimulatedStates if group.kind == "state" else SimulatedBlocks)(group, num_blocks)
