"""Findings of the search for broken requests, in valid and in broken ledgers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.chaos.check import check
from cluster.chaos.checker import Finding, Kind, Living, examine
from everlift.messages import FinishReason
from everlift.v1 import session_pb2
from router.ledger.entry import Append, Entry, Event, State
from router.ledger.listing import Audited, Claim, Item, Listed, Stray
from router.ledger.memory.memory import MemoryLedger
from tests.support.ledger.ledgers import Clock, make_request

TERM = 7
LIVING = Living(gateways={"g"}, workers={"w"})
EVENTS = ("open", "dispatch w", "release lost", "dispatch w", "finish")


def history(*moves: str) -> tuple[Event, ...]:
    return tuple(Event(float(at), *_split(move)) for at, move in enumerate(moves))


def _split(move: str) -> tuple[str, str]:
    name, _, detail = move.partition(" ")
    return name, detail


def finished(**changes: object) -> Audited:
    """Return a consistent finished request, which was lost once, with ``changes``."""
    entry = Entry(
        "r",
        State.FINISHED,
        "g",
        arrived=0.0,
        num_tokens=(8,),
        attempts=2,
        losses=1,
        finish_reasons=(FinishReason.LENGTH,),
        moves=5,
    )
    audited = Audited(entry, max_tokens=8, finished_by=9, events=history(*EVENTS), owned=False)
    ours = {name: changes.pop(name) for name in list(changes) if name in Audited.__slots__}
    return replace(audited, entry=replace(entry, **changes), **ours)


def running(**changes: object) -> Audited:
    return finished(
        **{
            "state": State.RUNNING,
            "worker": "w",
            "epoch": 9,
            "finish_reasons": (None,),
            "moves": 4,
            "finished_by": 0,
            "events": history(*EVENTS[:-1]),
            "owned": True,
        }
        | changes
    )


def found(item: Item, living: Living = LIVING) -> list[Kind]:
    return [finding.kind for finding in examine(item, living)]


def test_chaos_checker_accepts_consistent_requests() -> None:
    assert found(finished()) == []
    assert found(running()) == []
    assert found(Claim("r", "g", State.RUNNING, "g")) == []
    assert found(Listed("t/r", "t", is_maintained=True)) == []


@pytest.mark.parametrize(
    ("item", "kind", "detail"),
    [
        (running(owned=False), Kind.LOST, "gateway g does not own it"),
        (running(gateway="dead"), Kind.LOST, "its gateway dead is gone"),
        (running(worker="dead"), Kind.LOST, "it runs on worker dead, which is gone"),
        (running(missing=("t:r:0",)), Kind.LOST, "its key t:r:0 is missing"),
        (finished(owned=True), Kind.ORPHANED, "finished, but gateway g still owns it"),
        (finished(num_tokens=(9,)), Kind.REPEATED, "choice 0 has 9 of 8 tokens"),
        (finished(finished_by=0), Kind.REORDERED, "finished, but not by an append"),
        (running(finished_by=9), Kind.REORDERED, "running, but an append has finished it"),
        (running(epoch=0), Kind.REORDERED, "running on worker w, with no epoch"),
        (finished(attempts=3), Kind.REORDERED, "3 attempts, but 2 dispatches"),
        (finished(losses=0), Kind.REORDERED, "0 losses, but 1 releases with a cause"),
        (
            finished(finish_reasons=(None,)),
            Kind.REORDERED,
            "finished, but its finish reasons are none",
        ),
        (
            finished(immortal=("t:r:0",)),
            Kind.IMMORTAL,
            "t:r:0 of a finished request never expires",
        ),
        (Stray("r", "t:r:0"), Kind.ORPHANED, "t:r:0 has no request"),
        (
            running(listed=False),
            Kind.MISLISTED,
            "a listing lacks it, or has it at another time than its arrival",
        ),
        (
            Listed("r", "t", is_maintained=False),
            Kind.MISLISTED,
            "the listing of tenant t has it, but the listing of all requests does not",
        ),
        (
            Claim("r", "g", None, ""),
            Kind.LOST,
            "gateway g owns it, but there is no such request",
        ),
        (Claim("r", "g", State.FINISHED, "g"), Kind.LOST, "gateway g owns it, but it is finished"),
        (Claim("r", "g", State.QUEUED, "h"), Kind.LOST, "gateway g owns it, but its owner is h"),
    ],
)
def test_chaos_checker_reports_each_inconsistency(item: Item, kind: Kind, detail: str) -> None:
    assert examine(item, LIVING) == [Finding(kind, "r", detail)]


@pytest.mark.parametrize(
    ("moves", "kind", "detail"),
    [
        ("open, dispatch w, dispatch v", Kind.REPEATED, "dispatch of a request that was running"),
        ("dispatch w", Kind.REORDERED, "dispatch of a request that was absent"),
        ("open, finish", Kind.REORDERED, "finish of a request that was queued"),
        (
            "open, dispatch w, finish, release",
            Kind.REORDERED,
            "release of a request that was finished",
        ),
        ("open, open", Kind.REORDERED, "open of a request that was queued"),
        ("open, leap", Kind.REORDERED, "leap of a request that was queued"),
        ("open", Kind.REORDERED, "running after open"),
    ],
)
def test_chaos_checker_reports_impossible_moves(moves: str, kind: Kind, detail: str) -> None:
    item = running(events=history(*moves.split(", ")), moves=moves.count(",") + 1)
    assert examine(item, LIVING)[0] == Finding(kind, "r", detail)


def test_chaos_checker_examines_the_last_of_many_moves() -> None:
    last = ("release", "dispatch w", "release", "dispatch w")
    assert found(running(events=history(*last), moves=90, attempts=45)) == []
    wrong = running(events=history(*last, "dispatch w"), moves=90)
    assert found(wrong) == [Kind.REPEATED]


def test_chaos_checker_accepts_any_past_before_a_resync() -> None:
    """The Redis server has lost earlier moves: the history begins with the resync."""
    events = history("open", "reassert g", "finish")
    assert found(finished(events=events, moves=9, attempts=4)) == []
    assert found(finished(events=events[:2], moves=9, finished_by=0)) == []


def test_chaos_checker_finds_no_loss_in_a_stopped_cluster() -> None:
    nobody = Living(gateways=set(), workers=set())
    assert found(running(gateway="dead", worker="dead"), nobody) == []


# whole ledgers


class Script:
    """Ledger actions that run during the waits of the checker."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.ledger = ledger
        self.waits: list[float] = []

    async def successor_comes(self, seconds: float) -> None:
        self.waits.append(seconds)
        await self.ledger.heartbeat("successor", "h:1", 60.0)
        await self.ledger.take_over("r", "successor", "g")

    async def nobody_comes(self, seconds: float) -> None:
        self.waits.append(seconds)


