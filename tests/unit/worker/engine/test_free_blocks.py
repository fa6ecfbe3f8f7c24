"""Unused blocks of the pool: which are reused first, and which a session retains."""

from __future__ import annotations

from worker.engine.blocks import BlockPool
from worker.engine.host_store import HostStore


def pool(num_blocks: int, retention_s: float = 10.0, max_retained: int = 100) -> BlockPool:
    return BlockPool(num_blocks, HostStore(0), retention_s, max_retained)


def turn(this: BlockPool, names: str, session: int = 0, known: int = 0) -> None:
    """Run a sequence whose block i has the hash ``names[i]``; ``known`` of them are hits."""
    hashes = [name.encode() for name in names]
    claimed = this.claim(hashes[:known])
    blocks = (*claimed, *this.allocate(len(names) - known))
    for index in range(known, len(names)):
        this.publish(blocks[index], hashes[index], index)
    this.free(blocks, session)
    this.check_integrity([])


def evicted(this: BlockPool) -> str:
    """Allocate all free blocks one by one; return the hashes in the order of their eviction."""
    names = []
    for _ in range(this.num_free):
        before = {*this._by_hash}
        this.allocate(1)
        names += [name.decode() for name in before - this._by_hash.keys()]
    return "".join(names)


def test_retained_blocks_are_evicted_last() -> None:
    this = pool(12)
    turn(this, "abc", session=1)
    turn(this, "def", session=2)
    turn(this, "xyz")
    assert this.num_free == 12
    assert evicted(this) == "zyx" + "cba" + "fed", "tails first, the oldest session first"


def test_retained_block_is_a_hit_and_is_not_evicted_in_use() -> None:
    this = pool(4)
    turn(this, "abc", session=1)
    used = this.claim([b"a", b"b"])
    assert evicted(this) == "c"
    this.check_integrity([used, [block for block in range(4) if block not in used]])
    this.free(used, 1)
    assert evicted(this) == "ba"


def test_retention_ends_after_its_time() -> None:
    this = pool(12, retention_s=10.0)
    turn(this, "ab", session=1)
    this.set_time(5.0)
    turn(this, "cd", session=2)
    turn(this, "xy")
    this.set_time(9.9)
    assert this._free.num_retained == 4
    this.set_time(10.0)
    assert this._free.num_retained == 2
    this.check_integrity([])
    assert evicted(this) == "ba" + "yx" + "dc"


def test_lapsed_blocks_have_the_age_of_their_last_use() -> None:
    this = pool(12, retention_s=10.0)
    turn(this, "xy")
    turn(this, "ab", session=1)
    turn(this, "uv")
    this.set_time(20.0)
    assert evicted(this) == "yx" + "ba" + "vu"


def test_retained_blocks_are_limited_to_their_share() -> None:
    this = pool(12, max_retained=4)
    turn(this, "abc", session=1)
    turn(this, "xy")
    turn(this, "def", session=2)
    assert this._free.num_retained == 4
    assert evicted(this) == "cb" + "yx" + "a" + "fed", "the older session loses its tail"


def test_session_above_the_share_retains_its_beginning() -> None:
    this = pool(12, max_retained=2)
    turn(this, "xy")
    turn(this, "abcd", session=1)
    turn(this, "uv")
    assert evicted(this) == "yx" + "dc" + "vu" + "ba"


def test_share_of_zero_evicts_as_without_sessions() -> None:
    orders = []
    for session in (0, 1):
        this = pool(12, max_retained=0)
        turn(this, "abc", session)
        turn(this, "xy")
        turn(this, "ab", known=2)
        turn(this, "de", session and 2)
        orders.append(evicted(this))
    assert orders == ["cyxbaed"] * 2


def test_new_turn_refreshes_all_blocks_of_its_session() -> None:
    this = pool(16, retention_s=10.0)
    turn(this, "abcd", session=1)
    turn(this, "ef", session=2)
    this.set_time(8.0)
    turn(this, "abg", session=1, known=2)
    this.set_time(15.0)
    turn(this, "xy")
    assert evicted(this) == "fe" + "yx" + "dc" + "gba", "session 2 is over, session 1 is not"


def test_shared_block_belongs_to_the_last_session() -> None:
    this = pool(16, retention_s=10.0)
    turn(this, "ab", session=1)
    this.set_time(5.0)
    turn(this, "ac", session=2, known=1)
    this.set_time(12.0)
    turn(this, "xy")
    assert evicted(this) == "b" + "yx" + "ca"


def test_use_without_session_returns_a_block_to_its_session() -> None:
    this = pool(16)
    turn(this, "ab", session=1)
    turn(this, "ac", known=1)
    assert evicted(this) == "c" + "ba"


def test_lapsed_session_takes_no_block_back() -> None:
    this = pool(16, retention_s=10.0)
    turn(this, "ab", session=1)
    this.set_time(11.0)
    turn(this, "xy")
    turn(this, "ac", known=1)
    assert this._free.num_retained == 0
    assert evicted(this) == "b" + "yx" + "ca"


def test_reused_block_has_no_session() -> None:
    this = pool(2)
    turn(this, "ab", session=1)
    turn(this, "xy")
    turn(this, "c", session=1)
    assert this._free.num_retained == 1
    turn(this, "y", known=0)
    assert this._free.num_retained == 1
    this.check_integrity([])


def test_invalidated_retained_block_is_reused_first() -> None:
    this = pool(4)
    turn(this, "abc", session=1)
    turn(this, "x")
    this.invalidate_content(b"b")
    this.check_integrity([])
    assert (this._free.num_retained, this.num_cached) == (2, 3)
    (block,) = this.allocate(1)
    assert {b"a", b"c", b"x"} == {*this._by_hash}
    this.check_integrity([(block,)])
