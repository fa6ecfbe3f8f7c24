"""Host memory as a second cache tier for KV blocks: which host block holds which KV block. Pure.

    not needed        --evicted-->  dropped
    needed            --evicted-->  saved to a host block, by the plan that overwrites the block
    in a host block   --load-->     in a host block, and in a block of the pool as well
    in a host block   --another block needs the host block-->  dropped, least recently used first

A host block is a region of host memory that holds one KV block. The blocks of a preempted sequence
are needed until it is admitted again or removed. The store handles the indices of host blocks and
the hashes of blocks; host_cache.py owns the memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from worker.engine.plan import BlockCopy


class HostStore:
    """Store of blocks in ``num_host_blocks`` blocks of host memory, numbered from 0.

    A save copies a block of the KV cache to a host block, a load copies it back. Every operation is
    O(1) per block, except ``invalidate_all``.

    The saves and loads of one step are first planned, then either committed or discarded. Until
    then no host block that the step reads or writes is given to another hash: all saves are made
    before all loads, so a save could otherwise overwrite a block that is still to be loaded.
    ``commit_copies`` may be called once the step is submitted to the device, because the device
    makes the next step's copies after this step's.
    """

    def __init__(self, num_host_blocks: int) -> None:
        self._num_host_blocks = num_host_blocks
        self._free = list(range(num_host_blocks))
        #: host block by hash; the first entry is dropped first
        self._stored: OrderedDict[bytes, int] = OrderedDict()
        #: host blocks that the planned step reads or writes, by hash
        self._pinned: dict[bytes, int] = {}
        self._needed: Counter[bytes] = Counter()
        self._saves: list[tuple[bytes, BlockCopy]] = []
        self._loads: list[BlockCopy] = []
        #: hashes of stored blocks that end a chunk, and those that were added or removed since
        #: ``take_chunk_changes``
        self._chunks: set[bytes] = set()
        self._changed_chunks: set[bytes] = set()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._stored or block_hash in self._pinned

    # needed blocks

    def mark_needed(self, hashes: Sequence[bytes]) -> None:
        """Mark the blocks of a preempted sequence as needed, so that they are saved when evicted.

        ``hashes`` are the hashes of the blocks, in the order of the sequence's tokens.
        """
        if self._num_host_blocks:
            self._needed.update(hashes)

    def unmark_needed(self, hashes: Sequence[bytes]) -> None:
        """Undo one ``mark_needed`` of the same hashes.

        Blocks that no sequence needs any more are the first to be dropped when a host block is
        needed. Later blocks of a sequence are dropped before earlier ones, without which they are
        useless.
        """
        if not self._num_host_blocks:
            return
        self._needed.subtract(hashes)
        for block_hash in hashes:
            if not self._needed[block_hash]:
                del self._needed[block_hash]
        self._drop_first(hashes)

    def invalidate(self, block_hash: bytes) -> None:
        """Drop the block with this hash, if it is stored, because its content is wrong.

        Call between steps.
        """
        if (host_block := self._stored.pop(block_hash, None)) is not None:
            self._free.append(host_block)
            self._note_dropped(block_hash)

    def invalidate_all(self) -> None:
        """Drop all stored blocks, and discard the planned saves and loads. O(host blocks).

        Called when the contents of the KV cache's blocks are unknown.
        """
        self.discard_copies()
        self._free += self._stored.values()
        self._stored.clear()
        self._changed_chunks |= self._chunks

    # one step

    def evicted(self, block: int, block_hash: bytes, *, ends_chunk: bool) -> None:
        """Plan to save ``block`` before the planned step overwrites it, if it is marked as needed.

        ``ends_chunk`` means that the block is the last one of a chunk. Nothing is saved if the
        store already has a block with ``block_hash`` or has no host block to spare.
        """
        if block_hash not in self._needed or block_hash in self:
            return
        if (host_block := self._take_host_block()) is not None:
            self._pinned[block_hash] = host_block
            self._saves.append((block_hash, BlockCopy(block, host_block)))
            if ends_chunk:
                self._chunks.add(block_hash)
                self._changed_chunks.add(block_hash)

    def _take_host_block(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._stored:
            block_hash, host_block = self._stored.popitem(last=False)
            self._note_dropped(block_hash)
            return host_block
        return None

    def _note_dropped(self, block_hash: bytes) -> None:
        if block_hash in self._chunks:
            self._changed_chunks.add(block_hash)

    def take_chunk_changes(self) -> dict[bytes, bool]:
        """Return whether each chunk that changed since the last call is stored now.

        Chunks are named by the hash of their last block. Call between steps.
        """
        changes = {block_hash: block_hash in self for block_hash in self._changed_chunks}
        self._chunks.difference_update(name for name, is_stored in changes.items() if not is_stored)
        self._changed_chunks.clear()
        return changes

    def pin(self, block_hash: bytes) -> None:
        """Keep a stored block in host memory until the planned step is done or has failed.

        Does nothing if no block is stored under ``block_hash``.
        """
        if block_hash in self._stored:
            self._pinned[block_hash] = self._stored.pop(block_hash)

    def load(self, block_hash: bytes, block: int) -> None:
        """Plan to copy a stored block into ``block`` of the KV cache in the planned step.

        ``pin`` must have been called for its ``block_hash``.
        """
        self._loads.append(BlockCopy(block, self._pinned[block_hash]))

    def planned_copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Return the saves, then the loads, of the planned step."""
        return tuple(copy for _, copy in self._saves), tuple(self._loads)

    def commit_copies(self) -> None:
        """Make the planned copies take effect: their step was executed or launched."""
        self._stored.update(self._pinned)
        self._drop_first(reversed(self._pinned))
        self._pinned.clear()
        self._saves.clear()
        self._loads.clear()

    def discard_copies(self) -> None:
        """Discard the planned copies: their step was not executed completely."""
        for block_hash, copy in self._saves:
            del self._pinned[block_hash]
            self._free.append(copy.host_block)
            self._note_dropped(block_hash)
        self.commit_copies()

    def _drop_first(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            if block_hash in self._stored and block_hash not in self._needed:
                self._stored.move_to_end(block_hash, last=False)

    def check_integrity(self, needed: Iterable[bytes]) -> None:
        """Check invariants between steps; raise AssertionError if one is violated. O(host blocks).

        ``needed`` are the hashes of the blocks of all preempted sequences that are waiting.
        """
        assert not (self._pinned or self._saves or self._loads), "copies are still planned"
        host_blocks = [*self._free, *self._stored.values()]
        assert sorted(host_blocks) == [*range(self._num_host_blocks)], (
            "a host block is lost, or used twice"
        )
        if self._num_host_blocks:
            assert self._needed == Counter(needed), "needed blocks"
        stored = self._chunks & self._stored.keys()
        assert stored >= self._chunks - self._changed_chunks, "chunks"