async def a_ledger() -> MemoryLedger:
    """Return a ledger with a running request and an ended one."""
    ledger = MemoryLedger(Clock())
    await ledger.heartbeat("g", "g:1", 60.0)
    await ledger.heartbeat("other", "o:1", 3600.0)
    await ledger.lead("g", "g:1", TERM, 60.0)
    await ledger.put_worker(session_pb2.WorkerInfo(worker_id="w", address="w:1"))
    for name in ("r", "done"):
        await ledger.open(make_request(name), "g")
        await ledger.dispatch(name, "w", 9, TERM)
    await ledger.append([Append("done", 9, 0, (1, 2), finish_reason=FinishReason.STOP)])
    return ledger


async def test_chaos_check_counts_states_and_tokens() -> None:
    ledger = await a_ledger()
    script = Script(ledger)
    result = await check(ledger, sleep=script.nobody_comes)
    assert result.states == {State.RUNNING: 1, State.FINISHED: 1}
    assert (result.tokens, result.findings, script.waits) == (2, (), [])


async def test_chaos_check_drops_findings_repaired_meanwhile() -> None:
    ledger = await a_ledger()
    await ledger.end_lease("g")
    script = Script(ledger)
    result = await check(ledger, 3.0, script.successor_comes)
    assert (result.findings, script.waits) == ((), [3.0])


async def test_chaos_check_keeps_persistent_findings() -> None:
    ledger = await a_ledger()
    await ledger.end_lease("g")
    result = await check(ledger, 3.0, Script(ledger).nobody_comes)
    assert result.findings == (Finding(Kind.LOST, "r", "its gateway g is gone"),)
