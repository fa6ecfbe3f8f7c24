"""Prompt tokens that a perfect router would reuse: with infinite caches, and with one for all.

Every request runs with the cache of all earlier ones, as if there were only one worker.
``InfiniteCache`` never evicts; ``PooledCache`` is one least-recently-used cache as large as those
of all workers together. What is reused depends on when requests arrive, not on when they end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TypeAlias

from cluster.simulator.workloads.arrivals import Arrival
from everlift.hashes import BLOCK_SIZE

_Stem: TypeAlias = Hashable


def _reusable(arrival: Arrival, tokens: int) -> int:
    """Return how many of the leading tokens can be reused: whole blocks, but not the last token."""
    return min(tokens, arrival.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def _stems(arrival: Arrival) -> Iterator[_Stem]:
    """Yield a name for each shared part of a prompt, which depends on all parts before it."""
    stem: _Stem = arrival.tenant
    for part in arrival.prefix:
        stem = hash((stem, part))
        yield stem


class InfiniteCache:
    def __init__(self) -> None:
        self._stems: set[_Stem] = set()
        #: by session: tokens of its last prompt and output
        self._sessions: dict[int, int] = {}

    def add(self, arrival: Arrival) -> int:
        """Add a request, and return how many of its tokens earlier ones had."""
        num_parts = 0
        stems = [*_stems(arrival)]
        while num_parts < len(stems) and stems[num_parts] in self._stems:
            num_parts += 1
        self._stems.update(stems)
        tokens = num_parts * arrival.prefix_part_tokens
        if arrival.session:
            tokens = max(tokens, self._sessions.get(arrival.session, 0))
            # Keys and values of the last output token are never computed.
            end = arrival.prompt_tokens + arrival.output_tokens - 1
            self._sessions[arrival.session] = end
        return _reusable(arrival, tokens)


#: Tokens that the pooled cache evicts together.
_UNIT = 512


class PooledCache:
    """Cache of ``capacity_tokens`` tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens // _UNIT
        self._units: OrderedDict[_Stem, None] = OrderedDict()
        self._requests = 0

    def add(self, arrival: Arrival) -> int:
        """Add a request, and return how many of its tokens the cache had."""
        self._requests += 1
        units = self._names(arrival)
        num_units = 0
        while num_units < len(units) and units[num_units] in self._units:
            num_units += 1
        # The end is evicted before the beginning.
        for unit in reversed(units):
            self._units[unit] = None
            self._units.move_to_end(unit)
        while len(self._units) > self._capacity:
            self._units.popitem(last=False)
        return _reusable(arrival, num_units * _UNIT)

    def _names(self, arrival: Arrival) -> list[_Stem]:
        shared = [*_stems(arrival)] if arrival.prefix_part_tokens == _UNIT else []
        tokens = arrival.prompt_tokens + arrival.output_tokens - 1
        own = arrival.session or -self._requests
        return [*shared, *((own, unit) for unit in range(len(shared), tokens // _UNIT))]
