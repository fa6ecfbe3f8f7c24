"""The block pool."""

import pytest

from worker.blocks import BlockPool

A, B, C = b"a", b"b", b"c"


def test_blocks_are_handed_out_in_order_of_their_last_use() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == (0, 1, 2)
    for block, block_hash in ((0, A), (1, B), (2, C)):
        pool.register(block, block_hash)
    pool.free((1,))
    pool.free((0, 2))
    assert pool.allocate(4) == (3, 1, 2, 0), "never used, freed first, then a tail before its head"


def test_a_freed_block_is_found_until_somebody_needs_it() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.register(0, A)
    pool.register(1, B)
    pool.free((0, 1))
    assert (pool.lookup(A), pool.lookup(B)) == (0, 1)
    pool.allocate(1)
    assert (pool.lookup(A), pool.lookup(B)) == (0, None)
    pool.check_integrity([(1,)])


def test_a_block_without_a_hash_is_taken_before_any_with_one() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.register(0, A)
    pool.free((0,))
    pool.free((1, 2))
    assert pool.allocate(2) == (1, 2)
    assert pool.lookup(A) == 0


def test_sharing_takes_a_block_from_the_free_ones_and_counts_its_users() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.register(0, A)
    pool.free((0,))
    pool.share(0)
    pool.share(0)
    assert (pool.num_free, pool.num_used) == (1, 1)
    pool.check_integrity([(0,), (0,)])
    pool.free((0,))
    assert not pool.is_free(0)
    pool.free((0,))
    assert pool.is_free(0)
    pool.check_integrity([])


def test_of_two_blocks_with_the_same_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.register(0, A)
    pool.register(1, A)
    assert pool.lookup(A) == 0
    pool.check_integrity([(0,), (1,)])
    pool.free((0,))
    pool.free((1,))
    assert pool.allocate(2) == (1, 0)
    assert pool.lookup(A) is None


def test_registering_a_block_again_changes_nothing() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.register(0, A)
    pool.register(0, A)
    pool.check_integrity([(0,)])


@pytest.mark.parametrize("tables", [[], [(0, 1)], [(0,), (0,)], [(1,)]])
def test_the_books_are_compared_with_the_tables(tables: list[tuple[int, ...]]) -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


def test_a_wrong_hash_map_is_noticed() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.register(0, A)
    pool._by_hash[B] = 1
    with pytest.raises(AssertionError, match="hash map"):
        pool.check_integrity([(0,)])
