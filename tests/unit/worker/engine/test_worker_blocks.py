"""The block pool."""

from __future__ import annotations

import pytest

from worker.engine.blocks import BlockPool

A, B, C = b"a", b"b", b"c"


class Shelf:
    """Host store that contains ``kept``, and records its calls."""

    def __init__(self, *kept: bytes) -> None:
        self.kept = {*kept}
        self.calls: list[tuple[object, ...]] = []

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.kept

    def evicted(self, block: int, block_hash: bytes, *, ends_chunk: bool) -> None:
        self.calls.append(("evicted", block, block_hash))

    def pin(self, block_hash: bytes) -> None:
        self.calls.append(("pin", block_hash))

    def load(self, block_hash: bytes, block: int) -> None:
        self.calls.append(("load", block_hash, block))


def pool(num_blocks: int, store: Shelf | None = None) -> BlockPool:
    return BlockPool(num_blocks, store or Shelf())


def test_block_pool_allocates_least_recently_used_first() -> None:
    this = pool(4)
    assert this.allocate(3) == (0, 1, 2)
    for block, block_hash in ((0, A), (1, B), (2, C)):
        this.publish(block, block_hash, 0)
    this.free((1,))
    this.free((0, 2))
    assert this.allocate(4) == (3, 1, 2, 0), "never used, freed first, then a tail before its head"


def test_freed_block_is_a_hit_until_reallocated() -> None:
    this = pool(2)
    this.allocate(2)
    this.publish(0, A, 0)
    this.publish(1, B, 0)
    this.free((0, 1))
    assert A in this and B in this
    this.allocate(1)
    assert A in this and B not in this
    this.check_integrity([(1,)])


def test_block_pool_allocates_unhashed_blocks_first() -> None:
    this = pool(3)
    this.allocate(3)
    this.publish(0, A, 0)
    this.free((0,))
    this.free((1, 2))
    assert this.allocate(2) == (1, 2)
    assert A in this


def test_claim_takes_a_free_block_and_counts_users() -> None:
    this = pool(2)
    this.allocate(1)
    this.publish(0, A, 0)
    this.free((0,))
    assert not this.is_used(A)
    assert (this.claim([A]), this.claim([A])) == ((0,), (0,))
    assert this.is_used(A)
    assert (this.num_free, this.num_used) == (1, 1)
    this.check_integrity([(0,), (0,)])
    this.free((0,))
    assert this.is_used(A)
    this.free((0,))
    assert not this.is_used(A)
    this.check_integrity([])


def test_block_pool_finds_first_of_duplicate_blocks() -> None:
    this = pool(2)
    this.allocate(2)
    this.publish(0, A, 0)
    this.publish(1, A, 0)
    assert this.claim([A]) == (0,)
    this.check_integrity([(0,), (1,), (0,)])
    this.free((0,))
    this.free((0,))
    this.free((1,))
    assert this.allocate(2) == (1, 0)
    assert A not in this


def test_block_publish_is_idempotent() -> None:
    this = pool(1)
    this.allocate(1)
    this.publish(0, A, 0)
    this.publish(0, A, 0)
    this.check_integrity([(0,)])


def test_unpublished_block_is_not_found() -> None:
    this = pool(3)
    this.allocate(3)
    this.publish(0, A, 0)
    this.publish(1, B, 0)
    for block in (0, 2):
        this.unpublish(block)
    assert A not in this and B in this
    this.check_integrity([(0, 1, 2)])
    this.free((0, 1, 2))
    assert this.allocate(3) == (0, 2, 1), "as if it had never been hashed"


def test_block_pool_notifies_store_of_eviction() -> None:
    shelf = Shelf()
    this = pool(2, shelf)
    this.allocate(2)
    this.publish(1, A, 0)
    this.free((0, 1))
    this.allocate(2)
    assert shelf.calls == [("evicted", 1, A)], "block 0 held nothing of a name"


def test_block_claim_loads_from_store() -> None:
    shelf = Shelf(B, C)
    this = pool(4, shelf)
    this.allocate(2)
    this.publish(1, A, 0)
    this.free((1,))
    assert C in this and not this.is_used(C)
    assert this.claim([A, B, C]) == (1, 2, 3)
    assert shelf.calls == [("pin", C), ("pin", B), ("load", B, 2), ("load", C, 3)]
    assert this.is_used(C)
    assert this.claim([B]) == (2,), "it is here now"
    this.check_integrity([(0,), (1, 2, 3), (2,)])


def test_block_claim_loads_into_no_block_it_hits() -> None:
    this = pool(2, Shelf(A))
    this.allocate(2)
    this.publish(0, B, 0)
    this.publish(1, C, 0)
    this.free((0, 1))
    assert this.claim([A, C]) == (0, 1)
    assert this.claim([C]) == (1,)


@pytest.mark.parametrize("tables", [[], [(0, 1)], [(0,), (0,)], [(1,)]])
def test_block_pool_integrity_check_compares_tables(tables: list[tuple[int, ...]]) -> None:
    this = pool(2)
    this.allocate(1)
    with pytest.raises(AssertionError):
        this.check_integrity(tables)


def test_block_pool_integrity_check_detects_wrong_hash_map() -> None:
    this = pool(2)
    this.allocate(1)
    this.publish(0, A, 0)
    this._by_hash[B] = 1
    with pytest.raises(AssertionError, match="hash map"):
        this.check_integrity([(0,)])
