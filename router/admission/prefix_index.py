"""Index of the prompt prefixes that workers have in their prefix caches. Pure.

A prefix is divided into chunks of 256 tokens. The id of a chunk depends on all tokens before it and
on the salt (``everlift.hashes.chunk_id``), so that a chunk is cached only together with its
prefix. A worker is expected to have the chunks of a dispatched prompt from the dispatch on, so that
requests with the same prefix which arrive in a burst follow the first one. Once the worker has
computed the prompt, only chunks that it has reported as stored remain.

The size of the index is bounded by what the workers' caches hold, and by the prompts that are being
computed. A dispatched prompt costs one pass over the chunks that its worker lacks, and one over
those that the worker reports; only the removal of a worker takes time for all chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeAlias

#: By chunk: bit mask of the workers that have it.
_Masks: TypeAlias = dict[int, int]


@dataclass(slots=True)
class _Worker:
    bit: int
    #: by epoch: chunks of prompts that are not yet computed
    expected: dict[int, Sequence[int]] = field(default_factory=dict)
    #: chunks of these prompts that count as stored, but are not
    unconfirmed: set[int] = field(default_factory=set)


class PrefixIndex:
    """Index from chunks to the workers that have them in device or host memory."""

    def __init__(self) -> None:
        self._device: _Masks = {}
        self._host: _Masks = {}
        self._workers: dict[str, _Worker] = {}
        self._ids: dict[int, str] = {}

    def join(self, worker_id: str, device: Sequence[int] = (), host: Sequence[int] = ()) -> None:
        """Add a worker with the chunks that it has in device memory and in host memory.

        A worker that is already known is first removed, as by ``remove``.
        """
        self.remove(worker_id)
        bit = next(1 << n for n in range(len(self._ids) + 1) if 1 << n not in self._ids)
        self._ids[bit], self._workers[worker_id] = worker_id, _Worker(bit)
        self.update(worker_id, device, ())
        self.update_host(worker_id, host, ())

    def remove(self, worker_id: str) -> None:
        """Remove a worker, if it is known, with all its chunks. O(chunks of all workers)."""
        if worker := self._workers.pop(worker_id, None):
            del self._ids[worker.bit]
            for masks in (self._device, self._host):
                _unmark(masks, [it for it, mask in masks.items() if mask & worker.bit], worker.bit)

    def update(self, worker_id: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Apply a worker's report of changes in its device memory.

        A report of an unknown worker is ignored. A chunk that is both stored and evicted counts as
        stored. The eviction of a chunk that is only expected (see ``expect``) is ignored.
        """
        worker = self._workers.get(worker_id)
        # Slices of a message's fields are lists, over which iteration is faster.
        if worker and evicted:
            _unmark(self._device, set(evicted[:]) - worker.unconfirmed, worker.bit)
        if worker and (stored := stored[:]):
            num_unconfirmed = len(worker.unconfirmed)
            worker.unconfirmed.difference_update(stored)
            if num_unconfirmed - len(worker.unconfirmed) < len(stored):
                _mark(self._device, stored, worker.bit)

    def update_host(self, worker_id: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Apply a worker's report of changes in its host memory.

        A report of an unknown worker is ignored. A chunk that is both stored and evicted counts as
        stored.
        """
        if worker := self._workers.get(worker_id):
            _unmark(self._host, evicted, worker.bit)
            _mark(self._host, stored[:], worker.bit)

    def expect(self, worker_id: str, epoch: int, chunks: Sequence[int]) -> None:
        """Record that the prompt with ``chunks`` was dispatched under the epoch ``epoch``.

        The chunks that the worker lacks count as stored from now on. ``settle`` removes those that
        the worker has not reported by then, unless another dispatch expects them. The chunks that
        the worker already has count only until it reports their eviction. The call has no effect
        for an unknown worker, or if ``epoch`` is already recorded.
        """
        worker = self._workers.get(worker_id)
        if worker and epoch not in worker.expected:
            worker.expected[epoch] = chunks
            depth, _ = self._longest(chunks, len(chunks), worker.bit)
            worker.unconfirmed.update(_mark(self._device, chunks[depth:], worker.bit))

    def settle(self, worker_id: str, epoch: int) -> None:
        """Record that the prompt of a dispatch was computed, or that it will not be."""
        worker = self._workers.get(worker_id)
        chunks = worker.expected.pop(epoch, ()) if worker else ()
        if worker and worker.unconfirmed and (gone := worker.unconfirmed.intersection(chunks)):
            gone.difference_update(*worker.expected.values())
            worker.unconfirmed -= gone
            _unmark(self._device, gone, worker.bit)

    def workers(self, mask: int) -> Iterator[str]:
        """Yield the ids of the workers of a bit mask."""
        return (self._ids[bit] for bit in _bits_of(mask))

    def bit(self, worker_id: str) -> int:
        """Return the bit of a worker in the masks; 0 if it is unknown."""
        worker = self._workers.get(worker_id)
        return worker.bit if worker else 0

    def depths(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """Return pairs of a number of leading chunks of ``chain`` and a mask of workers.

        The mask has the workers that have exactly this many leading chunks in device or host
        memory. The largest number is first. Workers that lack the first chunk are in no mask. The
        time is O(d log(n)) for n chunks and d pairs, however many workers there are.
        """
        depths: list[tuple[int, int]] = []
        others = -1
        depth, mask = self._longest(chain, len(chain), others)
        while depth:
            depths.append((depth, mask))
            others &= ~mask
            depth, mask = self._longest(chain, depth - 1, others)
        return depths

    def _longest(self, chain: Sequence[int], end: int, among: int) -> tuple[int, int]:
        """Return the length in chunks of the longest cached prefix, and the mask of its workers.

        Only prefixes of ``chain[:end]`` and workers of the mask ``among`` count. The result is (0,
        0) if none of these workers has the first chunk.
        """
        device, host = self._device, self._host
        mask = (device.get(chain[0], 0) | host.get(chain[0], 0)) & among if end else 0
        if not mask:
            return 0, 0
        # A worker evicts the end of a prefix before its beginning, so that masks only lose bits
        # along the chain.
        first, last = 0, end - 1
        while first < last:
            middle = (first + last + 1) // 2
            found = (device.get(chain[middle], 0) | host.get(chain[middle], 0)) & among
            if found:
                first, mask = middle, found
            else:
                last = middle - 1
        return first + 1, mask

    def host_chunks(self, worker_id: str, chain: Sequence[int]) -> int:
        """Return how many of ``chain``'s chunks the worker has in host memory only."""
        if self._host.keys().isdisjoint(chain):
            return 0
        bit = self.bit(worker_id)
        return sum(1 for it in chain if self._host.get(it, 0) & ~self._device.get(it, 0) & bit)


def _mark(masks: _Masks, chunks: Collection[int], bit: int) -> Collection[int]:
    """Add a worker to the masks of chunks, and return the chunks that it lacked."""
    # Unknown chunks, which are the most frequent case, are added without a Python loop.
    if masks.keys().isdisjoint(chunks):
        masks.update(zip(chunks, repeat(bit)))
        return chunks
    new = {it: mask | bit for it in chunks if not (mask := masks.get(it, 0)) & bit}
    masks.update(new)
    return new


def _unmark(masks: _Masks, chunks: Iterable[int], bit: int) -> None:
    """Remove a worker from the masks of chunks."""
    for chunk in chunks:
        if mask := masks.pop(chunk, 0) & ~bit:
            masks[chunk] = mask


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
