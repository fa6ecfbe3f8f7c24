"""Copies of KV blocks in host memory, for the blocks of preempted sequences.

    [host blocks, layers, 2 (key, value), kv_heads, BLOCK_SIZE, head_dim]    as in kv_cache.py

host_store.py decides which host block has which content; this module only copies, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from worker.device.kv_cache import KVCache
from worker.device.streams import CopyStreams
from worker.engine.plan import BlockCopy
from worker.runner.host_blocks import HostBlocks


class HostCache(Protocol):
    """Host memory for copies of a KVCache's blocks; ``BlockCopy.host_block`` is an index in it.

    The results are as if copies and the device's computation ran one after another, in the order
    of their launch. Methods may return before their copies end. The copies of one call must have
    distinct blocks and distinct host blocks. A host block must be saved before it is loaded.
    """

    #: seconds to load one block, as measured; 0: not measured
    load_s: float

    @property
    def num_blocks(self) -> int: ...

    def save(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of the KV cache to host blocks."""
        ...

    def load(self, copies: Sequence[BlockCopy]) -> None:
        """Copy host blocks to blocks of the KV cache."""
        ...


class PlainHostCache:
    """HostCache of a KV cache on a CPU; its methods return once the blocks are copied."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self._device = cache.tensor
        self._host = HostBlocks(cache.tensor[0], num_blocks)
        self.load_s = 0.0

    @property
    def num_blocks(self) -> int:
        return len(self._host)

    def save(self, copies: Sequence[BlockCopy]) -> None:
        # One by one, because indexing many blocks at once would copy them twice.
        for block, place in copies:
            self._host[place].copy_(self._device[block])

    def load(self, copies: Sequence[BlockCopy]) -> None:
        for block, place in copies:
            self._device[block].copy_(self._host[place])


class StreamedHostCache:
    """HostCache of a device with ``streams``, whose computation overlaps with the copies.

        compute   block -> staged     ... the step, which may overwrite the block ...
        out                 staged -> host block
        into      host block -> block
        compute                    ... a step that reads the block ...

    A block is first copied within the device, which takes a few microseconds, and then to the host,
    so that a step does not wait for the copy to the host. A step waits for the blocks that it
    loads. At most ``num_staged`` blocks are copied to the host at the same time; others wait.
    """

    def __init__(
        self, cache: KVCache, num_blocks: int, num_staged: int, streams: CopyStreams
    ) -> None:
        self._device = cache.tensor
        self._host = HostBlocks(cache.tensor[0], num_blocks)
        self._staged = cache.tensor.new_empty(num_staged, *cache.tensor.shape[1:])
        self._streams = streams
        #: event of the last copy of staged blocks to the host
        self._sent = streams.out.mark()
        #: by host block, the event of its last save
        self._saved: dict[int, Any] = {}
        self.load_s = 0.0

    @property
    def num_blocks(self) -> int:
        return len(self._host)

    def save(self, copies: Sequence[BlockCopy]) -> None:
        most = len(self._staged)
        for first in range(0, len(copies), most):
            self._save(copies[first : first + most])

    def _save(self, copies: Sequence[BlockCopy]) -> None:
        compute, out, _ = self._streams
        compute.wait(self._sent)
        for staged, (block, _) in zip(self._staged, copies, strict=False):
            compute.copy(staged, self._device[block])
        # Earlier loads from these host blocks have ended by then, because computation waited for
        # these loads.
        out.wait(compute.mark())
        try:
            for staged, (_, place) in zip(self._staged, copies, strict=False):
                out.copy(self._host[place], staged)
        finally:
            # Even if a copy fails, the next save must wait for the copies that have begun.
            self._sent = out.mark()
        self._saved.update((place, self._sent) for _, place in copies)

    def load(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        compute, _, into = self._streams
        # Earlier computation may still read or stage these blocks.
        into.wait(compute.mark())
        for mark in {self._saved[place] for _, place in copies}:
            into.wait(mark)
        try:
            for block, place in copies:
                into.copy(self._device[block], self._host[place])
        finally:
            compute.wait(into.mark())
