"""Cache groups other than full attention: what they free, what a hit needs of them, and that all must have it."""

import numpy as np
import pytest

from castiron.runtime.block_manager import BlockManager
from castiron.runtime.block_pool import BlockPool
from castiron.runtime.cache_groups import blocks_of_sequence, tokens_of_blocks
from castiron.runtime.step_abi import CacheGroup

KV = CacheGroup("kv", "paged", block_size=4, table_width=16)
SLIDING = CacheGroup("sliding", "paged", block_size=4, table_width=16, window=6)
STATE = CacheGroup("gdn", "state", block_size=8, table_width=8)
LATENT = CacheGroup("mla", "paged", block_size=16, table_width=4)
DOMAINS = (("engine", b"e"),)


def manager(*groups: CacheGroup, num_blocks: int = 32, max_rows: int = 3) -> BlockManager:
    return BlockManager(
        groups, {g.name: num_blocks for g in groups}, max_rows, max_batched_tokens=8, domains=DOMAINS
    )


def hit_of(blocks: BlockManager, tokens: range | list[int]) -> int:
    return blocks.lookup(blocks.new_keys(()), np.array(tokens, np.int32)).num_tokens


def admit(blocks: BlockManager, row: int, tokens: range | list[int]) -> int:
    keys = blocks.new_keys(())
    hit = blocks.lookup(keys, np.array(tokens, np.int32))
    blocks.admit(row, keys, hit)
    blocks.check_integrity()
    return hit.num_tokens


def advance(blocks: BlockManager, row: int, tokens: range | list[int], *ends: int) -> None:
    """Compute a row's tokens in steps that end there."""
    for end in ends:
        assert blocks.grow(row, end)
        blocks.check_integrity()
        blocks.confirm(row, end, np.array(tokens, np.int32))
        blocks.check_integrity()


def evict(pool: BlockPool, count: int) -> None:
    """Make the pool reuse that many blocks."""
    pool.give_back(pool.take(count))


def table(blocks: BlockManager, row: int, group: int = 0) -> list[int]:
    return blocks.paged[group].block_tables[row].tolist()


def test_a_window_frees_blocks_that_no_later_token_sees() -> None:
    blocks = manager(SLIDING, num_blocks=8)
    admit(blocks, 0, range(40))
    advance(blocks, 0, range(40), 8)
    assert table(blocks, 0)[:4] == [0, 1, -1, -1], "token 8 sees 3 .. 8"
    advance(blocks, 0, range(40), 9)
    assert table(blocks, 0)[:4] == [-1, 1, 2, -1], "token 9 sees 4 .. 9"
    advance(blocks, 0, range(40), 12)
    assert table(blocks, 0)[:4] == [-1, 1, 2, -1], "token 12 sees 7 .. 12"
    advance(blocks, 0, range(40), 20)
    assert table(blocks, 0)[:6] == [-1, -1, -1, 3, 4, -1]
    assert blocks.num_free_blocks == 6 and blocks.num_cached_blocks == 3


def test_tokens_not_confirmed_keep_their_window() -> None:
    blocks = manager(SLIDING, num_blocks=8)
    admit(blocks, 0, range(40))
    assert blocks.grow(0, 8) and blocks.grow(0, 16)  # two steps under way
    assert table(blocks, 0)[:5] == [0, 1, 2, 3, -1]
    blocks.confirm(0, 8, np.arange(40, dtype=np.int32))
    assert table(blocks, 0)[:5] == [0, 1, 2, 3, -1]
    blocks.confirm(0, 16, np.arange(40, dtype=np.int32))
    assert table(blocks, 0)[:5] == [-1, -1, 2, 3, -1]
    blocks.check_integrity()


def test_a_window_hit_needs_only_the_blocks_inside_the_window() -> None:
    blocks = manager(SLIDING, num_blocks=8)
    admit(blocks, 0, range(24))
    advance(blocks, 0, range(24), 8, 16, 24)
    assert table(blocks, 0)[:6] == [-1, -1, -1, -1, 4, 5]
    blocks.release(0)
    assert hit_of(blocks, range(25)) == 24
    admit(blocks, 1, range(100, 124))
    advance(blocks, 1, range(100, 124), 8, 16)
    blocks.release(1)
    # the other row took the two blocks never used, then the two freed first: places 1 and 0
    assert [hit_of(blocks, range(n)) for n in (25, 17, 13)] == [24, 16, 0]
    assert admit(blocks, 2, range(30)) == 24
    assert table(blocks, 2)[:7] == [-1, -1, -1, -1, 4, 5, -1]


