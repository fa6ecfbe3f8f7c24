"""The blocks of the paged KV cache: who uses them, and which of them hold a known prefix. Pure.

    free, no hash  --allocate-->  used  --register-->  used, hashed
         ^                         |                     |     ^
         |                        free                  free  share
         |                         v                     v     |
         +------------------ free, no hash         free, hashed --allocate--> used

A freed block keeps its content and its hash until it is the least recently freed one and somebody
needs a block. The pool knows block ids and hashes, never tokens or tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """``num_blocks`` blocks with ids from 0. Every operation is O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self._users = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        #: the next one to be taken first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

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

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds what ``block_hash`` names."""
        return self._by_hash.get(block_hash)

    def is_free(self, block: int) -> bool:
        return self._users[block] == 0

    def share(self, block: int) -> None:
        """One more user of a block that holds what it needs; the block may be free."""
        if self.is_free(block):
            del self._free[block]
        self._users[block] += 1

    def allocate(self, count: int) -> tuple[int, ...]:
        """``count`` blocks to write to, the least recently freed ones; what they held is forgotten.

        The caller has compared ``count`` with ``num_free``.
        """
        return tuple(self._take() for _ in range(count))

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._users[block] = 1
        return block

    def _forget(self, block: int) -> None:
        block_hash, self._hashes[block] = self._hashes[block], None
        if block_hash is not None:
            del self._by_hash[block_hash]

    def register(self, block: int, block_hash: bytes) -> None:
        """A used block is full and computed. Of several with the same content the first counts."""
        if self._by_hash.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def free(self, blocks: Sequence[int]) -> None:
        """One user less of each of a sequence's blocks, given in the order of its tokens."""
        # The tail goes first: a prefix is of use without what follows it, not the other way round.
        for block in reversed(blocks):
            self._users[block] -= 1
            if self.is_free(block):
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

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
