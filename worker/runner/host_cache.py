"""Copies of KV blocks in the host's memory: where the blocks of preempted sequences wait.

    [places, layers, 2 (key, value), kv_heads, BLOCK_SIZE, head_dim]    as in kv_cache.py

Which place holds what is decided elsewhere (host_store.py); this only copies, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from worker.device.kv_cache import KVCache
from worker.device.streams import CopyStreams
from worker.engine.plan import BlockCopy
from worker.runner.host_blocks import HostBlocks


class HostCache(Protocol):
    """Places for blocks of a KVCache, with no meaning yet.

    Both copies are ordered like all that the device computes: a block is as it was left before, and
    who computes after finds what was copied. Neither waits for their end. The blocks, and the
    places, of one call differ, and what is loaded from a place was saved there.
    """

    @property
    def num_blocks(self) -> int: ...

    def save(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks to their places."""
        ...

    def load(self, copies: Sequence[BlockCopy]) -> None:
        """Copy places to their blocks."""
        ...


class PlainHostCache:
    """The HostCache of a CPU, where a copy is done at once."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self._device = cache.tensor
        self._host = HostBlocks(cache.tensor[0], num_blocks)

    @property
    def num_blocks(self) -> int:
        return len(self._host)

    def save(self, copies: Sequence[BlockCopy]) -> None:
        # One run of memory each: indexing many at once would copy them twice.
        for block, place in copies:
            self._host[place].copy_(self._device[block])

    def load(self, copies: Sequence[BlockCopy]) -> None:
        for block, place in copies:
            self._device[block].copy_(self._host[place])


class StreamedHostCache:
    """The HostCache of a device with ``streams``, whose computation goes on beside the copies.

        compute   block -> staged     ... the step, which may overwrite the block ...
        out                 staged -> place
        into      place -> block
        compute                    ... a step that reads the block ...

    A copy within the device takes a few microseconds, and the way to the host begins from there, so
    that a step does not wait for it. What it loads a step waits for. ``num_staged`` blocks are on
    their way at the same time; more wait their turn.
    """

    def __init__(
        self, cache: KVCache, num_blocks: int, num_staged: int, streams: CopyStreams
    ) -> None:
        self._device = cache.tensor
        self._host = HostBlocks(cache.tensor[0], num_blocks)
        self._staged = cache.tensor.new_empty(num_staged, *cache.tensor.shape[1:])
        self._streams = streams
        #: when the staged blocks were on the host
        self._sent = streams.out.mark()
        #: by place, when it was written last
        self._saved: dict[int, Any] = {}

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
        # Whoever read one of these places before is done by then, for computation waited for it.
        out.wait(compute.mark())
        try:
            for staged, (_, place) in zip(self._staged, copies, strict=False):
                out.copy(self._host[place], staged)
        finally:
            # Of a step that fails the next one still follows on what was begun.
            self._sent = out.mark()
        self._saved.update((place, self._sent) for _, place in copies)

    def load(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        compute, _, into = self._streams
        # Who reads the blocks still, or staged them, is before them.
        into.wait(compute.mark())
        for mark in {self._saved[place] for _, place in copies}:
            into.wait(mark)
        try:
            for block, place in copies:
                into.copy(self._device[block], self._host[place])
        finally:
            compute.wait(into.mark())
