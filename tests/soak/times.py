"""Times until a soak's faults were noticed, and until the affected streams continued.

Times are seconds since 1970: ledger, routers, clients and faults are on one machine.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import quantiles

from cluster.chaos.run import Injection
from router.ledger.entry import Event
from tests.soak.clients import Seen

#: Faults after which a worker sends nothing, or nothing that arrives.
SILENCING = frozenset({"kill worker", "pause worker", "partition worker"})
_OF_WORKERS = SILENCING | {"slow worker", "drain worker"}
#: Limits of the duration of faults of ledger and routers, and of the effects of a worker's loss.
_LASTS_S, _FOLLOWS_S = 4.0, 2.0
#: Fault after which another router leads.
LEADERS = "pause leader"
#: A loss that a router logs later than this after a fault was caused by another one.
_LATEST_S = 5.0
_CLOCK_S = 0.002


@dataclass(frozen=True)
class Line:
    time: float
    component: str
    event: str
    worker_id: str


def written(log_dir: Path) -> list[Line]:
    """Return the log lines of routers and workers, in order of time."""
    lines = (
        json.loads(line)
        for path in log_dir.glob("*.log")
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith("{") and line.endswith("}")
    )
    return sorted(
        (
            Line(
                datetime.fromisoformat(line["ts"]).timestamp(),
                line["component"],
                line["event"],
                line.get("worker_id", ""),
            )
            for line in lines
        ),
        key=lambda line: line.time,
    )


def struck(log: Sequence[Injection], lines: Sequence[Line]) -> list[Injection]:
    """Return the faults that took effect; if they silence a worker, with the time in its log.

    The time between the request for such a fault and its effect is thus not counted as silence.
    """
    own_words = [line for line in lines if line.event == "fault" and line.worker_id]
    return [
        moved
        for fault in log
        if not fault.error and (moved := _moved(fault, own_words)) is not None
    ]


def _moved(fault: Injection, own_words: Sequence[Line]) -> Injection | None:
    """Return the fault with the time in its worker's log, if it silences the worker.

    Return None if it did not take effect in time, because another fault ended the worker.
    """
    if fault.name not in SILENCING:
        return fault
    words = (line for line in _around(fault, own_words) if line.worker_id == fault.target)
    return next((replace(fault, at=line.time) for line in words), None)


def of_workers_alone(log: Sequence[Injection]) -> list[Injection]:
    """Return the faults that silence a worker while no router or ledger fault has an effect."""
    others = sorted(each.at for each in log if each.name not in _OF_WORKERS)
    return [
        each
        for each in log
        if each.name in SILENCING
        and bisect_left(others, each.at - _LASTS_S) == bisect_right(others, each.at + _FOLLOWS_S)
    ]


def _around(fault: Injection, lines: Sequence[Line]) -> Sequence[Line]:
    """Return the lines from the fault on that it may have caused."""
    begin = bisect_left(lines, fault.at - _CLOCK_S, key=lambda line: line.time)
    end = bisect_right(lines, fault.at + _LATEST_S, key=lambda line: line.time)
    return lines[begin:end]


def detections(log: Sequence[Injection], lines: Sequence[Line]) -> dict[str, list[float]]:
    """Return the seconds until each fault was noticed, by the fault's name.

    For a silenced worker, this is the time until each router logs the loss. For a router, it is the
    time until the next leader, if the router led.
    """
    found: dict[str, list[float]] = {}
    for fault in log:
        for line in _noticed(fault, lines):
            found.setdefault(fault.name, []).append(max(0.0, line.time - fault.at))
    return found


def _noticed(fault: Injection, lines: Sequence[Line]) -> Iterable[Line]:
    """Return each router's first line about the fault, for LEADERS only the very first one.

    Routers whose event loop stalled before, for example by a fault, are left out.
    """
    around = _around(fault, lines)
    about = [line for line in around if _is_about(line, fault)]
    if fault.name == LEADERS:
        return about[:1]
    first = {line.component: line for line in reversed(about)}
    return [line for line in first.values() if not _stood_still(line, around)]


def _stood_still(noticed: Line, around: Sequence[Line]) -> bool:
    return any(
        line.event == "event loop stalled"
        and line.component == noticed.component
        and line.time <= noticed.time + _CLOCK_S
        for line in around
    )


def _is_about(line: Line, fault: Injection) -> bool:
    if fault.name == LEADERS:
        return line.event == "leadership acquired"
    return (
        fault.name in SILENCING and line.event == "worker lost" and line.worker_id == fault.target
    )


def next_tokens(
    log: Sequence[Injection], seen: Iterable[Seen], events: Mapping[str, Sequence[Event]]
) -> list[float]:
    """Return the seconds from a worker's fault to the next token of each of its streams."""
    faults = [each for each in log if each.name in SILENCING]
    return [
        gap
        for stream in seen
        for worker_id, began, ended in _stays(events.get(stream.request_id, ()))
        for fault in faults
        if fault.target == worker_id and began < fault.at < ended
        if (gap := _gap(stream, fault.at)) is not None
    ]


def _stays(events: Sequence[Event]) -> Iterator[tuple[str, float, float]]:
    """Yield the worker, the start and the end of each attempt."""
    for index, event in enumerate(events):
        if event.move == "dispatch":
            later = [each.time for each in events[index + 1 :]]
            yield event.detail, event.time, later[0] if later else float("inf")


def _gap(stream: Seen, moment: float) -> float | None:
    """Return the seconds to the first token of another attempt.

    Return None if the stream was complete, or continued in the same attempt.
    """
    times = [time for time, _ in stream.arrivals]
    at = bisect_right(times, moment)
    before = stream.arrivals[at - 1][1] if at else 0
    return next((time - moment for time, epoch in stream.arrivals[at:] if epoch != before), None)


def p(cut: int, seconds: Sequence[float]) -> float:
    """Return percentile ``cut``, in seconds; 0 if there are no values."""
    if len(seconds) < 2:
        return round(sum(seconds), 3)
    return round(quantiles(seconds, n=100, method="inclusive")[cut - 1], 3)
