"""Early rejections by a gateway, and retries of refused requests."""

from __future__ import annotations

from copy import copy
from random import Random

import pytest

from everlift.errors import DeadlineUnmeetable, EverliftError, QueueFull, RetriedTooSoon, Shed
from everlift.request_id import unnamed_request_id
from everlift.v1.session_pb2 import ClassWait, QueueEstimate
from router.admission.load_shedding import Deadlines, EarlyRejection, RetryLimiter
from router.config import RouterConfig

#: No deadline.
AT_ANY_TIME = Deadlines()


#: Ten seconds of work are queued.
BUSY = QueueEstimate(tokens_per_s=100.0, waits=[ClassWait(work_tokens=1000)])


def early_rejection(queue_estimate: QueueEstimate = BUSY, **settings: object) -> EarlyRejection:
    config = RouterConfig(**{"max_queued": 10, "retry_burst": 2, **settings})
    made = EarlyRejection(config, Random(1))
    made.queue_estimates["m"] = queue_estimate
    return made


def admit(
    rejection: EarlyRejection,
    name: str = "r",
    priority: int = 0,
    wanted: Deadlines = AT_ANY_TIME,
    least_tokens: int = 1,
    queued: int = 0,
    now: float = 0.0,
) -> EverliftError | None:
    """Return the error of the rejection, or None if the request is admitted."""
    try:
        estimate = copy(rejection.queue_estimates["m"])
        estimate.queued = queued
        rejection.queue_estimates["m"] = estimate
        rejection.admit(name, "m", priority, now)
        rejection.check_in_time(name, "m", priority, *wanted, least_tokens, now)
    except EverliftError as error:
        return error
    return None


def retry_after(error: EverliftError | None) -> float:
    assert error is not None and error.retry_after_s is not None
    return error.retry_after_s


def test_full_queue_refuses_with_its_drain_time() -> None:
    rejection = early_rejection()
    assert admit(rejection, queued=9) is None
    errors = [admit(rejection, f"r{n}", queued=10) for n in range(200)]
    assert {type(error) for error in errors} == {QueueFull}
    seconds = sorted(map(retry_after, errors))
    assert 5.0 <= seconds[0] < 6.0 and 24.0 < seconds[-1] <= 25.0


@pytest.mark.parametrize(
    "queue_estimate, seconds",
    [
        (QueueEstimate(), 1.0),
        (QueueEstimate(waits=[ClassWait(work_tokens=1000)]), 1.0),
        (QueueEstimate(tokens_per_s=1e9, waits=[ClassWait(work_tokens=1)]), 1.0),
        (QueueEstimate(tokens_per_s=0.1, waits=[ClassWait(work_tokens=1000)]), 60.0),
    ],
)
def test_retry_after_is_bounded_and_1_s_if_unknown(
    queue_estimate: QueueEstimate, seconds: float
) -> None:
    error = admit(early_rejection(queue_estimate), queued=10)
    assert 0.5 * seconds <= retry_after(error) <= 2.5 * seconds


def test_full_queue_admits_higher_class_to_displace_lower() -> None:
    rejection = early_rejection(QueueEstimate(lowest=0))
    assert admit(rejection, priority=1, queued=10) is None
    assert isinstance(admit(rejection, priority=0, queued=10), QueueFull)
    assert isinstance(admit(early_rejection(), priority=9, queued=10), QueueFull), "all have run"


@pytest.mark.parametrize("field", Deadlines._fields)
def test_long_waits_are_refused_if_configured(field: str) -> None:
    def wanted(seconds: float) -> Deadlines:
        return Deadlines(**{field: seconds})

    waits = [ClassWait(priority=5, wait_s=1.0), ClassWait(priority=0, wait_s=4.0)]
    rejection = early_rejection(QueueEstimate(waits=waits), refuse_late=True)
    assert admit(rejection, priority=5, wanted=wanted(1.5)) is None
    assert admit(rejection, priority=7, wanted=wanted(0.1)) is None, "nobody goes before it"
    error = admit(rejection, priority=3, wanted=wanted(0.4))
    assert isinstance(
        error, DeadlineUnmeetable
    ) and "exceeds the request's TTFT target or deadline" in str(error)
    assert 0.6 <= retry_after(error) <= 2.5
    assert admit(rejection, "other", priority=-1, wanted=wanted(5.0)) is None
    lenient = early_rejection(QueueEstimate(waits=waits))
    assert admit(lenient, wanted=wanted(0.4)) is None
    lenient.rules = rejection.rules
    assert isinstance(admit(lenient, wanted=wanted(0.4)), DeadlineUnmeetable), "by other rules"


