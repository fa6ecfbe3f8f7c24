"""The blocks of the paged KV cache: who uses them, and which of them hold a known prefix. Pure.

    free, no hash  --allocate-->  used  --register-->  used, hashed
         ^                         |                     |     ^
         |                        free                  free  claim
         |                         v                     v     |
         +------------------ free, no hash         free, hashed --allocate--> used

A freed block keeps its content and its hash until it is the least recently freed one and somebody
needs a block; then ``store`` may keep the content elsewhere. The pool knows block ids and hashes,
never tokens or tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol


class BlockStore(Protocol):
    """A second tier, below the pool."""

    def __contains__(self, block_hash: bytes) -> bool: ...

    def evicted(self, block: int, block_hash: bytes) -> None:
        """``block``, which holds what ``block_hash`` names, is about to be overwritten."""
        ...

    def pin(self, block_hash: bytes) -> None:
        """If it is here, it must stay until it is loaded."""
        ...

    def load(self, block_hash: bytes, block: int) -> None:
        """``block`` gets what is pinned."""
        ...

    def forget(self, block_hash: bytes) -> None:
        """Between steps: what is kept under it is not what it names."""
        ...


class BlockPool:
    """``num_blocks`` blocks with ids from 0. Every operation is O(1) a block."""

    def __init__(self, num_blocks: int, store: BlockStore) -> None:
        self._store = store
        self._users = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        #: the next one to be taken first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_cached = 0

    @property
    def num_blocks(self) -> int:
        return len(self._users)

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, with or without a hash."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and that have a hash."""
        return self._num_cached

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether what ``block_hash`` names can be claimed."""
        return block_hash in self._by_hash or block_hash in self._store

    def is_used(self, block_hash: bytes) -> bool:
        """Whether somebody uses a block of this content: another user takes none of the free."""
        block = self._by_hash.get(block_hash)
        return block is not None and self._users[block] > 0

    def claim(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Blocks that hold what ``hashes`` name, with one more user each: those that are here, and
        others that the store loads. All can be claimed, and there are enough free ones."""
        # Whatever is there already is held first, lest a load be given its block or its place. The
        # tail goes first, as in free().
        held = [self._share(block_hash) for block_hash in reversed(hashes)]
        return tuple(
            self._load(block_hash) if block is None else block
            for block, block_hash in zip(reversed(held), hashes, strict=True)
        )

    def _share(self, block_hash: bytes) -> int | None:
        block = self._by_hash.get(block_hash)
        if block is None:
            self._store.pin(block_hash)
            return None
        if block in self._free:
            del self._free[block]
            self._num_cached -= 1
        self._users[block] += 1
        return block

    def _load(self, block_hash: bytes) -> int:
        block = self._take()
        self._store.load(block_hash, block)
        self.register(block, block_hash)
        return block

    def allocate(self, count: int) -> tuple[int, ...]:
        """``count`` blocks to write to, the least recently freed ones; what they held is forgotten
        here. The caller has compared ``count`` with ``num_free``."""
        return tuple([self._take() for _ in range(count)])

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if (block_hash := self._hashes[block]) is not None:
            self._store.evicted(block, block_hash)
            self._num_cached -= 1
            self.forget(block)
        self._users[block] = 1
        return block

    def register(self, block: int, block_hash: bytes) -> None:
        """A used block is full, or will be by the step that is being planned. Of several with the
        same content the first counts."""
        if self._by_hash.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def forget(self, block: int) -> None:
        """A block does not hold what its hash says, if it has one: nobody finds it any more."""
        block_hash, self._hashes[block] = self._hashes[block], None
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._num_cached -= block in self._free

    def is_shared(self, block: int) -> bool:
        """It has several users."""
        return self._users[block] > 1

    def distrust(self, block: int) -> None:
        """Forgets a block, and the copy of it that the store may keep."""
        if (block_hash := self._hashes[block]) is not None:
            self._store.forget(block_hash)
            self.forget(block)

    def distrust_content(self, block_hash: bytes) -> None:
        """Forgets whatever block and copy hold what ``block_hash`` names, if any do."""
        self._store.forget(block_hash)
        if (block := self._by_hash.get(block_hash)) is not None:
            self.forget(block)

    def free(self, blocks: Sequence[int]) -> None:
        """One user less of each of a sequence's blocks, given in the order of its tokens."""
        # The tail goes first: a prefix is of use without what follows it, not the other way round.
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self._num_cached += 1

    def hash_of(self, block: int) -> bytes | None:
        return self._hashes[block]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares the pool with the block tables of everyone who uses it. O(blocks).

        Raises AssertionError.
        """
        users = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._users):
            assert count == users[block], f"block {block}: {count} users, {users[block]} tables"
            assert (count == 0) == (block in self._free), f"block {block}: wrongly free or used"
        hashed = {block: hash_ for block, hash_ in enumerate(self._hashes) if hash_ is not None}
        assert {hash_: block for block, hash_ in hashed.items()} == self._by_hash, "hash map"
        assert len(hashed.keys() & self._free.keys()) == self._num_cached, "cached blocks"
