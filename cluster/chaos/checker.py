"""Invariants that every request in the ledger fulfils, even after faults. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum

from router.ledger.entry import Entry, Event, Move, State
from router.ledger.listing import Audited, Chunk, Claim, Item, Listed, Stray


class Kind(Enum):
    #: one of these: an unfinished request that no living gateway or worker will continue; a request
    #: with a missing key; an id in a gateway's set of unfinished requests, if the request does not
    #: exist, is final or belongs to another gateway
    LOST = "lost"
    #: a request with more output tokens than max_tokens, or one that was dispatched while running
    REPEATED = "repeated"
    #: a request whose events or counters do not match its state, or with a forbidden transition
    REORDERED = "reordered"
    #: a key without a request, or a final request that a gateway still owns
    ORPHANED = "orphaned"
    #: a key that never expires
    IMMORTAL = "immortal"
    #: a request that is missing or at a wrong time in one of its listings, or in a listing from
    #: which it is never removed
    MISLISTED = "mislisted"


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    request_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class Living:
    """Ids of the live routers and of the registered workers, as the ledger knows them.

    A router is called a gateway here, because it owns the requests that arrived at it. It is alive
    while its lease in the ledger has not expired.
    """

    gateways: Set[str]
    workers: Set[str]


def examine(item: Item, living: Living) -> list[Finding]:
    """Return the violations of invariants that ``item`` shows; empty if there are none.

    An item is what the ledger's audit yields: a request with its keys, or a single suspect key.
    """
    match item:
        case Audited():
            return [Finding(kind, item.request_id, detail) for kind, detail in _all(item, living)]
        case Claim():
            return [Finding(Kind.LOST, item.request_id, detail) for detail in _claim(item)]
        case Stray():
            detail = f"{item.key} has no request"
            return [Finding(Kind.ORPHANED, item.request_id, detail)]
        case Listed(is_maintained=True):
            return []
        case Listed():
            whose = f"tenant {item.tenant}" if item.tenant else f"session {item.session}"
            detail = f"the listing of {whose} has it, but the listing of all requests does not"
            return [Finding(Kind.MISLISTED, item.request_id, detail)]
        case Chunk(is_linked=True):
            return []
        case Chunk():
            detail = f"the prompt chunk before c:{item.name} is missing"
            return [Finding(Kind.LOST, "", detail)]


Violations = Iterator[tuple[Kind, str]]


def _all(item: Audited, living: Living) -> Violations:
    yield from _ownership(item, living)
    yield from _epoch(item.entry)
    yield from _tokens(item)
    yield from _moves(item)
    if not item.listed:
        yield Kind.MISLISTED, "a listing lacks it, or has it at another time than its arrival"
    for key in item.missing:
        yield Kind.LOST, f"its key {key} is missing"
    for key in item.immortal:
        yield Kind.IMMORTAL, f"{key} of a {item.entry.state.value} request never expires"


def _ownership(item: Audited, living: Living) -> Violations:
    entry = item.entry
    if entry.state.is_final:
        if item.owned:
            yield Kind.ORPHANED, f"{entry.state.value}, but gateway {entry.gateway} still owns it"
        return
    if not item.owned:
        yield Kind.LOST, f"gateway {entry.gateway} does not own it"
    if not living.gateways:
        # The cluster is stopped, and continues the request at its next start.
        return
    if item.owned and entry.gateway not in living.gateways:
        yield Kind.LOST, f"its gateway {entry.gateway} is gone"
    if entry.state is State.RUNNING and entry.worker not in living.workers:
        yield Kind.LOST, f"it runs on worker {entry.worker}, which is gone"


def _claim(item: Claim) -> Iterator[str]:
    if item.state is None:
        yield f"gateway {item.gateway} owns it, but there is no such request"
    elif item.state.is_final:
        yield f"gateway {item.gateway} owns it, but it is {item.state.value}"
    elif item.owner != item.gateway:
        yield f"gateway {item.gateway} owns it, but its owner is {item.owner}"


def _epoch(entry: Entry) -> Violations:
    runs = entry.state is State.RUNNING
    if runs != bool(entry.epoch) or runs != bool(entry.worker):
        worker, epoch = entry.worker or "none", "an" if entry.epoch else "no"
        yield Kind.REORDERED, f"{entry.state.value} on worker {worker}, with {epoch} epoch"


def _tokens(item: Audited) -> Violations:
    entry = item.entry
    for choice, count in enumerate(entry.num_tokens):
        if count > item.max_tokens:
            yield Kind.REPEATED, f"choice {choice} has {count} of {item.max_tokens} tokens"
    is_finished = entry.state is State.FINISHED
    if is_finished != all(entry.finish_reasons):
        yield Kind.REORDERED, f"{entry.state.value}, but its finish reasons are {_ends(entry)}"
    if item.finished_by and not is_finished:
        yield Kind.REORDERED, f"{entry.state.value}, but an append has finished it"
    if is_finished and not item.finished_by and not _was_resynced(item):
        yield Kind.REORDERED, "finished, but not by an append"


def _ends(entry: Entry) -> str:
    return ", ".join(reason.name.lower() if reason else "none" for reason in entry.finish_reasons)


# Checks of a request's event history.

_TARGETS = {move.name.lower(): move for move in Move} | {"finish": Move.APPEND}
_ANY = frozenset(State)
_NO_STATE: frozenset[State] = frozenset()


def _moves(item: Audited) -> Violations:
    entry, events = item.entry, item.events
    states = _NO_STATE if _is_complete(item) else _ANY
    for event in events:
        before, states = states, _after(event, states)
        if not states:
            is_twice = event.move == "dispatch" and before == {State.RUNNING}
            kind = Kind.REPEATED if is_twice else Kind.REORDERED
            yield kind, f"{event.move} of a request that was {_named(before)}"
            return
    if events and entry.state not in states:
        yield Kind.REORDERED, f"{entry.state.value} after {events[-1].move}"
    if _is_complete(item):
        yield from _counts(entry, events)


def _is_complete(item: Audited) -> bool:
    return len(item.events) == item.entry.moves and not _was_resynced(item)


def _was_resynced(item: Audited) -> bool:
    return any(event.move == "reassert" for event in item.events)


def _after(event: Event, states: frozenset[State]) -> frozenset[State]:
    if event.move == "reassert":
        return _ANY
    move = _TARGETS.get(event.move)
    if move is None:
        return _NO_STATE
    if event.move == "open":
        return frozenset() if states and states != _ANY else frozenset(move.targets)
    if not states & {*move.sources}:
        return _NO_STATE
    return frozenset({State.FINISHED}) if event.move == "finish" else frozenset(move.targets)


def _named(states: frozenset[State]) -> str:
    return " or ".join(sorted(state.value for state in states)) or "absent"


def _counts(entry: Entry, events: Sequence[Event]) -> Violations:
    dispatches = sum(event.move == "dispatch" for event in events)
    losses = sum(event.move == "release" and event.detail != "" for event in events)
    if entry.attempts != dispatches:
        yield Kind.REORDERED, f"{entry.attempts} attempts, but {dispatches} dispatches"
    if entry.losses != losses:
        yield Kind.REORDERED, f"{entry.losses} losses, but {losses} releases with a cause"