def test_a_window_hit_falls_back_to_where_its_window_is_complete() -> None:
    blocks = manager(SLIDING)
    admit(blocks, 0, range(24))
    advance(blocks, 0, range(24), 24)
    blocks.release(0)
    pool = blocks.paged[0].pool
    assert pool.free_blocks()[-6:] == [3, 2, 1, 0, 5, 4], "those outside the window were freed first"
    evict(pool, 26 + 1)  # all that were never used, and place 3
    assert hit_of(blocks, range(25)) == 24
    assert hit_of(blocks, range(24)) == 12, "20 and 16 need place 3; 12 needs 1 and 2"


def test_full_attention_and_a_window_hit_together_or_not_at_all() -> None:
    blocks = manager(KV, SLIDING, num_blocks=16)
    admit(blocks, 0, range(24))
    advance(blocks, 0, range(24), 24)
    blocks.release(0)
    full, sliding = (group.pool for group in blocks.paged)
    assert hit_of(blocks, range(25)) == 24
    evict(sliding, 10 + 1)  # all that were never used, and place 3
    assert hit_of(blocks, range(25)) == 24 and hit_of(blocks, range(20)) == 12
    evict(full, 10 + 2)  # places 5 and 4
    assert hit_of(blocks, range(25)) == 12
    assert admit(blocks, 1, range(25)) == 12
    assert table(blocks, 1, 0)[:4] == [0, 1, 2, -1] and table(blocks, 1, 1)[:4] == [-1, 1, 2, -1]


def test_a_state_is_zeros_first_then_updated_in_place_between_checkpoints() -> None:
    blocks = manager(STATE)
    (state,) = blocks.states
    slots = []
    admit(blocks, 0, range(40))
    for end in (3, 8, 9, 10, 16, 17):
        advance(blocks, 0, range(40), end)
        slots.append((int(state.read_slots[0]), int(state.write_slots[0])))
    # a step behind a checkpoint (8, 16) reads it and writes a fresh slot
    assert slots == [(0, 1), (1, 1), (1, 2), (2, 2), (2, 2), (2, 3)]
    assert state.pool.num_cached == 1  # the checkpoint at 8; that at 16 is still read
    blocks.release(0)
    assert state.pool.num_cached == 2 and state.pool.num_free == 31


def test_a_state_hit_reads_a_shared_checkpoint_and_writes_its_own_slot() -> None:
    blocks = manager(STATE)
    (state,) = blocks.states
    admit(blocks, 0, range(20))
    advance(blocks, 0, range(20), 8, 16, 20)
    assert hit_of(blocks, range(16)) == 8, "one token is left to compute"
    for row in (1, 2):
        assert admit(blocks, row, range(20)) == 16
        assert blocks.grow(row, 20)
    assert state.read_slots.tolist() == [2, 2, 2] and len(set(state.write_slots.tolist())) == 3
    assert state.pool.ref_counts[2] == 3
    advance(blocks, 1, range(30), 21)
    assert state.read_slots[1] == state.write_slots[1] and state.pool.ref_counts[2] == 2
    blocks.check_integrity()


def test_a_checkpoint_is_published_though_the_next_step_is_under_way() -> None:
    blocks = manager(STATE)
    admit(blocks, 0, range(20))
    assert blocks.grow(0, 8) and blocks.grow(0, 9)
    blocks.confirm(0, 8, np.arange(20, dtype=np.int32))
    assert hit_of(blocks, range(20)) == 8
    blocks.check_integrity()


def test_a_step_that_passes_a_checkpoint_leaves_none_and_prefill_chunks_end_with_one() -> None:
    blocks = manager(STATE)
    admit(blocks, 0, range(20))
    advance(blocks, 0, range(20), 12)
    assert hit_of(blocks, range(20)) == 0
    assert [
        blocks.chunk_tokens(start, count) for start, count in ((0, 20), (0, 8), (3, 4), (3, 5), (16, 4))
    ] == [*(16, 8, 4, 5, 4)]


