"""Host memory as a second cache tier: the places in which it keeps which KV blocks. Pure.

    not wanted      --evicted-->  dropped
    wanted          --evicted-->  saved to a place, by the plan that overwrites the block
    in a place      --load-->     in a place, and in a block of the pool as well
    in a place      --another hash needs the place-->  dropped, the least recently used first

A place holds one block. A preempted sequence wants its blocks until it is admitted again or
removed. The store handles places and hashes; host_cache.py owns the memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from worker.engine.plan import BlockCopy


class HostStore:
    """Store of blocks in ``num_places`` places of host memory, with ids from 0.

    Every operation is O(1) per block, except ``invalidate_all``.

    Copies planned for a step take effect with ``done``; ``failed`` discards the blocks that the
    step was to save. Until then no place that the step reads or writes is given to another hash:
    all saves are made before all loads, so a save could otherwise overwrite a block that is still
    to be loaded. A step counts as done once the device has it, because the device makes the next
    step's copies after this step's.
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
        """Mark the blocks of a preempted sequence as wanted; ``hashes`` are in their order."""
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
        """Drop a block between steps, because its content does not match its hash."""
        if (place := self._kept.pop(block_hash, None)) is not None:
            self._free.append(place)

    def invalidate_all(self) -> None:
        """Drop all blocks, and discard the planned step. O(places).

        Called when the contents of the blocks are unknown.
        """
        self.failed()
        self._free += self._kept.values()
        self._kept.clear()

    # one step

    def evicted(self, block: int, block_hash: bytes) -> None:
        """Plan to save ``block``, which the planned step overwrites, if it is wanted."""
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
        """Keep a block in its place until the planned step is done or has failed."""
        if block_hash in self._kept:
            self._pinned[block_hash] = self._kept.pop(block_hash)

    def load(self, block_hash: bytes, block: int) -> None:
        """Plan to load the pinned block of ``block_hash`` into ``block`` in the planned step."""
        self._loads.append(BlockCopy(block, self._pinned[block_hash]))

    def planned(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Return the saves and the loads of the planned step."""
        return tuple(copy for _, copy in self._saves), tuple(self._loads)

    def done(self) -> None:
        """Commit the copies of a step that was executed or launched."""
        self._kept.update(self._pinned)
        self._drop_first(reversed(self._pinned))
        self._pinned.clear()
        self._saves.clear()
        self._loads.clear()

    def failed(self) -> None:
        """Discard the copies of a step that was not executed completely."""
        for block_hash, copy in self._saves:
            del self._pinned[block_hash]
            self._free.append(copy.place)
        self.done()

    def _drop_first(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            if block_hash in self._kept and block_hash not in self._wanted:
                self._kept.move_to_end(block_hash, last=False)

    def check_integrity(self, wanted: Iterable[bytes]) -> None:
        """Check the invariants between steps.

        ``wanted`` are the hashes of the blocks that preempted sequences want. O(places). Raises
        AssertionError.
        """
        assert not (self._pinned or self._saves or self._loads), "a step is not over"
        places = [*self._free, *self._kept.values()]
        assert sorted(places) == [*range(self._num_places)], "a place is lost, or kept twice"
        if self._num_places:
            assert self._wanted == Counter(wanted), "who wants what"