def test_fair_early_rejection_ignores_the_same_class() -> None:
    waits = [ClassWait(priority=5, wait_s=1.0), ClassWait(priority=0, wait_s=4.0)]
    soon = Deadlines(first_token_s=2.0)
    rejection = early_rejection(QueueEstimate(waits=waits), refuse_late=True)
    assert admit(rejection, "a/r", wanted=soon) is None
    assert isinstance(admit(rejection, "a/late", wanted=Deadlines(0.5)), DeadlineUnmeetable)
    by_arrival = early_rejection(QueueEstimate(waits=waits), refuse_late=True, fair_share=False)
    assert isinstance(admit(by_arrival, "a/r", wanted=soon), DeadlineUnmeetable)


def test_early_rejection_reports_length_of_late_output() -> None:
    queue_estimate = QueueEstimate(waits=[ClassWait(priority=5, wait_s=1.0)], least_tpot_s=0.02)
    rejection = early_rejection(queue_estimate, refuse_late=True)
    soon = Deadlines(first_token_s=1.5, end_s=3.0)
    assert admit(rejection, priority=5, wanted=soon, least_tokens=101) is None
    error = admit(rejection, priority=5, wanted=soon, least_tokens=111)
    assert isinstance(error, DeadlineUnmeetable) and "111 tokens at least" in str(error)
    assert 0.5 <= retry_after(error) <= 2.5, "the queue is shorter then"
    error = admit(rejection, "b", priority=6, wanted=soon, least_tokens=152)
    assert isinstance(error, DeadlineUnmeetable), "although nobody goes before it"
    assert 0.5 <= retry_after(error) <= 2.5, "which no shorter queue helps"
    assert admit(early_rejection(queue_estimate), priority=5, wanted=soon, least_tokens=999) is None


def test_leader_refusals_carry_retry_after() -> None:
    rejection = early_rejection()
    error = rejection.refuse("a", "m", "shed", None, now=0.0)
    assert isinstance(error, Shed) and 5.0 <= retry_after(error) <= 25.0
    late = rejection.refuse("b", "m", "deadline_unmeetable", 7.0, now=0.0)
    assert 7.0 <= retry_after(late) <= 25.0
    too_long = rejection.refuse("c", "m", "deadline_unmeetable", 0.0, now=0.0, least_tokens=20)
    assert "20 tokens at least" in str(too_long)


def test_early_retries_beyond_the_burst_are_rejected() -> None:
    rejection = early_rejection(retry_rate=0.0)
    errors = [admit(rejection, "r", queued=10, now=0.0) for _ in range(3)]
    assert [type(error) for error in errors] == [QueueFull] * 3
    error = admit(rejection, "r", now=0.1)
    assert isinstance(error, RetriedTooSoon), "also where there is room"
    due = 0.1 + (error.retry_after_s or 0.0)
    assert isinstance(admit(rejection, "r", now=due - 0.2), RetriedTooSoon)
    assert admit(rejection, "other", now=0.1) is None
    assert admit(rejection, "r", now=due) is None


def test_retry_limiter_refills_over_time_per_tenant() -> None:
    retrying = RetryLimiter(rate=1.0, burst=1.0)
    for name in ("a/1", "a/2", "a/3", "b/1"):
        retrying.refused(name, 0.0, 100.0)
    assert retrying.admit_retry("a/1", now=0.0) == 0.0
    assert retrying.admit_retry("a/2", now=0.5) == pytest.approx(99.5)
    assert retrying.admit_retry("b/1", now=0.5) == 0.0
    assert retrying.admit_retry("a/2", now=1.0) == 0.0


def test_retry_limiter_bounds_remembered_due_times() -> None:
    retrying = RetryLimiter(rate=0.0, burst=2000.0)
    for now in range(1000):
        retrying.refused("r", now, now + 3600.0)
        assert retrying.admit_retry("r", now) == 0.0
    assert len(retrying._due_times) <= 100


def test_retry_limiter_forgets_the_oldest_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.admission.load_shedding._MOST_REFUSALS", 10)
    retrying = RetryLimiter(rate=0.0, burst=0.0)
    for number in range(100):
        retrying.refused(f"t{number}/r", 0.0, 50.0)
        retrying.admit_retry(f"t{number}/r", now=0.0)
    assert retrying.admit_retry("t89/r", now=0.0) == 0.0
    assert retrying.admit_retry("t90/r", now=0.0) == 50.0


def test_unnamed_requests_displace_no_remembered_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, a flood of unnamed requests would let premature retries in."""
    monkeypatch.setattr("router.admission.load_shedding._MOST_REFUSALS", 10)
    retrying = RetryLimiter(rate=0.0, burst=0.0)
    retrying.refused("r", 0.0, 50.0)
    for number in range(100):
        retrying.refused(unnamed_request_id(str(number)), 0.0, 50.0)
    assert retrying.admit_retry("r", now=0.0) == 50.0
