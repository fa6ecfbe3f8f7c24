"""Workers that may have room, the least burdened first. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TypeAlias

#: A worker's burden (``WorkerView``), and its id.
Rank: TypeAlias = tuple[bool, int, int, str]


class Roster:
    """A change costs O(log n), and the move of some pointers in a list."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._rank_of: dict[str, Rank] = {}

    def put(self, rank: Rank) -> None:
        """In place of the rank that this worker had."""
        if self._rank_of.get(rank[-1]) != rank:
            self.remove(rank[-1])
            self._rank_of[rank[-1]] = rank
            insort(self._ranks, rank)

    def remove(self, worker_id: str) -> None:
        rank = self._rank_of.pop(worker_id, None)
        if rank is not None:
            del self._ranks[bisect_left(self._ranks, rank)]

    def __iter__(self) -> Iterator[str]:
        return (rank[-1] for rank in self._ranks)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._rank_of

    def in_order(self, worker_ids: set[str]) -> list[str]:
        """Those of them that are here, in its order."""
        ranks = sorted(rank for it in worker_ids if (rank := self._rank_of.get(it)) is not None)
        return [rank[-1] for rank in ranks]
