"""The host's memory as a second place for KV blocks: what is kept where, and for whom. Pure.

    wanted by nobody    --evicted-->  dropped
    wanted              --evicted-->  a place, by a save in the plan that overwrites the block
    in a place          --load-->     in a place, and in a block again
    in a place          --another hash needs the place-->  dropped, the least recently used first

A preempted sequence wants its blocks until it is back in the batch or gone. The store knows places
and hashes; host_cache.py has the memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from worker.engine.plan import BlockCopy


class HostStore:
    """Store of blocks in ``num_places`` places of host memory, with ids from 0.

    Every operation is O(1) a block, but for ``forget_all``.

    What it plans for a step it believes when the step is ``done``; after one that ``failed`` it
    has forgotten what the step was to save. Until then no place that the step copies from or to is
    given to another hash: all saves are made before all loads. A step is done as soon as the device
    has it, which makes the copies of the next one after these.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._free = list(range(num_places))
        #: by hash; the next one to be dropped first
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        #: those of which the step that is being planned makes use
        self._pinned: dict[bytes, int] = {}
        self._wanted: Counter[bytes] = Counter()
        self._saves: list[tuple[bytes, BlockCopy]] = []
        self._loads: list[BlockCopy] = []

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._kept or block_hash in self._pinned

    # who wants what

    def want(self, hashes: Sequence[bytes]) -> None:
        """Ask for the blocks of a sequence that will return, in their order."""
        if self._num_places:
            self._wanted.update(hashes)

    def unwant(self, hashes: Sequence[bytes]) -> None:
        """Take one ``want`` of these back.

        What nobody wants is dropped first, and of a sequence its later blocks, which are of no use
        without the earlier ones.
        """
        if not self._num_places:
            return
        self._wanted.subtract(hashes)
        for block_hash in hashes:
            if not self._wanted[block_hash]:
                del self._wanted[block_hash]
        self._drop_first(hashes)

    def invalidate(self, block_hash: bytes) -> None:
        """Invalidate a block between steps: its contents do not match its hash."""
        if (place := self._kept.pop(block_hash, None)) is not None:
            self._free.append(place)

    def invalidate_all(self) -> None:
        """Forget all blocks: their contents are unknown, and the planned step comes to nothing.

        O(places).
        """
        self.failed()
        self._free += self._kept.values()
        self._kept.clear()

    # one step

    def evicted(self, block: int, block_hash: bytes) -> None:
        """Record that the planned step overwrites ``block``."""
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
        """Keep a block in its place until the step is over."""
        if block_hash in self._kept:
            self._pinned[block_hash] = self._kept.pop(block_hash)

    def load(self, block_hash: bytes, block: int) -> None:
        """Copy what is pinned to ``block`` in the step that is being planned."""
        self._loads.append(BlockCopy(block, self._pinned[block_hash]))

    def planned(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Save and loads of the step."""
        return tuple(copy for _, copy in self._saves), tuple(self._loads)

    def done(self) -> None:
        """Commit the copies of a step that was executed or launched."""
        self._kept.update(self._pinned)
        self._drop_first(reversed(self._pinned))
        self._pinned.clear()
        self._saves.clear()
        self._loads.clear()

    def failed(self) -> None:
        """Drop the copies of a step that was not executed completely."""
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

        ``wanted`` are the hashes that preempted sequences wait for. O(places). Raises
        AssertionError.
        """
        assert not (self._pinned or self._saves or self._loads), "a step is not over"
        places = [*self._free, *self._kept.values()]
        assert sorted(places) == [*range(self._num_places)], "a place is lost, or kept twice"
        if self._num_places:
            assert self._wanted == Counter(wanted), "who wants what"