def test_without_a_prefix_cache_states_stay_in_place() -> None:
    blocks = BlockManager((STATE,), {"gdn": 3}, 2, max_batched_tokens=8)
    blocks.admit(0, None, blocks.lookup(None, np.arange(20, dtype=np.int32)))
    for end in (8, 9, 16, 17):
        assert blocks.grow(0, end)
        blocks.confirm(0, end, np.arange(20, dtype=np.int32))
    assert blocks.states[0].write_slots[0] == 1 and blocks.num_free_blocks == 1
    assert blocks.chunk_tokens(0, 20) == 20


def test_a_state_grows_only_if_a_slot_for_the_next_checkpoint_is_free() -> None:
    blocks = manager(STATE, num_blocks=4)
    admit(blocks, 0, range(20))
    admit(blocks, 1, range(50, 70))
    advance(blocks, 0, range(20), 8)
    advance(blocks, 1, range(50, 70), 8)
    assert blocks.grow(0, 9)
    assert not blocks.grow(1, 9), "slots 1 and 2 are checkpoints, row 0 writes 3"
    blocks.check_integrity()
    assert blocks.grow(0, 10), "row 0 goes on in place, and leaves its checkpoint"
    assert blocks.grow(1, 9)
    blocks.check_integrity()


def test_two_slots_are_enough_for_a_sequence_alone_whatever_its_steps() -> None:
    for size in (1, 3, 4, 8, 16):
        blocks = manager(STATE, num_blocks=3)
        assert tokens_of_blocks(STATE, 3, 8) == 64
        for turn in range(2):
            start = admit(blocks, 0, range(64))
            assert (start > 0) == (turn == 1)
            advance(blocks, 0, range(64), *range(start + size, 65, size))
            blocks.release(0)


def test_a_hit_needs_every_group_at_a_length_that_all_can_start_from() -> None:
    blocks = manager(KV, LATENT, STATE, SLIDING)
    assert admit(blocks, 0, range(40)) == 0
    advance(blocks, 0, range(40), 8, 16, 24, 32, 40)
    blocks.release(0)
    assert hit_of(blocks, range(41)) == 32, "a multiple of all block sizes"
    evict(blocks.states[0].pool, 26 + 3)  # all that were never used, and the checkpoints at 8, 16 and 24
    assert hit_of(blocks, range(41)) == 32 and hit_of(blocks, range(30)) == 0
    evict(blocks.states[0].pool, 26 + 4)
    assert hit_of(blocks, range(41)) == 0, "the state at 40 is there, but 40 is no place of all groups"
    assert hit_of(blocks, [1, 2, 3]) == 0


@pytest.mark.parametrize("group", [KV, LATENT])
def test_full_attention_and_latents_hold_all_their_tokens(group: CacheGroup) -> None:
    assert blocks_of_sequence(group, 50, 8) == -(-50 // group.block_size)
    assert tokens_of_blocks(group, 3, 8) == 3 * group.block_size


def test_a_window_needs_a_bounded_number_of_blocks_however_long_the_sequence() -> None:
    """5 tokens before, 2 steps of 8 under way: 21 tokens in 6 blocks, and both ends may cut one."""
    assert blocks_of_sequence(SLIDING, 12, 8) == 3
    assert blocks_of_sequence(SLIDING, 64, 8) == 8
    assert tokens_of_blocks(SLIDING, 7, 8) == 28 and tokens_of_blocks(SLIDING, 8, 8) == 64
    assert tokens_of_blocks(STATE, 2, 8) == 0 and tokens_of_blocks(STATE, 3, 8) == 64
    blocks = manager(SLIDING, num_blocks=8)
    admit(blocks, 0, range(64))
    confirmed = 0
    for end in range(8, 65, 8):  # always one step ahead of what is confirmed
        assert blocks.grow(0, end)
        blocks.confirm(0, confirmed, np.arange(64, dtype=np.int32))
        confirmed = end
        blocks.check_integrity()
