"""Events of a cluster for the console, derived from successive views of its state. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from router.console.workers import Row, State

Json = dict[str, Any]

#: Maximum number of events that a new page receives.
_MAX_EVENTS = 256
#: Maximum number of workers that an event names. The event also has the total number of workers.
_MAX_NAMED_WORKERS = 16
#: Minimum seconds between two events with the number of preemptions.
_PREEMPTIONS_S = 5.0


@dataclass(frozen=True, slots=True)
class ConsoleEvent:
    """Event that the console shows; ``at`` is its time in seconds (``event_loop.now()``).

    The keys of ``details`` depend on ``kind``.
    """

    number: int
    at: float
    kind: str
    details: Mapping[str, Any]

    def as_json(self) -> Json:
        return {"at": round(self.at, 2), "kind": self.kind, **self.details}


@dataclass(frozen=True, slots=True)
class View:
    """State of the cluster at one time; events are differences between two successive views."""

    rows: Sequence[Row]
    leader: str
    ledger_away: bool
    ledger_rollbacks: int
    policy: Mapping[str, Any]


class EventLog:
    """Log of the latest events, which are numbered from 1."""

    def __init__(self) -> None:
        self._events: deque[ConsoleEvent] = deque(maxlen=_MAX_EVENTS)
        self._before: View | None = None
        self._number = 0
        #: preemptions that no event has reported yet, and the time of the last such event
        self._preempted, self._preempted_at = 0, -inf

    def after(self, number: int) -> list[ConsoleEvent]:
        """Return the events in the log whose numbers are above ``number``, oldest first."""
        return [each for each in self._events if each.number > number]

    @property
    def last(self) -> int:
        return self._number

    def update(self, view: View, now: float) -> None:
        """Record events for what has changed since the last view; the first view yields none."""
        before, self._before = self._before, view
        if before is None:
            return
        for kind, details in _differences(before, view):
            self._record(now, kind, details)
        self._preempted += _preemptions(before.rows, view.rows)
        if self._preempted and now - self._preempted_at >= _PREEMPTIONS_S:
            self._record(now, "preempted", {"count": self._preempted})
            self._preempted, self._preempted_at = 0, now

    def _record(self, now: float, kind: str, details: Json) -> None:
        self._number += 1
        self._events.append(ConsoleEvent(self._number, now, kind, details))


def _differences(before: View, after: View) -> Iterator[tuple[str, Json]]:
    yield from _of_workers(before.rows, after.rows)
    if after.leader != before.leader:
        yield ("leader", {"router_id": after.leader})
    if after.ledger_away != before.ledger_away:
        yield ("ledger_away" if after.ledger_away else "ledger_back", {})
    if after.ledger_rollbacks > before.ledger_rollbacks:
        yield ("ledger_rollback", {})
    if after.policy != before.policy:
        changed = {k: v for k, v in after.policy.items() if before.policy.get(k) != v}
        yield ("policy", {"changed": changed})


def _of_workers(before: Sequence[Row], after: Sequence[Row]) -> Iterator[tuple[str, Json]]:
    known = {row.worker_id: row for row in before}
    found: dict[str, list[str]] = {}
    for row in after:
        was = known.pop(row.worker_id, None)
        if kind := _change(was, row):
            found.setdefault(kind, []).append(row.worker_id)
    gone = [name for name, row in known.items() if row.state is not State.LOST]
    if gone:
        found.setdefault("worker_left", []).extend(gone)
    for kind, worker_ids in found.items():
        yield kind, {"workers": worker_ids[:_MAX_NAMED_WORKERS], "count": len(worker_ids)}


def _preemptions(before: Sequence[Row], after: Sequence[Row]) -> int:
    known = {row.worker_id: row.preemptions for row in before}
    return sum(max(0, row.preemptions - known.get(row.worker_id, row.preemptions)) for row in after)


def _change(was: Row | None, row: Row) -> str:
    before = State.LOST if was is None else was.state
    if row.state is before:
        return ""
    if row.state is State.LOST:
        return "worker_lost" if was is not None else ""
    if before is State.LOST:
        return "worker_joined"
    return {State.DRAINING: "worker_draining", State.SLOW: "worker_slow"}.get(row.state, "")
