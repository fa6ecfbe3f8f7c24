"""How fast workers make tokens, from what each has counted at two looks. Pure."""

from __future__ import annotations

from collections.abc import Iterable

#: Between two counts of a worker's tokens that a rate is made of, at least: a shorter one jumps.
_INTERVAL_S = 1.0


class Rates:
    """Tokens per second by worker."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}

    def of(self, worker_id: str, tokens: int, now: float) -> float:
        """``now`` in seconds. 0 until there are two looks."""
        then, before = self._marks.setdefault(worker_id, (now, tokens))
        if now - then >= _INTERVAL_S:
            self._marks[worker_id] = now, tokens
            self._rates[worker_id] = (tokens - before) / (now - then)
        return self._rates.get(worker_id, 0.0)

    def keep(self, worker_ids: Iterable[str]) -> None:
        """Forgets all other workers: they are gone."""
        kept = set(worker_ids)
        if kept == self._marks.keys():
            return
        self._marks = {name: mark for name, mark in self._marks.items() if name in kept}
        self._rates = {name: rate for name, rate in self._rates.items() if name in kept}
