"""Block pool of the paged KV cache, with a prefix cache by block hash. Pure.

    free, no hash  --allocate-->  used  --publish-->   used, hashed
         ^                         |                     |     ^
         |                        free                  free  claim
         |                         v                     v     |
         +------------------ free, no hash         free, hashed --allocate--> used

The last block of each chunk of a prefix (everlift.hashes.CHUNK_SIZE tokens) stands for the chunk.
The pool records the chunks whose last block enters or leaves the prefix cache.

A freed block keeps its content and its hash until it is reused; ``free_blocks.py`` decides the
order of reuse. When the block is reused, the pool's ``store``, a cache in other memory, may keep a
copy of the content. The pool handles block ids and hashes, never tokens or tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple, Protocol

from everlift.hashes import BLOCKS_PER_CHUNK
from worker.engine.chunk import Chunk
from worker.engine.free_blocks import FreeBlocks


class ChunkChanges(NamedTuple):
    """Chunks of prefixes that were added to the prefix cache or removed from it.

    The keys are the hashes of the chunks' last blocks. A value of ``device`` tells whether the
    chunk is cached in the memory of the device now, a value of ``host`` whether it is cached in
    that of the host. ``stored`` has the chunks that were computed and added, even if they have been
    removed since.
    """

    device: Mapping[bytes, bool] = MappingProxyType({})
    host: Mapping[bytes, bool] = MappingProxyType({})
    stored: Mapping[bytes, Chunk] = MappingProxyType({})


NO_CHANGES = ChunkChanges()


class BlockStore(Protocol):
    """Second cache tier, which keeps copies of blocks that the pool evicts."""

    def __contains__(self, block_hash: bytes) -> bool: ...

    def evicted(self, block: int, block_hash: bytes, *, ends_chunk: bool) -> None:
        """Record that the planned step overwrites ``block``, whose content has ``block_hash``.

        The store decides whether to keep a copy. ``ends_chunk`` means that the block is the last
        one of a chunk.
        """
        ...

    def pin(self, block_hash: bytes) -> None:
        """Keep a stored block until it is loaded; does nothing if it is not stored."""
        ...

    def load(self, block_hash: bytes, block: int) -> None:
        """Plan to copy a stored block, for which ``pin`` was called, into ``block`` of the pool."""
        ...

    def invalidate(self, block_hash: bytes) -> None:
        """Drop the block stored under ``block_hash``, if any; its content is wrong.

        Called between steps.
        """
        ...


class BlockPool:
    """Pool of ``num_blocks`` blocks with ids from 0; blocks evicted from it may go to ``store``.

    A session retains its free blocks for ``retention_s`` seconds, and all sessions together at most
    ``max_retained`` blocks. Every operation is O(1) per block, amortised.
    """

    def __init__(
        self, num_blocks: int, store: BlockStore, retention_s: float = 0.0, max_retained: int = 0
    ) -> None:
        self._store = store
        self._users = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = FreeBlocks(num_blocks, retention_s, max_retained)
        self._num_cached = 0
        #: hashes of cached blocks that end a chunk
        self._chunks: set[bytes] = set()
        #: chunks that changed since take_chunk_changes, by the hash of their last block; the value
        #: is whether the chunk is cached now
        self._chunk_changes: dict[bytes, bool] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._users)

    @property
    def num_free(self) -> int:
        """Number of unused blocks, including those in the prefix cache."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_retained(self) -> int:
        """Number of free blocks that are retained for a session."""
        return self._free.num_retained

    def num_retained_after(self, now: float, num_allocated: int) -> int:
        """Return the number of free blocks that sessions will retain at a later time.

        ``now`` is that time, in seconds. ``num_allocated`` is the number of further blocks that are
        allocated before it. Retained blocks are allocated last.
        """
        return self._free.num_retained_after(now, num_allocated)

    def num_before_chunk(self, most: int) -> int:
        """Return a number of blocks, at most ``most``, whose allocation evicts no cached chunk.

        The result may be smaller than the largest such number. The end of a session's retention
        before the allocation may change the order of reuse, but leaves the result valid.
        """
        for number, blocks in enumerate(zip_longest(*self._free.next_blocks())):
            if number == most:
                break
            if any(block is not None and self._hashes[block] in self._chunks for block in blocks):
                return number
        return most

    @property
    def num_cached(self) -> int:
        """Number of unused blocks with a hash, which means that they are in the prefix cache."""
        return self._num_cached

    def set_time(self, now: float) -> None:
        """Set the time to that of the step that is being planned; retentions may end."""
        self._free.set_time(now)

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether a block with this hash can be claimed: it is in the pool or the store."""
        return block_hash in self._by_hash or block_hash in self._store

    def is_used(self, block_hash: bytes) -> bool:
        """Return whether a block of the pool with this hash is in use by a sequence.

        If so, claiming it for another sequence takes no free block.
        """
        block = self._by_hash.get(block_hash)
        return block is not None and self._users[block] > 0

    def claim(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Return the ids of the blocks with these hashes, after adding one user to each.

        They are the leading blocks of a sequence. Blocks that are only in the store are loaded into
        free blocks. ``hash in pool`` must be true for every hash, and enough blocks must be free.
        """
        # Blocks that are in the pool are taken first, so that no load reuses one of them; the last
        # block comes first, as in free().
        shared = [self._share(block_hash) for block_hash in reversed(hashes)]
        return tuple(
            self._load(block_hash, index) if block is None else block
            for index, (block, block_hash) in enumerate(zip(reversed(shared), hashes, strict=True))
        )

    def _share(self, block_hash: bytes) -> int | None:
        block = self._by_hash.get(block_hash)
        if block is None:
            self._store.pin(block_hash)
            return None
        if not self._users[block]:
            self._free.remove(block)
            self._num_cached -= 1
        self._users[block] += 1
        return block

    def _load(self, block_hash: bytes, index: int) -> int:
        block = self._take()
        self._store.load(block_hash, block)
        self.publish(block, block_hash, index)
        return block

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take the ``count`` blocks that are to be reused next, and return their ids.

        Each then has one user and no hash. At least ``count`` blocks must be free.
        """
        return tuple([self._take() for _ in range(count)])

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        if (block_hash := self._hashes[block]) is not None:
            self._store.evicted(block, block_hash, ends_chunk=block_hash in self._chunks)
            self._num_cached -= 1
            self.unpublish(block)
        return block

    def publish(self, block: int, block_hash: bytes, index: int) -> None:
        """Add a used block to the prefix cache under ``block_hash``.

        It is block number ``index`` of its sequence, counted from 0. The block is full, or will be
        after the planned step. If another block is cached under this hash already, nothing changes.
        """
        if self._by_hash.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash
            if (index + 1) % BLOCKS_PER_CHUNK == 0:
                self._chunks.add(block_hash)
                self._chunk_changes[block_hash] = True

    def unpublish(self, block: int) -> None:
        """Remove a block from the prefix cache, if it has a hash; its users keep it."""
        block_hash, self._hashes[block] = self._hashes[block], None
        if block_hash is not None:
            del self._by_hash[block_hash]
            if not self._users[block]:
                self._free.remove(block)
                self._free.add_empty(block)
                self._num_cached -= 1
            if block_hash in self._chunks:
                self._chunks.remove(block_hash)
                self._chunk_changes[block_hash] = False

    def take_chunk_changes(self) -> Mapping[bytes, bool]:
        """Return whether each chunk that changed since the last call is cached now.

        Chunks are named by the hash of their last block. A chunk that was added and removed again,
        or vice versa, may be included.
        """
        changes, self._chunk_changes = self._chunk_changes, {}
        return changes

    def is_shared(self, block: int) -> bool:
        """Return whether a block has several users."""
        return self._users[block] > 1

    def invalidate(self, block: int) -> None:
        """Remove the hash of a block whose content may be wrong, and drop the store's copy of it.

        Users keep the block. Do nothing if the block has no hash.
        """
        if (block_hash := self._hashes[block]) is not None:
            self._store.invalidate(block_hash)
            self.unpublish(block)

    def invalidate_content(self, block_hash: bytes) -> None:
        """Remove this hash from the block that has it, and drop the stored copy, if they exist."""
        self._store.invalidate(block_hash)
        if (block := self._by_hash.get(block_hash)) is not None:
            self.unpublish(block)

    def free(self, blocks: Sequence[int], session: int = 0) -> None:
        """Remove one user of each of ``blocks``, which are in the order of a sequence's tokens.

        Blocks that have no user left become free. Those with a hash stay in the prefix cache, and
        ``session`` retains them. ``session`` 0 means no session: each of them then returns to the
        session that used it last, if the retention of that session has not ended.
        """
        # The last block is freed first and thus reused first, because a prefix is useful without
        # its continuation, but not vice versa.
        cached = []
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                if self._hashes[block] is None:
                    self._free.add_empty(block)
                else:
                    cached.append(block)
        self._num_cached += len(cached)
        self._free.add(cached, session)

    def hash_of(self, block: int) -> bytes | None:
        return self._hashes[block]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the pool with the block tables of all its users. O(blocks).

        Raises AssertionError if they do not match.
        """
        users = Counter(block for table in tables for block in table)
        free = {*self._free}
        for block, count in enumerate(self._users):
            assert count == users[block], f"block {block}: {count} users, {users[block]} tables"
            assert (count == 0) == (block in free), f"block {block}: wrongly free or used"
        hashed = {block: hash_ for block, hash_ in enumerate(self._hashes) if hash_ is not None}
        assert {hash_: block for block, hash_ in hashed.items()} == self._by_hash, "hash map"
        assert len(hashed.keys() & free) == self._num_cached, "cached blocks"
        self._free.check_integrity(self._hashes)
        assert self._chunks <= self._by_hash.keys(), "chunks"
