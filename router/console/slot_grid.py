"""Moves of requests between batch slots, derived from successive snapshots of some workers. Pure.

A request that leaves a slot and later appears in another one has moved. At another worker it was
migrated; at the same worker it was preempted and has resumed. A request that appears nowhere else
has ended or is queued.

    slots of worker a:   |== r ==|                      left at 2 s
    slots of worker b:              |== r ==========    migrated at 3 s, from a's slot to this one
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from typing import NamedTuple

#: Seconds for which other slots are searched for a request that left its slot, and maximum number
#: of such requests.
_LOOKED_FOR_S = 120.0
_MOST_LOOKED_FOR = 2048
_FORGET_EVERY_S = 1.0


class Phase(IntEnum):
    EMPTY = 0
    PREFILL = 1
    DECODE = 2


class Cause(Enum):
    """Cause of a request's move to another slot."""

    WORKER_LOST = "worker_lost"
    WORKER_DRAINED = "worker_drained"
    MOVED = "moved"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class Seat:
    worker_id: str
    slot: int


class Sitter(NamedTuple):
    request_id: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupants of a worker's slots at one time; ``sitters`` maps slot indices to requests.

    A lost worker has none. ``preemptions`` is the number of preemptions since the worker's start.
    """

    sitters: Mapping[int, Sitter]
    preemptions: int = 0
    is_up: bool = True
    is_draining: bool = False


LOST = Occupancy({}, is_up=False)


@dataclass(frozen=True, slots=True)
class Change:
    """New state of a slot, after its occupant or the occupant's phase has changed.

    ``key`` is the number that stands for the request on the page; 0 means that the slot is empty.
    """

    seat: Seat
    key: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move of a request between slots; it left ``source`` at the time ``left_at``, in seconds.

    ``key`` is the number that stands for the request on the page.
    """

    key: int
    request_id: str
    cause: Cause
    source: Seat
    target: Seat
    left_at: float


@dataclass(slots=True)
class _Trace:
    key: int
    seat: Seat
    left_at: float | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """Changes since the last update; ``requests`` maps keys of new requests to their ids."""

    changes: list[Change] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    requests: dict[int, str] = field(default_factory=dict)


