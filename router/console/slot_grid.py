"""Moves of requests between batch slots, derived from successive snapshots of some workers. Pure.

A request that appears in a slot of another worker was migrated. A request that left a slot and
appears in a slot of the same worker was preempted and has resumed, if the worker's number of
preemptions has increased. Otherwise the slot has another choice of the request, and nothing has
moved. A request that appears nowhere else has ended or is queued.

    slots of worker a:   |== r ==|                      left at 2 s
    slots of worker b:              |== r ==========    migrated at 3 s, from a's slot to this one
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from typing import NamedTuple

#: Seconds for which other slots are searched for a request that left its slot.
_SEARCH_S = 120.0
#: Maximum number of requests for which other slots are searched.
_MAX_SEARCHED = 2048
_CLEANUP_INTERVAL_S = 1.0


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
class SlotId:
    worker_id: str
    slot: int


class SlotOccupant(NamedTuple):
    request_id: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupants of a worker's slots at one time; ``occupants`` maps slot indices to requests.

    A lost worker has no occupants. ``preemptions`` is their number since the worker's start.
    """

    occupants: Mapping[int, SlotOccupant]
    preemptions: int = 0
    is_up: bool = True
    is_draining: bool = False


LOST = Occupancy({}, is_up=False)


@dataclass(frozen=True, slots=True)
class Change:
    """New state of a slot, after its occupant or the occupant's phase has changed.

    ``key`` is the number that stands for the request on the page; 0 means that the slot is empty.
    """

    slot_id: SlotId
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
    source: SlotId
    target: SlotId
    left_at: float


@dataclass(slots=True)
class _TrackedRequest:
    key: int
    slot_id: SlotId
    left_at: float | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Changes of the slot grid since the last update.

    ``requests`` has, by key, the ids of the requests that have entered a slot. A key is the number
    that stands for a request on the page.
    """

    slots: list[Change] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    requests: dict[int, str] = field(default_factory=dict)


class SlotGrid:
    """Tracker of the requests in the slots of the shown workers.

    The memory is bounded by the number of slots plus ``_MAX_SEARCHED``, the maximum number of
    requests that are remembered after they left their slots.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, Occupancy] = {}
        self._tracked: dict[str, _TrackedRequest] = {}
        self._last_key = 0
        self._cleaned_up_at = -inf

    def update(self, workers: Mapping[str, Occupancy], now: float) -> SlotChanges:
        """Return the changes since the last call, in O(slots of these workers).

        ``workers`` has the shown workers by id; ``now`` is in seconds.
        """
        changes = SlotChanges()
        for worker_id, occupancy in self._before.items():
            self._note_departures(worker_id, occupancy, workers.get(worker_id, LOST), now, changes)
        for worker_id, occupancy in workers.items():
            self._note_arrivals(worker_id, occupancy, workers, now, changes)
        self._before = workers
        if now - self._cleaned_up_at >= _CLEANUP_INTERVAL_S:
            self._cleaned_up_at = now
            self._clean_up(now)
        return changes

    def _note_departures(
        self, worker_id: str, before: Occupancy, after: Occupancy, now: float, changes: SlotChanges
    ) -> None:
        for slot, occupant in sorted(before.occupants.items() - after.occupants.items()):
            other = after.occupants.get(slot)
            if other is not None and other.request_id == occupant.request_id:
                continue
            slot_id, tracked = SlotId(worker_id, slot), self._tracked.get(occupant.request_id)
            if tracked is not None and tracked.slot_id == slot_id:
                tracked.left_at, tracked.preemptions = now, before.preemptions
                # Move the request to the end of the dict, which is then ordered by the times at
                # which requests left their slots.
                self._tracked[occupant.request_id] = self._tracked.pop(occupant.request_id)
            if other is None:
                changes.slots.append(Change(slot_id, 0, Phase.EMPTY))

    def _note_arrivals(
        self,
        worker_id: str,
        after: Occupancy,
        workers: Mapping[str, Occupancy],
        now: float,
        changes: SlotChanges,
    ) -> None:
        before = self._before.get(worker_id, LOST).occupants
        for slot, occupant in sorted(after.occupants.items() - before.items()):
            slot_id, known = SlotId(worker_id, slot), before.get(slot)
            is_new = known is None or known.request_id != occupant.request_id
            # A tracked request may have been removed after one of its choices left, while
            # another choice kept its slot.
            if is_new or occupant.request_id not in self._tracked:
                self._place_request(occupant.request_id, slot_id, workers, now, changes)
            tracked = self._tracked[occupant.request_id]
            changes.slots.append(Change(slot_id, tracked.key, occupant.phase))

    def _place_request(
        self,
        request_id: str,
        slot_id: SlotId,
        workers: Mapping[str, Occupancy],
        now: float,
        changes: SlotChanges,
    ) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            self._last_key += 1
            self._tracked[request_id] = _TrackedRequest(self._last_key, slot_id)
            changes.requests[self._last_key] = request_id
            return
        # The request may have been away for so long that the page has forgotten its id.
        changes.requests[tracked.key] = request_id
        if (cause := _cause(tracked, slot_id, workers)) is not None:
            # If the request's old slot was not seen empty yet, the request has left it just now.
            left_at = now if tracked.left_at is None else tracked.left_at
            changes.transfers.append(
                Transfer(tracked.key, request_id, cause, tracked.slot_id, slot_id, left_at)
            )
        tracked.slot_id, tracked.left_at = slot_id, None

    def _clean_up(self, now: float) -> None:
        gone = [name for name, tracked in self._tracked.items() if tracked.left_at is not None]
        for place, name in enumerate(gone):
            left_at = self._tracked[name].left_at
            assert left_at is not None
            if now - left_at > _SEARCH_S or len(gone) - place > _MAX_SEARCHED:
                del self._tracked[name]


