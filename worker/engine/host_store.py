"""Host memory as a second cache tier for KV blocks: which place holds which block. Pure.

    not wanted      --evicted-->  dropped
    wanted          --evicted-->  saved to a place, by the plan that overwrites the block
    in a place      --load-->     in a place, and in a block of the pool as well
    in a place      --another hash needs the place-->  dropped, the least recently used first

A place is a region of host memory that holds one block. The blocks of a preempted sequence are
wanted until it is admitted again or removed. The store handles the indices of places and the hashes
of blocks; host_cache.py owns the memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from worker.engine.plan import BlockCopy


class HostStore:
    """Store of blocks in ``num_places`` places of host memory, numbered from 0.

    A save copies a block of the KV cache to a place, a load copies it back. Every operation is O(1)
    per block, except ``invalidate_all``.

    The saves and loads of one step are planned, and then take effect with ``done``, or ``failed``
    discards the blocks that were to be saved. Until then no place that the step reads or writes is
    given to another hash: all saves are made before all loads, so a save could otherwise overwrite
    a block that is still to be loaded. ``done`` may be called once the step is submitted to the
    device, because the device makes the next step's copies after this step's.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._free = list(range(num_places))
        #: place by hash; the first entry is dropped first
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        #: places that the planned step reads or writes, by hash
        self._pinned: dict[bytes, int] = {}
        self._wanted: Counter[bytes] = Counter()
        self._saves: list[tuple[bytes, BlockCopy]] = []
        self._loads: list[BlockCopy] = []

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._kept or block_hash in self._pinned

    # wanted blocks

    def want(self, hashes: Sequence[bytes]) -> None:
        """Mark the blocks of a preempted sequence as wanted, so that they are saved when evicted.

        ``hashes`` are the hashes of the blocks, in the order of the sequence's tokens.
        """
        if self._num_places:
            self._wanted.update(hashes)

    def unwant(self, hashes: Sequence[bytes]) -> None:
        """Undo one ``want`` of the same hashes.

        Blocks that no sequence wants any more are the first to be dropped when a place is needed.
        Later blocks of a sequence are dropped before earlier ones, without which they are useless.
        """
        if not self._num_places:
            return
        self._wanted.subtract(hashes)
        for block_hash in hashes:
            if not self._wanted[block_hash]:
                del self._wanted[block_hash]
        self._drop_first(hashes)

    def invalidate(self, block_hash: bytes) -> None:
        """Drop the block with this hash, if it is stored, because its content is wrong.

        Call between steps.
        """
        if (place := self._kept.pop(block_hash, None)) is not None:
            self._free.append(place)

    def invalidate_all(self) -> None:
        """Drop all stored blocks, and discard the planned saves and loads. O(places).

        Called when the contents of the KV cache's blocks are unknown.
        """
        self.failed()
        self._free += self._kept.values()
        self._kept.clear()

    # one step

    def evicted(self, block: int, block_hash: bytes) -> None:
        """Plan to save ``block`` before the planned step overwrites it, if it is wanted.

        Nothing is saved if the store already has a block with ``block_hash`` or has no place for
        it.
        """
        if block_hash not in self._wanted or block_hash in self:
            return
        if (place := self._take()) is not None:
            self._pinned[block_hash] = place
            self._saves.append((block_hash, BlockCopy(block, place)))

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._kept:
            return self._kept.popitem(last=False)[1]
        return None

    def pin(self, block_hash: bytes) -> None:
        """Keep a stored block in its place until the planned step is done or has failed.

        Does nothing if no block is stored under ``block_hash``.
        """
        if block_hash in self._kept:
            self._pinned[block_hash] = self._kept.pop(block_hash)

    def load(self, block_hash: bytes, block: int) -> None:
        """Plan to copy a stored block into ``block`` of the KV cache in the planned step.

        ``pin`` must have been called for its ``block_hash``.
        """
        self._loads.append(BlockCopy(block, self._pinned[block_hash]))

    def planned(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Return the saves, then the loads, of the planned step."""
        return tuple(copy for _, copy in self._saves), tuple(self._loads)

    def done(self) -> None:
        """Make the planned copies take effect: their step was executed or launched."""
        self._kept.update(self._pinned)
        self._drop_first(reversed(self._pinned))
        self._pinned.clear()
        self._saves.clear()
        self._loads.clear()

    def failed(self) -> None:
        """Discard the planned copies: their step was not executed completely."""
        for block_hash, copy in self._saves:
            del self._pinned[block_hash]
            self._free.append(copy.place)
        self.done()

    def _drop_first(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            if block_hash in self._kept and block_hash not in self._wanted:
                self._kept.move_to_end(block_hash, last=False)

    def check_integrity(self, wanted: Iterable[bytes]) -> None:
        """Check invariants between steps; raise AssertionError if one is violated. O(places).

        ``wanted`` are the hashes of the blocks of all preempted sequences that wait.
        """
        assert not (self._pinned or self._saves or self._loads), "a step is not over"
        places = [*self._free, *self._kept.values()]
        assert sorted(places) == [*range(self._num_places)], "a place is lost, or kept twice"
        if self._num_places:
            assert self._wanted == Counter(wanted), "who wants what"