class SlotGrid:
    """Tracker of the requests in the slots of the shown workers.

    Its memory is bounded by the number of slots and by ``_MOST_LOOKED_FOR``.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, Occupancy] = {}
        self._traces: dict[str, _Trace] = {}
        self._last_key = 0
        self._forgot_at = -inf

    def update(self, workers: Mapping[str, Occupancy], now: float) -> News:
        """Return the changes since the last call, in O(slots of these workers).

        ``workers`` has the shown workers by id; ``now`` is in seconds.
        """
        news = News()
        for worker_id, occupancy in self._before.items():
            self._leave(worker_id, occupancy, workers.get(worker_id, LOST), now, news)
        for worker_id, occupancy in workers.items():
            self._board(worker_id, occupancy, workers, now, news)
        self._before = workers
        if now - self._forgot_at >= _FORGET_EVERY_S:
            self._forgot_at = now
            self._forget(now)
        return news

    def _leave(
        self, worker_id: str, before: Occupancy, after: Occupancy, now: float, news: News
    ) -> None:
        for slot, sitter in sorted(before.sitters.items() - after.sitters.items()):
            other = after.sitters.get(slot)
            if other is not None and other.request_id == sitter.request_id:
                continue
            seat, trace = Seat(worker_id, slot), self._traces.get(sitter.request_id)
            if trace is not None and trace.seat == seat:
                trace.left_at, trace.preemptions = now, before.preemptions
                # Move the trace to the end, so that traces are ordered by the time at which
                # requests left.
                self._traces[sitter.request_id] = self._traces.pop(sitter.request_id)
            if other is None:
                news.changes.append(Change(seat, 0, Phase.EMPTY))

    def _board(
        self,
        worker_id: str,
        after: Occupancy,
        workers: Mapping[str, Occupancy],
        now: float,
        news: News,
    ) -> None:
        before = self._before.get(worker_id, LOST).sitters
        for slot, sitter in sorted(after.sitters.items() - before.items()):
            seat, known = Seat(worker_id, slot), before.get(slot)
            is_new = known is None or known.request_id != sitter.request_id
            # The trace of a request may have been removed after one of its choices left, while
            # another choice kept its slot.
            if is_new or sitter.request_id not in self._traces:
                self._sit(sitter.request_id, seat, workers, now, news)
            trace = self._traces[sitter.request_id]
            news.changes.append(Change(seat, trace.key, sitter.phase))

    def _sit(
        self,
        request_id: str,
        seat: Seat,
        workers: Mapping[str, Occupancy],
        now: float,
        news: News,
    ) -> None:
        trace = self._traces.get(request_id)
        if trace is None:
            self._last_key += 1
            self._traces[request_id] = _Trace(self._last_key, seat)
            news.requests[self._last_key] = request_id
            return
        # The request may have been away for so long that the page has forgotten its id.
        news.requests[trace.key] = request_id
        if (cause := _cause(trace, seat, workers)) is not None:
            # If the slot that it left was not seen empty yet, it has left just now.
            left_at = now if trace.left_at is None else trace.left_at
            news.transfers.append(Transfer(trace.key, request_id, cause, trace.seat, seat, left_at))
        trace.seat, trace.left_at = seat, None

    def _forget(self, now: float) -> None:
        gone = [name for name, trace in self._traces.items() if trace.left_at is not None]
        for place, name in enumerate(gone):
            left_at = self._traces[name].left_at
            assert left_at is not None
            if now - left_at > _LOOKED_FOR_S or len(gone) - place > _MOST_LOOKED_FOR:
                del self._traces[name]


def _cause(trace: _Trace, seat: Seat, workers: Mapping[str, Occupancy]) -> Cause | None:
    source = workers.get(trace.seat.worker_id, LOST)
    if trace.seat.worker_id == seat.worker_id:
        was_preempted = trace.left_at is not None and source.preemptions > trace.preemptions
        return Cause.PREEMPTED if was_preempted else None
    if not source.is_up:
        return Cause.WORKER_LOST
    return Cause.WORKER_DRAINED if source.is_draining else Cause.MOVED


#: Maximum number of lanes, and their number if the page has not chosen workers.
MOST_LANES = 8
_MOST_BY_THEMSELVES = 6
#: Seconds for which a worker that is gone keeps its lane, so that users see where its requests
#: went.
_KEPT_S = 60.0


class Lanes:
    """Workers whose slots a page shows, each in a lane: an area of the page that it keeps.

    ``chosen`` has the ids of the workers that the user has chosen; None means that connected ones
    are chosen automatically.
    """

    def __init__(self, chosen: Sequence[str] | None) -> None:
        self._is_chosen = chosen is not None
        self.worker_ids = list(dict.fromkeys(chosen or ()))[:MOST_LANES]
        #: time in seconds since which a worker with a lane is gone, by worker
        self._gone: dict[str, float] = {}

    def update(self, there: Collection[str], now: float) -> None:
        """Assign lanes to connected workers, unless the user has chosen workers.

        ``there`` has the ids of the connected workers, in an order that does not change.
        """
        if self._is_chosen:
            return
        gone = [worker_id for worker_id in self.worker_ids if worker_id not in there]
        self._gone = {worker_id: self._gone.get(worker_id, now) for worker_id in gone}
        for worker_id in there:
            if worker_id not in self.worker_ids and not self._take(worker_id, now):
                return

    def _take(self, worker_id: str, now: float) -> bool:
        if len(self.worker_ids) < _MOST_BY_THEMSELVES:
            self.worker_ids.append(worker_id)
            return True
        old = next((it for it, since in self._gone.items() if now - since >= _KEPT_S), None)
        if old is None:
            return False
        del self._gone[old]
        self.worker_ids[self.worker_ids.index(old)] = worker_id
        return True
