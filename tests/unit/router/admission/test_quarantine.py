"""Placement of suspects: requests that may have caused the loss of their last workers."""

from __future__ import annotations

from router.admission.placement import Placement
from router.admission.request import Waiting
from router.admission.workers import Capacity, Load
from router.config import RouterConfig
from tests.support.router.admission_support import choose

SUSPECT = Waiting("suspect", "g", 0.0, prefill_tokens=10, max_tokens=10, is_suspect=True)
OTHER = SUSPECT._replace(request_id="other", is_suspect=False)


def placement_of(**loads: Load) -> Placement:
    placement = Placement(RouterConfig())
    for worker_id, load in loads.items():
        placement.join(worker_id, Capacity(max_num_seqs=8, num_blocks=100))
        placement.report(worker_id, load, now=0.0)
    return placement


def test_suspect_excludes_others_until_its_first_token() -> None:
    placement = placement_of(a=Load(1))
    placement.reserve("a", 7, SUSPECT, now=0.0)
    assert choose(placement, OTHER) is None
    placement.acknowledge("a", 7)
    placement.report("a", Load(2, num_running=1, pending_prefill_tokens=10), now=0.0)
    assert choose(placement, OTHER) is None
    placement.report("a", Load(3, num_running=1), now=0.0)
    assert choose(placement, OTHER) == "a"


def test_suspect_is_not_cleared_by_a_state_before_dispatch() -> None:
    placement = placement_of(a=Load(1))
    placement.reserve("a", 7, SUSPECT, now=0.0)
    placement.report("a", Load(2), now=0.0)
    assert choose(placement, OTHER) is None


def test_undelivered_suspect_stops_blocking_after_timeout() -> None:
    placement = placement_of(a=Load(1))
    placement.reserve("a", 7, SUSPECT, now=0.0)
    placement.expire(now=1.5)
    placement.report("a", Load(2), now=1.5)
    assert choose(placement, OTHER) == "a"


def test_suspect_prefers_worker_where_all_others_decode() -> None:
    placement = placement_of(
        a=Load(1, num_running=2, num_waiting=1, committed_tokens=10),
        b=Load(1, num_running=2, committed_tokens=50),
    )
    assert choose(placement, OTHER) == "a"
    assert choose(placement, SUSPECT) == "b"


def test_suspect_does_not_wait_for_a_preferred_worker() -> None:
    placement = placement_of(a=Load(1, num_running=2, pending_prefill_tokens=5))
    assert choose(placement, SUSPECT) == "a"