def _cause(
    tracked: _TrackedRequest, slot_id: SlotId, workers: Mapping[str, Occupancy]
) -> Cause | None:
    source = workers.get(tracked.slot_id.worker_id, LOST)
    if tracked.slot_id.worker_id == slot_id.worker_id:
        was_preempted = tracked.left_at is not None and source.preemptions > tracked.preemptions
        return Cause.PREEMPTED if was_preempted else None
    if not source.is_up:
        return Cause.WORKER_LOST
    return Cause.WORKER_DRAINED if source.is_draining else Cause.MOVED


#: Maximum number of lanes of a page.
MAX_LANES = 8
#: Maximum number of lanes if the user has not chosen workers.
_MAX_AUTOMATIC_LANES = 6
#: Seconds for which a worker that is gone keeps its lane, so that users see where its requests
#: went.
_LANE_RETENTION_S = 60.0


class Lanes:
    """Assignment of workers to the lanes of a page; a lane is an area that shows a worker's slots.

    A worker keeps its lane while it is connected. ``chosen`` has the ids of the workers that the
    user has chosen; None means that connected workers are chosen automatically.
    """

    def __init__(self, chosen: Sequence[str] | None) -> None:
        self._is_chosen = chosen is not None
        self.worker_ids = list(dict.fromkeys(chosen or ()))[:MAX_LANES]
        #: time in seconds since which a worker with a lane is gone, by worker
        self._gone_since: dict[str, float] = {}

    def update(self, connected: Collection[str], now: float) -> None:
        """Assign lanes to connected workers, unless the user has chosen workers.

        ``connected`` has the ids of the connected workers, in an order that does not change.
        """
        if self._is_chosen:
            return
        gone = [worker_id for worker_id in self.worker_ids if worker_id not in connected]
        self._gone_since = {worker_id: self._gone_since.get(worker_id, now) for worker_id in gone}
        for worker_id in connected:
            if worker_id not in self.worker_ids and not self._assign_lane(worker_id, now):
                return

    def _assign_lane(self, worker_id: str, now: float) -> bool:
        if len(self.worker_ids) < _MAX_AUTOMATIC_LANES:
            self.worker_ids.append(worker_id)
            return True
        old = next(
            (
                gone_id
                for gone_id, since in self._gone_since.items()
                if now - since >= _LANE_RETENTION_S
            ),
            None,
        )
        if old is None:
            return False
        del self._gone_since[old]
        self.worker_ids[self.worker_ids.index(old)] = worker_id
        return True
