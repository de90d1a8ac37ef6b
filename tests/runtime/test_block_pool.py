"""Block pool: in which order blocks are given out, what makes one findable, and that none is lost or shared wrongly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castiron.runtime.block_pool import BlockPool
from castiron.runtime.prefix_tree import PrefixNode, PrefixTree


def nodes_of(tree: PrefixTree, count: int) -> list[PrefixNode]:
    """`count` different prefixes, each held once by the test."""
    nodes = [tree.root(bytes([i]), bytes([i])) for i in range(count)]
    return [node for node in nodes if node is not None]


def test_empty_blocks_are_taken_first_then_cached_ones_least_recently_used_first() -> None:
    tree = PrefixTree(4)
    pool = BlockPool(6, tree.release)
    a, b, c = nodes_of(tree, 3)
    assert pool.take(5) == [0, 1, 2, 3, 4]
    assert pool.publish(0, a) and pool.publish(1, b) and pool.publish(2, c)
    pool.give_back([2, 3])
    pool.give_back([0, 1, 4])
    assert (pool.num_free, pool.num_cached) == (6, 3)
    assert pool.free_blocks() == [5, 3, 4, 2, 0, 1]
    pool.share(2)  # used again, and given back: now the most recently used
    pool.give_back([2])
    assert pool.take(5) == [5, 3, 4, 0, 1]
    assert (pool.find(a), pool.find(b), pool.find(c)) == (None, None, 2)
    pool.check_integrity([5, 3, 4, 0, 1])


def test_a_shared_block_is_free_only_when_its_last_user_gives_it_back() -> None:
    tree = PrefixTree(4)
    pool = BlockPool(2, tree.release)
    (node,) = nodes_of(tree, 1)
    (block,) = pool.take(1)
    pool.publish(block, node)
    pool.share(block)
    assert pool.ref_counts[block] == 2
    pool.give_back([block])
    assert pool.num_free == 1 and pool.take(1) == [1], "what another row uses isn't evicted"
    pool.give_back([block])
    assert pool.free_blocks() == [block]


def test_of_two_blocks_with_the_same_content_the_first_one_is_found() -> None:
    tree = PrefixTree(4)
    pool = BlockPool(2, tree.release)
    (node,) = nodes_of(tree, 1)
    pool.take(2)
    assert pool.publish(0, node) and not pool.publish(1, node)
    assert pool.find(node) == 0
    pool.give_back([1, 0])
    assert pool.free_blocks() == [1, 0] and pool.num_cached == 1


def test_an_evicted_blocks_prefix_is_forgotten() -> None:
    tree = PrefixTree(4)
    pool = BlockPool(1, tree.release)
    (node,) = nodes_of(tree, 1)
    pool.take(1)
    pool.publish(0, node)
    tree.release(node)  # the test's own hold
    pool.give_back([0])
    assert len(tree) == 1
    pool.take(1)
    assert len(tree) == 0


def test_a_slot_before_the_first_is_never_given_out() -> None:
    pool = BlockPool(3, PrefixTree(4).release, first_block=1)
    assert pool.num_blocks == pool.num_free == 2
    assert pool.take(2) == [1, 2]
    pool.check_integrity([1, 2])


def test_integrity_check_sees_blocks_lost_used_twice_and_free_while_used() -> None:
    pool = BlockPool(3, PrefixTree(4).release)
    pool.take(2)
    pool.check_integrity([0, 1])
    for uses in ([0], [0, 1, 1], [0, 1, 2], [0, 2]):
        with pytest.raises(AssertionError):
            pool.check_integrity(uses)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back([0, 0])


@given(st.integers(1, 7), st.lists(st.integers(-7, 7), max_size=60))
def test_pool_hands_out_empty_blocks_in_the_order_they_came_back(num_blocks: int, moves: list[int]) -> None:
    pool = BlockPool(num_blocks, PrefixTree(4).release)
    free, taken = list(range(num_blocks)), []
    for move in moves:
        if move >= 0:
            count = min(move, len(free))
            got = pool.take(count)
            assert got == free[:count]
            free, taken = free[count:], taken + got
        else:
            back, taken = taken[:-move], taken[-move:]
            pool.give_back(back)
            free += back
        assert pool.free_blocks() == free and pool.num_free == len(free)
        pool.check_integrity(taken)


_MOVES = st.lists(st.tuples(st.sampled_from(["take", "publish", "share", "give back"]), st.integers(0, 99)))


@given(st.integers(1, 6), _MOVES)
def test_cached_blocks_are_evicted_in_exact_order_of_last_use(
    num_blocks: int, moves: list[tuple[str, int]]
) -> None:
    """Against a model: lists of what is empty and what is cached, in order."""
    tree = PrefixTree(4)
    pool = BlockPool(num_blocks, tree.release)
    nodes = nodes_of(tree, 5)
    empty, cached = list(range(num_blocks)), []
    uses: list[int] = []
    content: dict[int, PrefixNode] = {}
    for name, number in moves:
        if name == "take" and empty + cached:
            source = empty or cached
            block = source.pop(0)
            content.pop(block, None)
            assert pool.take(1) == [block]
            uses.append(block)
        elif name == "publish" and set(uses) - content.keys():
            block = sorted(set(uses) - content.keys())[number % len(set(uses) - content.keys())]
            node = nodes[number % 5]
            is_new = node not in content.values()
            assert pool.publish(block, node) == is_new
            if is_new:
                content[block] = node
        elif name == "share" and content:
            block = sorted(content)[number % len(content)]
            pool.share(block)
            if block in cached:
                cached.remove(block)
            uses.append(block)
        elif name == "give back" and uses:
            block = uses.pop(number % len(uses))
            pool.give_back([block])
            if block not in uses:
                (cached if block in content else empty).append(block)
        assert pool.free_blocks() == empty + cached
        assert {node: pool.find(node) for node in content.values()} == {n: b for b, n in content.items()}
        pool.check_integrity(uses)
