"""Block manager: which blocks a row gets, what of it is found again, and in which order blocks are reused."""

from collections.abc import Sequence

import numpy as np
import pytest

from castiron.runtime import block_hash
from castiron.runtime.block_hash import Domains
from castiron.runtime.block_manager import BlockManager, PrefixHit, PrefixKeys
from castiron.runtime.errors import EngineFormatError
from castiron.runtime.step_abi import CacheGroup

KV = CacheGroup("kv", "paged", block_size=4, table_width=8)


def manager(num_blocks: int, max_rows: int = 3, groups: tuple[CacheGroup, ...] = (KV,)) -> BlockManager:
    return BlockManager(groups, {g.name: num_blocks for g in groups}, max_rows, domains=(("engine", b"e"),))


def table(blocks: BlockManager, row: int) -> list[int]:
    return [block for block in blocks.paged[0].block_tables[row].tolist() if block >= 0]


def lookup(
    blocks: BlockManager, tokens: Sequence[int], domains: Domains = ()
) -> tuple[PrefixKeys | None, PrefixHit]:
    keys = blocks.new_keys(domains)
    return keys, blocks.lookup(keys, np.array(tokens, np.int32))


def fits(
    blocks: BlockManager, num_tokens: int, *promised: tuple[int, int], hit: PrefixHit | None = None
) -> bool:
    (needed,), (left,) = blocks.num_needed(num_tokens, hit or PrefixHit()), blocks.left_beside(promised)
    return needed <= left


def start(blocks: BlockManager, row: int, tokens: Sequence[int], domains: Domains = ()) -> int:
    """Admit a row with room for its tokens; how many are cached."""
    keys, hit = lookup(blocks, tokens, domains)
    assert fits(blocks, len(tokens), hit=hit)
    blocks.admit(row, keys, hit)
    assert blocks.grow(row, len(tokens))
    blocks.check_integrity()
    return hit.num_tokens


def compute(blocks: BlockManager, row: int, tokens: Sequence[int], domains: Domains = ()) -> int:
    """Admit a row and confirm all its tokens; how many were cached."""
    num_cached = start(blocks, row, tokens, domains)
    blocks.confirm(row, len(tokens), np.array(tokens, np.int32))
    blocks.check_integrity()
    return num_cached


def test_a_row_gets_blocks_only_as_it_grows() -> None:
    blocks = manager(8)
    assert blocks.grow(0, 1)
    assert blocks.paged[0].block_tables[0].tolist() == [0, -1, -1, -1, -1, -1, -1, -1]
    assert blocks.grow(0, 4) and blocks.num_free_blocks == 7
    assert blocks.grow(1, 5)
    assert blocks.grow(0, 5)
    assert table(blocks, 0) == [0, 3] and table(blocks, 1) == [1, 2]
    blocks.check_integrity()


def test_freed_blocks_are_reused_oldest_first_a_rows_last_one_first() -> None:
    blocks = manager(5)
    assert blocks.grow(0, 8) and blocks.grow(1, 8)
    blocks.release(1)
    blocks.release(0)
    assert blocks.grow(2, 20)
    assert table(blocks, 2) == [4, 3, 2, 1, 0]
    blocks.check_integrity()


def test_growth_that_does_not_fit_changes_nothing() -> None:
    blocks = manager(3)
    assert blocks.grow(0, 8)
    before = blocks.paged[0].block_tables.copy()
    assert not blocks.grow(1, 8)
    assert np.array_equal(before, blocks.paged[0].block_tables) and blocks.num_free_blocks == 1
    assert blocks.grow(1, 4) and blocks.num_free_blocks == 0
    blocks.check_integrity()


def test_released_rows_have_empty_tables() -> None:
    blocks = manager(4)
    assert blocks.grow(1, 16)
    blocks.release(1)
    assert table(blocks, 1) == [] and blocks.num_free_blocks == 4
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
    assert blocks.grow(1, 4) and blocks.paged[1].block_tables[1].tolist() == [0, -1]
    blocks.check_integrity()


def test_admission_counts_blocks_promised_to_growing_rows() -> None:
    blocks = manager(6)
    assert blocks.grow(0, 4)
    assert blocks.left_beside([]) == (5,)
    assert blocks.left_beside([(0, 12)]) == (3,), "two more are promised to row 0"
    assert fits(blocks, 20) and not fits(blocks, 21)
    assert fits(blocks, 12, (0, 12)) and not fits(blocks, 13, (0, 12))


