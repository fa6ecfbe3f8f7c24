"""Index of the prompt prefixes that workers have in their prefix caches. Pure.

A prefix is divided into chunks of 256 tokens. The id of a chunk depends on all tokens before it and
on the salt (``everlift.hashes.chunk_ids``), so that a chunk is cached only together with its
prefix. A worker is expected to have the chunks of a dispatched prompt from the dispatch on, so that
requests with the same prefix which arrive in a burst follow the first one. Once the worker has
computed the prompt, only chunks that it has reported as stored remain.

The size of the index is bounded by what the workers' caches hold, and by the prompts that are being
computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

#: Value of a chunk of one worker: whether it is stored in device memory, in host memory, and how
#: many dispatched prompts will store it.
_DEVICE, _HOST, _EXPECTED = 1, 2, 4


class PrefixIndex:
    """Index from chunks to the workers that have them in device or host memory."""

    def __init__(self) -> None:
        #: by chunk: bit mask of the workers that have it
        self._masks: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._workers: dict[int, str] = {}
        #: by worker and chunk
        self._chunks: dict[str, dict[int, int]] = {}
        self._num_host: dict[str, int] = {}
        #: by worker and epoch: chunks of prompts that are not yet computed
        self._expected: dict[str, dict[int, Sequence[int]]] = {}

    def join(self, worker_id: str, device: Iterable[int] = (), host: Iterable[int] = ()) -> None:
        """Add a worker, or replace what is known of it, with all chunks that it has stored."""
        self.remove(worker_id)
        bit = next(bit for bit in range(len(self._workers) + 1) if 1 << bit not in self._workers)
        self._bits[worker_id] = 1 << bit
        self._workers[1 << bit] = worker_id
        self._chunks[worker_id], self._expected[worker_id] = {}, {}
        self._num_host[worker_id] = 0
        self.update(worker_id, device, ())
        self.update_host(worker_id, host, ())

    def remove(self, worker_id: str) -> None:
        """Remove a worker, if it is known, with all its chunks."""
        bit = self._bits.pop(worker_id, 0)
        if bit:
            del self._workers[bit], self._expected[worker_id], self._num_host[worker_id]
            for chunk in self._chunks.pop(worker_id):
                self._unmark(chunk, bit)

    def update(self, worker_id: str, stored: Iterable[int], evicted: Iterable[int]) -> None:
        """Apply a worker's report of changes in its device memory; ignored if it is unknown.

        A chunk that is both stored and evicted counts as stored.
        """
        self._apply(worker_id, _DEVICE, stored, evicted)

    def update_host(self, worker_id: str, stored: Iterable[int], evicted: Iterable[int]) -> None:
        """Apply a worker's report of changes in its host memory; ignored if it is unknown."""
        if worker_id in self._chunks:
            self._num_host[worker_id] += self._apply(worker_id, _HOST, stored, evicted)

    def expect(self, worker_id: str, epoch: int, chunks: Sequence[int]) -> None:
        """Record that the prompt with ``chunks`` was dispatched under the number ``epoch``."""
        if worker_id in self._chunks and epoch not in self._expected[worker_id]:
            self._expected[worker_id][epoch] = chunks
            self._add(worker_id, chunks, _EXPECTED)

    def settle(self, worker_id: str, epoch: int) -> None:
        """Record that the prompt of a dispatch was computed, or that it will not be."""
        if chunks := self._expected.get(worker_id, {}).pop(epoch, ()):
            self._add(worker_id, chunks, -_EXPECTED)

    def workers(self, mask: int) -> Iterator[str]:
        """Yield the ids of the workers of a bit mask."""
        return (self._workers[bit] for bit in _bits_of(mask))

    def bit(self, worker_id: str) -> int:
        """Return the bit of a worker in the masks; 0 if it is unknown."""
        return self._bits.get(worker_id, 0)

    def depths(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """Return numbers of leading chunks, largest first, each with the mask of the workers.

        A worker is in the mask of the number of leading chunks of ``chain`` that it has, and in
        none if it has not even the first one. O(d log(n)) for n chunks and d different numbers,
        however many workers there are.
        """
        depths: list[tuple[int, int]] = []
        # A worker evicts the end of a prefix before its beginning, so that masks only lose bits
        # along the chain. ``mask`` has the workers with the first chunk whose depth is unknown.
        mask, end = self._masks.get(chain[0], 0) if chain else 0, len(chain)
        while mask:
            first, last, deepest = 0, end - 1, mask
            while first < last:
                middle = (first + last + 1) // 2
                found = self._masks.get(chain[middle], 0) & mask
                if found:
                    first, deepest = middle, found
                else:
                    last = middle - 1
            depths.append((first + 1, deepest))
            mask, end = mask & ~deepest, first
        return depths

    def host_chunks(self, worker_id: str, chain: Sequence[int]) -> int:
        """Return how many of ``chain``'s chunks the worker has in host memory only."""
        if not self._num_host.get(worker_id):
            return 0
        chunks = self._chunks[worker_id]
        return sum(chunks.get(chunk, 0) == _HOST for chunk in chain)

    def _apply(
        self, worker_id: str, medium: int, stored: Iterable[int], evicted: Iterable[int]
    ) -> int:
        """Set or clear the bit ``medium`` of chunks; return by how many more chunks have it."""
        chunks = self._chunks.get(worker_id)
        if chunks is None:
            return 0
        gone = [chunk for chunk in evicted if chunks.get(chunk, 0) & medium]
        self._add(worker_id, gone, -medium)
        new = [chunk for chunk in stored if not chunks.get(chunk, 0) & medium]
        self._add(worker_id, new, medium)
        return len(new) - len(gone)

    def _add(self, worker_id: str, chunks: Sequence[int], amount: int) -> None:
        """Add ``amount`` to a worker's values of different ``chunks``."""
        mine, bit = self._chunks[worker_id], self._bits[worker_id]
        # Most chunks of a prompt that follow each other have the same value, so that they are
        # changed at once.
        for before, run in groupby(chunks, mine.get):
            alike = tuple(run)
            after = (before or 0) + amount
            if after:
                mine.update(dict.fromkeys(alike, after))
            else:
                for chunk in alike:
                    del mine[chunk]
                    self._unmark(chunk, bit)
            if not before:
                self._mark(alike, bit)

    def _mark(self, chunks: Sequence[int], bit: int) -> None:
        masks = self._masks
        if masks.keys().isdisjoint(chunks):
            masks.update(dict.fromkeys(chunks, bit))
        else:
            masks.update({chunk: masks.get(chunk, 0) | bit for chunk in chunks})

    def _unmark(self, chunk: int, bit: int) -> None:
        mask = self._masks[chunk] & ~bit
        if mask:
            self._masks[chunk] = mask
        else:
            del self._masks[chunk]


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
