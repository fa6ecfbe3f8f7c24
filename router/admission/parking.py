"""Queued requests that wait for certain workers, and therefore do not block later ones. Pure."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from router.admission.request import Waiting


@dataclass(frozen=True, slots=True)
class Wait:
    """Decision that a request waits for a busy worker, or is tried again later.

    The wait ends at ``until`` at the latest, in seconds of the leader's clock. The busy worker has
    the first ``cached_tokens`` tokens of the request in its prefix cache. The alternative is an
    immediate dispatch to the best worker with free capacity. The best worker would need
    ``compute_s`` seconds to compute those of the ``cached_tokens`` tokens that it has not cached.

    ``saved_s`` is the cost of the alternative (``Choice.cost_s``) less the cost at the busy worker,
    which leaves out the pending prefill there. The value is at most the ``saved_s`` of the
    request's previous wait. ``worker_id`` is empty, and all numbers but ``until`` are 0, if no
    worker serves the request's adapter, or if only the worker that it avoids has capacity for it.
    """

    worker_id: str
    cached_tokens: int
    compute_s: float
    saved_s: float
    until: float


@dataclass(frozen=True, slots=True)
class Parked:
    """Request that has been parked since ``since``.

    ``since`` is in seconds of the leader's clock. ``number`` counts all waits in the order in which
    they began, from 0.
    """

    waiting: Waiting
    number: int
    wait: Wait
    since: float


class Parking:
    """Parked requests of each worker, in the order in which they were parked.

    A parked request stays in the admission queue, but has no place in the queue's order. The caller
    must call ``remove`` when the request leaves the queue. ``workers``, ``keep`` and ``release``
    take O(n) time for n parked requests, and ``expire`` O(log n) for each ended wait. Other
    operations take amortised O(log n) time.
    """

    def __init__(self) -> None:
        self._parked: dict[str, Parked] = {}
        self._numbers = count()
        #: by worker: numbers and ids of its requests, some of which may have left
        self._lines: dict[str, deque[tuple[int, str]]] = {}
        #: uncached tokens and choices of the requests that wait for each worker
        self._ahead: dict[str, tuple[int, int]] = {}
        #: ends of waits, some of which may be outdated
        self._ends: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._parked)

    def get(self, request_id: str) -> Parked | None:
        return self._parked.get(request_id)

    @property
    def next_expiry(self) -> float | None:
        """Time at which the first wait ends; None if no request is parked.

        The time is never too late, but may be too early, because the ends of removed requests'
        waits stay recorded until they have passed.
        """
        return self._ends[0][0] if self._ends and self._parked else None

    def add(self, waiting: Waiting, wait: Wait, now: float) -> None:
        request_id, number = waiting.request_id, next(self._numbers)
        self.remove(request_id)
        self._parked[request_id] = Parked(waiting, number, wait, now)
        self._lines.setdefault(wait.worker_id, deque()).append((number, request_id))
        heapq.heappush(self._ends, (wait.until, request_id))
        self._count(waiting, wait, 1)

    def remove(self, request_id: str) -> Parked | None:
        """Remove a request and return it; None if it is not parked."""
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            self._count(parked.waiting, parked.wait, -1)
        return parked

    def _count(self, waiting: Waiting, wait: Wait, sign: int) -> None:
        tokens, choices = self._ahead.get(wait.worker_id, (0, 0))
        tokens += sign * max(1, waiting.prefill_tokens - wait.cached_tokens)
        choices += sign * waiting.choices
        if choices:
            self._ahead[wait.worker_id] = tokens, choices
        else:
            del self._ahead[wait.worker_id]

    def ahead(self, worker_id: str) -> tuple[int, int]:
        """Return the uncached tokens and the choices of the requests that wait for a worker."""
        return self._ahead.get(worker_id, (0, 0))

    def workers(self) -> list[str]:
        """Return the ids of the workers for which requests wait.

        The empty id is included if a request waits for no particular worker.
        """
        return list(self._ahead)

    def first(self, worker_id: str) -> Parked | None:
        """Return the request that has waited longest for a worker; None if none waits for it."""
        line = self._lines.get(worker_id, deque())
        while line:
            number, request_id = line[0]
            parked = self._parked.get(request_id)
            if parked is not None and parked.number == number:
                return parked
            line.popleft()
        self._lines.pop(worker_id, None)
        return None

    def line(self, worker_id: str) -> Iterator[Parked]:
        """Yield the requests that wait for a worker, the one that has waited longest first.

        The empty id stands for no particular worker.
        """
        for number, request_id in self._lines.get(worker_id, ()):
            parked = self._parked.get(request_id)
            if parked is not None and parked.number == number:
                yield parked

    def expire(self, now: float) -> Iterator[Parked]:
        """Remove and yield the requests whose wait has ended at ``now``."""
        while self._ends and self._ends[0][0] <= now:
            until, request_id = heapq.heappop(self._ends)
            parked = self._parked.get(request_id)
            if parked is not None and parked.wait.until == until:
                self.remove(request_id)
                yield parked

    def keep(self, is_parked: Callable[[str], bool]) -> None:
        """Remove all requests but those whose ids ``is_parked`` accepts. O(n)."""
        for request_id in [it for it in self._parked if not is_parked(it)]:
            self.remove(request_id)

    def release(self, worker_ids: Iterable[str]) -> list[Parked]:
        """Remove and return all requests except those that wait for one of ``worker_ids``.

        Requests that wait for no particular worker are removed, too.
        """
        known = set(worker_ids)
        lost = [it for it in self._parked.values() if it.wait.worker_id not in known]
        self._lines = {it: line for it, line in self._lines.items() if it in known}
        for parked in lost:
            self.remove(parked.waiting.request_id)
        return lost