def test_an_unknown_group_is_refused_by_name() -> None:
    with pytest.raises(EngineFormatError, match="cache group disk is of kind tape"):
        manager(2, groups=(CacheGroup("disk", "tape", 1, 1),))


def test_a_released_rows_full_blocks_are_found_and_its_partial_one_is_not() -> None:
    blocks = manager(8)
    assert compute(blocks, 0, range(10)) == 0
    blocks.release(0)
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (8, 2)
    assert start(blocks, 1, [*range(10), 77]) == 8
    assert table(blocks, 1) == [0, 1, 3]


def test_a_row_shares_the_blocks_of_one_that_still_runs() -> None:
    blocks = manager(8)
    compute(blocks, 0, range(9))
    assert start(blocks, 1, [*range(8), 50, 51]) == 8
    assert table(blocks, 0) == [0, 1, 2] and table(blocks, 1) == [0, 1, 3]
    assert blocks.num_free_blocks == 4
    blocks.release(0)
    assert blocks.num_free_blocks == 5 and blocks.num_cached_blocks == 0, "row 1 still uses both"
    blocks.release(1)
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (8, 2)
    blocks.check_integrity()


@pytest.mark.parametrize(
    ("length", "hit"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_a_hit_leaves_at_least_one_token_to_compute(length: int, hit: int) -> None:
    blocks = manager(16)
    compute(blocks, 0, range(16))
    assert lookup(blocks, range(length))[1].num_tokens == hit


def test_nothing_is_found_before_it_is_confirmed() -> None:
    blocks = manager(8)
    start(blocks, 0, range(8))
    assert lookup(blocks, range(9))[1].num_tokens == 0
    blocks.confirm(0, 7, np.arange(8, dtype=np.int32))
    assert lookup(blocks, range(9))[1].num_tokens == 4
    blocks.confirm(0, 8, np.arange(8, dtype=np.int32))
    assert lookup(blocks, range(9))[1].num_tokens == 8


def test_another_salt_or_domain_finds_nothing() -> None:
    blocks = manager(16)
    compute(blocks, 0, range(9), (("cache_salt", b"X"),))
    assert lookup(blocks, range(9), (("cache_salt", b"X"),))[1].num_tokens == 8
    for domains in ((), (("cache_salt", b"Y"),), (("adapter", b"X"),)):
        assert lookup(blocks, range(9), domains)[1].num_tokens == 0
    other_engine = BlockManager((KV,), {"kv": 4}, 2, domains=(("engine", b"f"),))
    mine, others = blocks.new_keys(()), other_engine.new_keys(())
    assert mine is not None and others is not None and mine.by_tree != others.by_tree


def test_eviction_takes_the_end_of_the_least_recently_used_prefix_first() -> None:
    blocks = manager(6)
    compute(blocks, 0, range(8))  # 0, 1
    compute(blocks, 1, range(100, 108))  # 2, 3
    blocks.release(0)
    blocks.release(1)
    assert lookup(blocks, range(9))[1].num_tokens == 8, "looking is not using"
    assert start(blocks, 0, range(200, 212)) == 0
    assert table(blocks, 0) == [4, 5, 1]
    assert lookup(blocks, range(9))[1].num_tokens == 4 and lookup(blocks, range(100, 109))[1].num_tokens == 8
    assert start(blocks, 1, [*range(100, 108), 7]) == 8
    assert table(blocks, 1) == [2, 3, 0]
    assert lookup(blocks, range(9))[1].num_tokens == 0


def test_a_prefix_used_again_is_evicted_later() -> None:
    blocks = manager(4)
    compute(blocks, 0, range(4))
    compute(blocks, 1, range(100, 104))
    blocks.release(0)
    blocks.release(1)
    assert start(blocks, 0, range(5)) == 4
    blocks.release(0)
    assert start(blocks, 2, range(200, 212)) == 0
    assert table(blocks, 2) == [3, 2, 1], "block 0 was used last"
    assert lookup(blocks, range(5))[1].num_tokens == 4 and lookup(blocks, range(100, 105))[1].num_tokens == 0


def test_blocks_that_rows_use_are_never_evicted() -> None:
    blocks = manager(5)
    compute(blocks, 0, range(8))
    assert start(blocks, 1, range(9)) == 8
    blocks.release(0)
    assert blocks.grow(0, 8)
    assert not blocks.grow(2, 1), "all others are used"
    assert table(blocks, 1)[:2] == [0, 1] and lookup(blocks, range(9))[1].num_tokens == 8
    blocks.check_integrity()


def test_a_hit_on_free_blocks_counts_as_taking_them() -> None:
    blocks = manager(3)
    compute(blocks, 0, range(8))
    blocks.release(0)
    hit = lookup(blocks, range(9))[1]
    assert hit.num_tokens == 8
    assert fits(blocks, 12, hit=hit) and not fits(blocks, 13, hit=hit)
    assert blocks.grow(1, 1)
    assert not fits(blocks, 9, hit=hit), "two cached ones and a fresh one, of two that are free"
    compute(blocks, 2, range(4))  # holds the first
    assert not fits(blocks, 9, hit=hit)


def test_of_rows_that_compute_the_same_one_publishes() -> None:
    blocks = manager(8)
    for row in (0, 1):
        start(blocks, row, range(8))
    for row in (1, 0):
        blocks.confirm(row, 8, np.arange(8, dtype=np.int32))
        blocks.check_integrity()
    assert start(blocks, 2, range(9)) == 8
    assert table(blocks, 2)[:2] == table(blocks, 1) == [2, 3]
    blocks.release(0)
    assert blocks.paged[0].pool.free_blocks()[-2:] == [1, 0] and blocks.num_cached_blocks == 0


def test_what_a_running_row_is_computing_is_known_to_come() -> None:
    blocks = manager(16)
    start(blocks, 0, range(14))  # three full blocks to come
    keys, hit = lookup(blocks, range(20))
    assert hit.num_tokens == 0 and blocks.num_coming_tokens(keys, hit, 20) == 12
    assert blocks.num_coming_tokens(keys, hit, 12) == 8, "a hit leaves a token"
    blocks.confirm(0, 5, np.arange(14, dtype=np.int32))
    keys, hit = lookup(blocks, range(20))
    assert hit.num_tokens == 4 and blocks.num_coming_tokens(keys, hit, 20) == 8
    blocks.release(0)
    assert blocks.num_coming_tokens(keys, hit, 20) == 0


def test_without_a_prefix_cache_nothing_is_found() -> None:
    blocks = BlockManager((KV,), {"kv": 4}, 2)
    assert blocks.new_keys((("cache_salt", b"X"),)) is None
    blocks.admit(0, None, blocks.lookup(None, np.arange(8, dtype=np.int32)))
    assert blocks.grow(0, 8)
    blocks.confirm(0, 8, np.arange(8, dtype=np.int32))
    blocks.release(0)
    assert blocks.num_cached_blocks == 0 and blocks.num_free_blocks == 4
    blocks.check_integrity()


@pytest.mark.parametrize("num_keys", [1, 2, 3])
def test_colliding_hashes_never_give_a_row_blocks_of_other_tokens(
    monkeypatch: pytest.MonkeyPatch, num_keys: int
) -> None:
    """Whatever is found must be what a cache without collisions would have given, or less."""

    def colliding(parent: bytes, tokens: bytes) -> bytes:
        return bytes([(sum(tokens) + sum(parent)) % num_keys])

    monkeypatch.setattr(block_hash, "block_key", colliding)
    blocks = manager(24)
    random = np.random.default_rng(0)
    content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    num_hits = 0
    for number in range(200):
        tokens = random.integers(0, 2, 9).tolist() if number % 2 else [0] * 9
        row = number % 3
        blocks.release(row)
        num_cached = start(blocks, row, tokens)
        num_hits += num_cached > 0
        for place, block in enumerate(table(blocks, row)):
            prefix = tuple(tokens[: 4 * (place + 1)])
            if 4 * (place + 1) <= num_cached:
                assert content[block] == prefix
            content[block] = prefix
        blocks.confirm(row, 9, np.array(tokens, np.int32))
        blocks.check_integrity()
    assert num_hits > 10


def test_a_row_whose_key_is_taken_is_no_longer_expected_to_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "block_key", lambda parent, tokens: b"%d" % len(parent))
    blocks = manager(12)
    compute(blocks, 0, range(4))
    start(blocks, 1, range(100, 112))
    blocks.confirm(1, 12, np.arange(100, 112, dtype=np.int32))
    keys, hit = lookup(blocks, range(100, 112))
    assert (hit.num_tokens, blocks.num_coming_tokens(keys, hit, 12)) == (0, 0)
    blocks.check_integrity()


def test_integrity_check_sees_a_wrong_table_and_a_lost_block() -> None:
    blocks = manager(4)
    assert blocks.grow(0, 8)
    blocks.paged[0].block_tables[0, 1] = 0
    with pytest.raises(AssertionError):
        blocks.check_integrity()
    blocks.paged[0].block_tables[0, 1] = -1
    with pytest.raises(AssertionError, match="hole"):
        blocks.check_integrity()
