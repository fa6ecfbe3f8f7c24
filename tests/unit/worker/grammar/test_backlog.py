"""Displaced requests of a full queue, and expired ones."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from router.admission.policy import policy_of
from router.admission.queue import AdmissionQueue
from router.admission.request import Waiting
from router.config import RouterConfig
from tests.support.router.admission_support import waiting

FIFO = policy_of("fifo", RouterConfig())


def queue_of(*requests: Waiting) -> AdmissionQueue:
    queue = AdmissionQueue(FIFO)
    for request in requests:
        queue.push(request)
    return queue


def shed(queue: AdmissionQueue, priority: int) -> str | None:
    leaver = queue.shed(priority)
    return leaver.request_id if leaver else None


def expired(queue: AdmissionQueue, moment: float) -> list[str]:
    names = []
    while (waiting := queue.expire(moment)) is not None:
        names.append(waiting.request_id)
    return names


def test_backlog_sheds_newest_of_lowest_priority() -> None:
    queue = queue_of(
        waiting("a", priority=-1), waiting("b", priority=-1), waiting("c"), waiting("d", priority=1)
    )
    assert [shed(queue, 1) for _ in range(4)] == ["b", "a", "c", None]
    assert len(queue) == 1


def test_backlog_sheds_none_for_equal_priority() -> None:
    assert shed(queue_of(waiting("a")), 0) is None


def test_backlog_never_sheds_requests_that_have_run() -> None:
    queue = queue_of(waiting("a", has_run=True), waiting("b"), waiting("c", has_run=True))
    assert [shed(queue, 1), shed(queue, 1)] == ["b", None]
    assert queue.backlog.lowest is None
    assert queue.backlog.work_from(0) == 64


def test_backlog_expires_by_deadline_not_queue_order() -> None:
    queue = queue_of(
        waiting("a", expires=9.0), waiting("b", expires=3.0), waiting("c", expires=inf)
    )
    assert expired(queue, 2.9) == []
    assert expired(queue, 9.0) == ["b", "a"]
    assert [queue.pop().request_id, len(queue)] == ["c", 0]


def test_backlog_uses_expiry_of_latest_push() -> None:
    queue = queue_of(waiting("a", expires=3.0))
    queue.push(waiting("a", expires=inf))
    assert expired(queue, 5.0) == []
    assert queue.backlog.work_from(0) == 32


_REQUESTS = st.builds(
    lambda name, priority, expires, has_run, tokens: waiting(
        name, priority=priority, expires=expires, has_run=has_run, prefill_tokens=tokens
    ),
    st.sampled_from("abcdefgh"),
    st.integers(-2, 2),
    st.sampled_from((1.0, 2.0, 3.0, inf)),
    st.booleans(),
    st.integers(0, 3),
)
_STEPS = st.one_of(
    _REQUESTS,
    st.tuples(st.just("shed"), st.integers(-2, 3)),
    st.tuples(st.just("expire"), st.sampled_from((1.0, 2.0, 3.0))),
    st.tuples(st.just("withdraw"), st.sampled_from("abcdefgh")),
    st.just(("pop", 0)),
)


@given(st.lists(_STEPS, max_size=60))
def test_backlog_matches_brute_force_search(steps: list[object]) -> None:
    queue = AdmissionQueue(FIFO)
    known: dict[str, Waiting] = {}
    for step in steps:
        match step:
            case Waiting():
                queue.push(step)
                known.pop(step.request_id, None)
                known[step.request_id] = step
            case ("shed", int(priority)):
                fresh = [it for it in known.values() if not it.has_run]
                lowest = min((it.priority for it in fresh), default=priority)
                newest = [it.request_id for it in fresh if it.priority == lowest < priority]
                assert shed(queue, priority) == (newest[-1] if newest else None)
                known.pop(newest[-1] if newest else "", None)
            case ("expire", float(moment)):
                late = sorted(it.request_id for it in known.values() if it.expires <= moment)
                assert sorted(expired(queue, moment)) == late
                known = {name: it for name, it in known.items() if name not in late}
            case ("withdraw", str(name)):
                assert queue.withdraw(name, "g") is (known.pop(name, None) is not None)
            case _ if len(queue):
                del known[queue.pop().request_id]
        for priority in range(-3, 4):
            work = sum(it.work_tokens for it in known.values() if it.priority >= priority)
            assert queue.backlog.work_from(priority) == work
        assert all(queue.backlog.work_from(p) == work for p, work in queue.backlog.work.items())
