"""Faults that can be injected, and their targets. Pure.

The table shows the parameter of each kind of fault for each target, or "yes" if the fault has no
parameter. "-" means that the target cannot have the fault. All faults except KILL also have a
duration, ``seconds``.

    target    KILL   PAUSE   PARTITION from                     SLOW
    worker    rank   rank    all routers | one router           factor
    router    yes    yes     all | the ledger | one worker      -
    ledger    yes    yes     all routers | one router           delay_s
"""

from __future__ import annotations

from enum import Enum

from everlift.checks import check_range
from everlift.errors import InvalidRequest, OutOfRange
from everlift.v1 import chaos_pb2 as pb

LEDGER = "ledger"
LEADER = "leader"
ANY_WORKER = "any-worker"
ANY_ROUTER = "any-router"

MAX_SECONDS = 600.0
MAX_FACTOR = 1000.0
MAX_DELAY_S = 60.0
_SHORTEST_S = 0.001


class Part(Enum):
    """Kind of target of a fault."""

    WORKER = "worker"
    ROUTER = "router"
    LEDGER = "ledger"


#: Kinds of peers that each kind of target can be partitioned from.
_PEERS = {
    Part.WORKER: (Part.ROUTER,),
    Part.ROUTER: (Part.LEDGER, Part.WORKER),
    Part.LEDGER: (Part.ROUTER,),
}


def check_fault(fault: pb.Fault, target: Part, peer: Part | None, num_ranks: int = 1) -> None:
    """Check that a fault can be injected into a target with ``num_ranks`` ranks.

    ``peer`` is the kind of the peer that the target is partitioned from, or None for all peers.
    Raises OutOfRange for a number that is too small or too large, and InvalidRequest for a fault
    that the target cannot have.
    """
    if fault.kind not in pb.FaultKind.values() or not fault.kind:
        raise InvalidRequest("a fault must be one of kill, pause, partition and slow")
    if fault.kind != pb.FAULT_KIND_KILL:
        check_range("seconds", fault.seconds, _SHORTEST_S, MAX_SECONDS)
    if fault.kind == pb.FAULT_KIND_SLOW:
        _check_slow(fault, target)
    _check_rank(fault, target, num_ranks)
    _check_peer(fault, target, peer)


def _check_slow(fault: pb.Fault, target: Part) -> None:
    match target:
        case Part.WORKER:
            check_range("factor", fault.factor, 1.0, MAX_FACTOR)
        case Part.LEDGER:
            check_range("delay", fault.delay_s, _SHORTEST_S, MAX_DELAY_S)
        case Part.ROUTER:
            raise InvalidRequest("only workers and the ledger can be slowed")


def _check_rank(fault: pb.Fault, target: Part, num_ranks: int) -> None:
    has_ranks = fault.kind in (pb.FAULT_KIND_KILL, pb.FAULT_KIND_PAUSE) and target is Part.WORKER
    if fault.rank and not has_ranks:
        raise InvalidRequest("rank applies only to the kill or the pause of a worker")
    if fault.rank >= num_ranks:
        raise OutOfRange(f"rank must be from 0 to {num_ranks - 1}, not {fault.rank}")


def _check_peer(fault: pb.Fault, target: Part, peer: Part | None) -> None:
    if peer is None:
        return
    if fault.kind != pb.FAULT_KIND_PARTITION:
        raise InvalidRequest("peer applies only to a partition")
    if peer not in _PEERS[target]:
        others = " or ".join(each.value for each in _PEERS[target])
        raise InvalidRequest(
            f"a {target.value} can be partitioned from a {others}, not from a {peer.value}"
        )
