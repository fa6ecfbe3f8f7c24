"""Tokens of the prefixes that this worker has, by chunk. Pure.

A router omits from a Start message the leading tokens that the worker should have, and sends the
hash of their last chunk instead. Each chunk has the hash of its parent, so the worker finds the
tokens by walking back from the last chunk to the salt. The hash depends on all these tokens and on
the salt. The worker therefore cannot find other tokens than the omitted ones, nor tokens of another
tenant.

    held      a sequence at this worker begins with the chunk's prefix
    cached    the chunk's KV is in the memory of the device or of the host

A chunk is kept while it is held or cached, so that the size of the store is bounded by the caches
and by the sequences. The store takes about seven bytes per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from worker.engine.blocks import ChunkChanges
from worker.engine.chunk import Chunk, Prefix
from worker.engine.sequence import Sequence


class ChunkStore:
    """Store of chunks by their names, which are the hashes of their last blocks."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, Chunk] = {}
        #: names of the chunks in the memory of the device, and in that of the host
        self.on_device: set[bytes] = set()
        self.on_host: set[bytes] = set()
        #: number of holders of each chunk that is held
        self._num_holders: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._chunks)

    def find(self, end: bytes, num_chunks: int, salt: bytes) -> Prefix | None:
        """Return the prefix of ``num_chunks`` chunks after ``salt`` whose last chunk is ``end``.

        Return None if the store lacks one of the chunks, or if the prefix that ends with ``end``
        has another number of chunks or another salt.
        """
        found: list[Chunk] = []
        while len(found) < num_chunks and (chunk := self._chunks.get(end)) is not None:
            found.append(chunk)
            end = chunk.parent
        if len(found) < num_chunks or end != salt:
            return None
        return Prefix.of(reversed(found))

    def hold(self, sequence: Sequence) -> list[bytes]:
        """Keep the chunks of a sequence's known tokens until ``release``; return their names."""
        names = sequence.chunk_hashes()
        for number, name in enumerate(names):
            if name not in self._chunks:
                self._chunks[name] = sequence.chunk(number)
        self._num_holders.update(names)
        return names

    def release(self, names: Iterable[bytes]) -> None:
        """Undo the call of ``hold`` that returned ``names``."""
        for name in names:
            self._num_holders[name] -= 1
            if not self._num_holders[name]:
                del self._num_holders[name]
                self._drop_unused(name)

    def update(self, changes: ChunkChanges) -> None:
        """Apply changes of the prefix cache, which include the tokens of the chunks added to it."""
        _apply(self.on_device, changes.device)
        _apply(self.on_host, changes.host)
        for name, chunk in changes.stored.items():
            self._chunks.setdefault(name, chunk)
        for name in changes.device.keys() | changes.host.keys() | changes.stored.keys():
            self._drop_unused(name)

    def _drop_unused(self, name: bytes) -> None:
        is_cached = name in self.on_device or name in self.on_host
        if not is_cached and name not in self._num_holders:
            self._chunks.pop(name, None)


def _apply(names: set[bytes], changes: Mapping[bytes, bool]) -> None:
    for name, is_cached in changes.items():
        (names.add if is_cached else names.discard)(name)
