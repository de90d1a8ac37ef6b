"""Block manager: which blocks a row gets, in which order they come back, and that none is lost or shared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castiron.runtime.block_manager import BlockManager, BlockPool
from castiron.runtime.errors import EngineFormatError
from castiron.runtime.step_abi import CacheGroup

KV = CacheGroup("kv", "paged", block_size=4, table_width=8)


def manager(num_blocks: int, max_rows: int = 3) -> BlockManager:
    return BlockManager((KV,), {"kv": num_blocks}, max_rows)


def table(blocks: BlockManager, row: int) -> list[int]:
    return blocks.groups[0].block_tables[row].tolist()


def test_a_row_gets_blocks_only_as_it_grows() -> None:
    blocks = manager(8)
    assert blocks.grow(0, 1)
    assert table(blocks, 0) == [0, -1, -1, -1, -1, -1, -1, -1]
    assert blocks.grow(0, 4) and blocks.num_free_blocks == 7
    assert blocks.grow(1, 5)
    assert blocks.grow(0, 5)
    assert table(blocks, 0)[:3] == [0, 3, -1] and table(blocks, 1)[:3] == [1, 2, -1]
    blocks.check_integrity()


def test_freed_blocks_are_reused_oldest_first() -> None:
    blocks = manager(5)
    assert blocks.grow(0, 8) and blocks.grow(1, 8)
    blocks.release(1)  # 2, 3 behind 4
    blocks.release(0)  # 0, 1 behind 3
    assert blocks.grow(2, 20)
    assert table(blocks, 2)[:5] == [4, 2, 3, 0, 1]
    blocks.check_integrity()


def test_growth_that_does_not_fit_changes_nothing() -> None:
    blocks = manager(3)
    assert blocks.grow(0, 8)
    before = blocks.groups[0].block_tables.copy()
    assert not blocks.grow(1, 8)
    assert np.array_equal(before, blocks.groups[0].block_tables) and blocks.num_free_blocks == 1
    assert blocks.grow(1, 4) and blocks.num_free_blocks == 0
    blocks.check_integrity()


def test_released_rows_have_empty_tables() -> None:
    blocks = manager(4)
    assert blocks.grow(1, 16)
    blocks.release(1)
    assert table(blocks, 1) == [-1] * 8 and blocks.num_free_blocks == 4
    blocks.release(1)  # owning nothing, it gives nothing back
    blocks.check_integrity()


def test_a_row_grows_in_every_group_or_in_none() -> None:
    wide = CacheGroup("wide", "paged", block_size=16, table_width=2)
    blocks = BlockManager((KV, wide), {"kv": 8, "wide": 1}, 2)
    assert blocks.grow(0, 16)
    assert not blocks.grow(1, 4)  # a kv block is free, a wide one isn't
    assert blocks.num_free_blocks == 4
    blocks.check_integrity()
    blocks.release(0)
    assert blocks.grow(1, 4) and blocks.groups[1].block_tables[1].tolist() == [0, -1]
    blocks.check_integrity()


def test_admission_counts_blocks_promised_to_growing_rows() -> None:
    blocks = manager(6)
    assert blocks.grow(0, 4)
    assert blocks.can_admit(20, [])
    assert not blocks.can_admit(21, [])
    assert blocks.can_admit(12, [(0, 12)])  # two more are promised to row 0
    assert not blocks.can_admit(13, [(0, 12)])


def test_a_state_group_is_refused_by_name() -> None:
    with pytest.raises(EngineFormatError, match="cache group gdn is of kind state"):
        BlockManager((CacheGroup("gdn", "state", 1, 1),), {"gdn": 2}, 1)


def test_integrity_check_sees_a_block_owned_twice_and_a_lost_block() -> None:
    blocks = manager(4)
    assert blocks.grow(0, 8)
    blocks.groups[0].block_tables[0, 1] = 0
    with pytest.raises(AssertionError, match="owned twice"):
        blocks.check_integrity()
    blocks.groups[0].block_tables[0, 1] = -1
    with pytest.raises(AssertionError):
        blocks.check_integrity()


@given(st.integers(1, 7), st.lists(st.integers(-7, 7), max_size=60))
def test_pool_hands_out_blocks_in_the_order_they_came_back(num_blocks: int, moves: list[int]) -> None:
    pool = BlockPool(num_blocks)
    free, taken = list(range(num_blocks)), []
    for move in moves:
        if move >= 0:
            count = min(move, len(free))
            got = pool.take(count).tolist()
            assert got == free[:count]
            free, taken = free[count:], taken + got
        else:
            back, taken = taken[:-move], taken[-move:]
            pool.give_back(np.array(back, np.int32))
            free += back
        assert pool.free_blocks().tolist() == free and pool.num_free == len(free)
