"""Blocks of preempted sequences in host memory."""

from __future__ import annotations

import pytest

from worker.engine.host_store import HostStore
from worker.engine.plan import BlockCopy

A, B, C = b"a", b"b", b"c"


def kept(num_host_blocks: int, *hashes: bytes) -> HostStore:
    """Return a store that has saved ``hashes``, all of them needed, in this order."""
    this = HostStore(num_host_blocks)
    this.mark_needed(hashes)
    for block, block_hash in enumerate(hashes):
        this.evicted(block, block_hash, ends_chunk=False)
    this.commit_copies()
    return this


def test_host_store_saves_needed_block_once() -> None:
    this = HostStore(3)
    this.mark_needed([A, B])
    for block, block_hash in ((5, A), (6, C), (7, A)):
        this.evicted(block, block_hash, ends_chunk=False)
    ((copy,), loads) = this.planned_copies()
    assert (copy.block, loads) == (5, ())
    assert A in this and B not in this and C not in this
    this.commit_copies()
    assert this.planned_copies() == ((), ())
    this.evicted(5, A, ends_chunk=False)
    assert this.planned_copies() == ((), ()), "it is kept already"
    this.check_integrity(needed=[A, B])


def test_host_store_without_places_keeps_nothing() -> None:
    this = kept(0, A)
    assert A not in this
    this.unmark_needed([A])
    this.check_integrity([])


def test_host_store_load_keeps_place() -> None:
    this = kept(2, A)
    this.pin(A)
    this.load(A, 9)
    (_, (copy,)) = this.planned_copies()
    assert copy.block == 9
    this.commit_copies()
    this.pin(A)
    this.load(A, 4)
    assert this.planned_copies() == ((), (BlockCopy(4, copy.host_block),))
    this.discard_copies()
    assert A in this, "a load changes no place"
    this.check_integrity([A])


def test_host_store_reuses_least_recently_used_place() -> None:
    this = kept(2, A, B)
    this.pin(A)
    this.load(A, 9)
    this.commit_copies()
    this.mark_needed([C])
    this.evicted(3, C, ends_chunk=False)
    this.commit_copies()
    assert A in this and B not in this and C in this
    this.check_integrity([A, B, C])


def test_host_store_drops_unneeded_then_later_blocks() -> None:
    this = kept(3, A, B, C)
    this.unmark_needed([B, C])
    this.mark_needed([b"d", b"e"])
    this.evicted(3, b"d", ends_chunk=False)
    assert A in this and B in this and C not in this
    this.evicted(4, b"e", ends_chunk=False)
    assert A in this and B not in this
    this.commit_copies()
    this.check_integrity([A, b"d", b"e"])


def test_host_store_drops_unneeded_loaded_block_first() -> None:
    this = kept(2, A, B)
    this.unmark_needed([B])
    this.pin(B)
    this.load(B, 9)
    this.commit_copies()
    this.mark_needed([C])
    this.evicted(3, C, ends_chunk=False)
    assert A in this and B not in this


def test_host_store_counts_needs_per_block() -> None:
    this = HostStore(1)
    this.mark_needed([A])
    this.mark_needed([A])
    this.unmark_needed([A])
    this.evicted(0, A, ends_chunk=False)
    assert A in this
    this.commit_copies()
    this.check_integrity([A])


def test_host_store_never_saves_to_a_place_being_loaded() -> None:
    this = kept(1, A)
    this.pin(A)
    this.mark_needed([B])
    this.evicted(5, B, ends_chunk=False)
    this.load(A, 6)
    assert this.planned_copies() == ((), (BlockCopy(6, 0),))
    this.commit_copies()
    assert A in this and B not in this
    this.check_integrity([A, B])


def test_host_store_place_is_saved_to_once_per_step() -> None:
    this = HostStore(1)
    this.mark_needed([A, B])
    this.evicted(5, A, ends_chunk=False)
    this.evicted(6, B, ends_chunk=False)
    assert this.planned_copies() == ((BlockCopy(5, 0),), ())
    this.commit_copies()
    assert A in this and B not in this


def test_host_store_loads_block_saved_in_same_step() -> None:
    this = HostStore(1)
    this.mark_needed([A])
    this.evicted(5, A, ends_chunk=False)
    this.pin(A)
    this.load(A, 6)
    assert this.planned_copies() == ((BlockCopy(5, 0),), (BlockCopy(6, 0),))


def test_host_store_discards_saves_of_failed_step() -> None:
    this = kept(2, A)
    this.mark_needed([B, C])
    this.evicted(5, B, ends_chunk=False)
    this.evicted(6, C, ends_chunk=False)
    assert B in this and C in this and A not in this
    this.discard_copies()
    assert {A, B, C}.isdisjoint(h for h in (A, B, C) if h in this)
    this.check_integrity([A, B, C])
    this.evicted(5, B, ends_chunk=False)
    assert B in this, "the place is free again"


def test_host_store_invalidate_all_keeps_needs() -> None:
    this = kept(2, A, B)
    this.invalidate_all()
    assert A not in this and B not in this
    this.check_integrity([A, B])
    for block, block_hash in enumerate((A, B)):
        this.evicted(block, block_hash, ends_chunk=False)
    this.commit_copies()
    assert A in this and B in this


def test_host_store_ignores_step_planned_before_reset() -> None:
    this = kept(3, A)
    this.mark_needed([B])
    this.evicted(5, B, ends_chunk=False)
    this.pin(A)
    this.load(A, 6)
    this.invalidate_all()
    assert A not in this and B not in this
    this.discard_copies()
    this.check_integrity([A, B])


@pytest.mark.parametrize(
    "damage", ["copies are still planned", "a host block is lost", "needed blocks"]
)
def test_host_store_integrity_check_detects_damage(damage: str) -> None:
    this = kept(2, A)
    match damage:
        case "copies are still planned":
            this.pin(A)
        case "a host block is lost":
            this._free.append(this._stored[A])
        case "needed blocks":
            this.mark_needed([B])
    with pytest.raises(AssertionError, match=damage):
        this.check_integrity([A])


def changes(this: HostStore) -> dict[bytes, bool]:
    return dict(this.take_chunk_changes())


def test_host_store_reports_chunks_that_it_saves_and_drops() -> None:
    this = HostStore(1)
    this.mark_needed([A, B, C])
    this.evicted(0, A, ends_chunk=True)
    this.commit_copies()
    assert changes(this) == {A: True}
    this.evicted(1, B, ends_chunk=False)
    this.commit_copies()
    assert changes(this) == {A: False}, "B has its place, and ends no chunk"
    this.evicted(2, C, ends_chunk=True)
    this.discard_copies()
    assert changes(this) == {C: False}, "the step was not executed"
    assert changes(this) == {}


def test_host_store_reports_invalidated_chunks() -> None:
    this = HostStore(2)
    this.mark_needed([A, B])
    for block, block_hash in enumerate([A, B]):
        this.evicted(block, block_hash, ends_chunk=True)
    this.commit_copies()
    assert changes(this) == {A: True, B: True}
    this.invalidate(A)
    this.invalidate_all()
    assert changes(this) == {A: False, B: False}
