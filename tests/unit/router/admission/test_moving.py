"""Moves of preempted requests to workers that resume them sooner, unless others go first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from everlift.v1 import session_pb2 as pb
from router.admission.throughput import ThroughputEstimator
from router.admission.workers import Load
from tests.support.router.admission_support import Cluster, paced

#: Load of the home worker, which lacks ten blocks for a request of 310 known tokens.
STARVED = Load(1, num_running=3, num_waiting=1, blocks_used=100, pending_prefill_tokens=310)
ROOMY = Load(1, num_running=1, blocks_used=20)
#: Blocks for two such requests as they are, but not for the growth of both.
TIGHT = Load(1, num_running=1, blocks_used=45)


def starved(
    home: ThroughputEstimator,
    target: Load = ROOMY,
    throughput: ThroughputEstimator | None = None,
    weight_of: Callable[[str], float] | None = None,
) -> Cluster:
    """Return a cluster with a preempted request at one worker; another may have capacity."""
    cluster = Cluster(weight_of=weight_of)
    cluster.add_worker("home", STARVED, home)
    cluster.add_worker("other", target, throughput)
    cluster.connect()
    cluster.runs("r", "home", preempted=True)
    return cluster


def test_move_goes_where_recomputing_beats_waiting() -> None:
    slowly_freed = starved(paced(blocks_per_s=4))
    assert slowly_freed.moves() == [("r", "other")]


def test_preempted_request_stays_if_blocks_free_sooner() -> None:
    assert not starved(paced(blocks_per_s=100)).moves()


def test_preempted_request_stays_if_home_has_room() -> None:
    cluster = starved(paced())
    cluster.placement.report("home", Load(2, num_running=2, blocks_used=80), now=0.0)
    assert not cluster.moves()


def test_preempted_request_moves_at_any_cost_if_home_is_stuck() -> None:
    assert starved(paced(), throughput=paced(tokens_per_s=1)).moves() == [("r", "other")]


def test_preempted_request_stays_at_unmeasured_home() -> None:
    assert not starved(ThroughputEstimator()).moves()


def test_move_assumes_an_unused_target_is_as_fast() -> None:
    assert starved(paced(blocks_per_s=4), throughput=ThroughputEstimator()).moves() == [
        ("r", "other")
    ]
    slow_home = paced(blocks_per_s=4, tokens_per_s=100)
    assert not starved(slow_home, throughput=ThroughputEstimator()).moves()


@pytest.mark.parametrize(
    "target",
    [
        Load(1, num_running=1, blocks_used=20, draining=True),
        Load(1, num_running=4, blocks_used=20),
        Load(1, num_running=3, num_waiting=1, blocks_used=20),
        Load(1, num_running=1, blocks_used=56),
        Load(1, num_running=1, blocks_used=46, pending_prefill_tokens=320),
        Load(),
    ],
    ids=["drains", "no slot", "no slot that is free soon", "no blocks to spare", "claimed", "mute"],
)
def test_move_requires_spare_room_on_target(target: Load) -> None:
    assert not starved(paced(), target).moves()


def test_move_avoids_slow_worker() -> None:
    cluster = starved(paced())
    cluster.placement.workers["other"].is_slow = True
    assert not cluster.moves()


def test_move_requires_a_move_left() -> None:
    cluster = starved(paced())
    cluster.runs("r", "home", preempted=True, moves_left=0)
    assert not cluster.moves()


def test_move_excludes_resumed_ended_and_requeued_requests() -> None:
    for change in ("resumed", "ended", "queued"):
        cluster = starved(paced())
        if change == "resumed":
            cluster.runs("r", "home", preempted=False)
        elif change == "ended":
            cluster.leader_state.disconnect("g")
        else:
            cluster.enqueue("r")
        assert not cluster.moves()


def test_move_yields_to_older_queued_request() -> None:
    cluster = starved(paced())
    cluster.runs("r", "home", preempted=True, arrived=5.0)
    cluster.enqueue("older", arrived=4.0)
    assert not cluster.moves()
    cluster.leader_state.disconnect("g")
    cluster.connect()
    cluster.runs("r", "home", preempted=True, arrived=5.0)
    cluster.enqueue("younger", arrived=6.0)
    assert cluster.moves() == [("r", "other")]


def test_fair_move_yields_to_tenant_whose_turn_it_is() -> None:
    """The tenant decides before the age; of two requests of one tenant, the older one is first."""
    for tenant, preempted, arrived, moves in (
        ("little", "flood", 1.0, False),
        ("flood", "little", 9.0, True),
        ("flood", "flood", 1.0, True),
        ("flood", "flood", 9.0, False),
    ):
        cluster = starved(paced(), weight_of=lambda tenant: 1.0)
        cluster.leader_state.disconnect("g")
        cluster.connect()
        cluster.receive(pb.GatewayMessage(is_complete=True))
        cluster.enqueue(f"{tenant}/waits", arrived=5.0)
        cluster.receive(pb.GatewayMessage(served=[pb.ServedTokens(tenant="flood", tokens=500)]))
        cluster.runs(f"{preempted}/r", "home", preempted=True, arrived=arrived)
        assert bool(cluster.moves()) is moves, (tenant, preempted, arrived)


def test_move_may_use_a_quarter_of_unreserved_free_blocks() -> None:
    assert starved(paced(), Load(1, num_running=1, blocks_used=55)).moves() == [("r", "other")]


def test_move_room_is_not_promised_twice() -> None:
    cluster = starved(paced(), Load(1, num_running=1, blocks_used=50))
    cluster.runs("second", "home", preempted=True, arrived=1.0)
    assert cluster.moves() == [("r", "other")]


def moved_in(cluster: Cluster, second_at: float) -> list[tuple[str, str]]:
    """Move ``r`` to a worker with steps of 10 ms and run it; return the moves of ``second``."""
    assert cluster.moves() == [("r", "other")]
    cluster.enqueue("r", prompt_tokens=310)
    assert cluster.place()
    cluster.placement.acknowledge("other", 1)
    cluster.runs("second", "home", preempted=True, arrived=1.0)
    cluster.leader_state.prune(second_at)
    return cluster.moves(second_at)


def test_growth_room_of_moved_request_is_reserved() -> None:
    cluster = starved(paced(), TIGHT)
    assert not moved_in(cluster, second_at=1.0)


def test_growth_room_shrinks_as_moved_request_grows() -> None:
    """The request generated 700 of the 930 reserved tokens in 7 s."""
    cluster = starved(paced(), TIGHT)
    assert moved_in(cluster, second_at=7.1) == [("second", "other")]


def test_growth_promise_ends_when_request_leaves_worker() -> None:
    for end in ("ends", "waits again", "runs elsewhere", "its gateway goes"):
        cluster = starved(paced(), TIGHT)
        assert not moved_in(cluster, second_at=2.1)
        if end == "ends":
            cluster.receive(pb.GatewayMessage(withdraw=["r"]))
        elif end == "waits again":
            cluster.enqueue("r")
        elif end == "runs elsewhere":
            cluster.runs("r", "home")
        else:
            cluster.leader_state.disconnect("g")
        cluster.leader_state.prune(now=2.2)
        assert not len(cluster.queue._output_reservations)


def test_growth_promise_expires_if_request_never_arrives() -> None:
    cluster = starved(paced(), TIGHT)
    assert cluster.moves()
    cluster.leader_state.disconnect("g")
    cluster.leader_state.prune(now=1.9)
    assert len(cluster.queue._output_reservations)
    cluster.leader_state.prune(now=2.0)
    assert not len(cluster.queue._output_reservations)


def test_move_estimate_includes_blocks_of_requests_ahead() -> None:
    cluster = starved(paced(blocks_per_s=40))
    cluster.runs("r", "home", preempted=True, arrived=1.0)
    assert not cluster.moves()
    cluster.runs("before", "home", preempted=True, arrived=0.0)
    # Ten blocks come free in time for the first one; the second has to wait twice as long.
    assert cluster.moves() == [("r", "other")]


def test_move_is_not_repeated_before_a_timeout() -> None:
    cluster = starved(paced())
    assert cluster.moves(now=0.0)
    assert not cluster.moves(now=1.0)
    cluster.leader_state.prune(now=5.1)
    cluster.placement.expire(now=5.1)
    assert cluster.moves(now=5.1)


def test_moved_request_gets_its_held_room() -> None:
    cluster = starved(paced(), Load(1, num_running=1, blocks_used=55))
    cluster.moves()
    cluster.enqueue("younger", arrived=9.0, prompt_tokens=1200)
    assert not cluster.place()
    cluster.enqueue("r", arrived=0.0, prompt_tokens=310)
    placed = cluster.place()
    assert [(one.waiting.request_id, one.worker_id) for one in placed] == [("r", "other")]
