"""Service that sessions have attained, and the ranks of requests by it."""

from __future__ import annotations

import pytest

from everlift.v1 import session_pb2 as pb
from router.admission import attained_service
from router.admission.attained_service import EXPIRES_S, AttainedService
from router.admission.request import Waiting
from tests.support.router.admission_support import waiting

A, B = 7, 8


def of_session(session: int, **fields: object) -> Waiting:
    return waiting("r", session=session, **fields)


def output(session: int, tokens: int) -> pb.SessionOutput:
    return pb.SessionOutput(session=session, tokens=tokens)


def ranks(service: AttainedService, *sessions: int, now: float = 0.0) -> list[float]:
    return [service.ranked(of_session(it), now).attained_rank for it in sessions]


def test_attained_service_adds_prompts_and_outputs() -> None:
    service = AttainedService(1.0, 2.0)
    service.charge_prompt(of_session(A, prefill_tokens=100, cached_tokens=90), 60, 0.0)
    service.charge_outputs([output(A, 5), output(B, 3)], 0.0)
    service.charge_prompt(of_session(A, prefill_tokens=10), 0, 0.0)
    assert [service.attained(it) for it in (A, B, 9)] == [40 + 2 * 5 + 10, 2 * 3, 0]


def test_attained_service_does_not_charge_recomputation() -> None:
    service = AttainedService(1.0, 2.0)
    service.charge_prompt(of_session(A, has_run=True), 0, 0.0)
    assert service.attained(A) == 0.0


def test_attained_service_ignores_requests_without_session() -> None:
    service = AttainedService(1.0, 2.0)
    service.charge_prompt(of_session(0), 0, 0.0)
    service.charge_outputs([output(0, 9)], 0.0)
    assert (len(service), service.attained(0)) == (0, 0.0)


def test_attained_rank_is_the_share_of_less_served_sessions() -> None:
    service = AttainedService(1.0, 1.0)
    assert ranks(service, 0, A) == [0.0, 0.0], "nothing was served yet"
    service.charge_outputs([output(A, 10), output(B, 20)], 0.0)
    assert ranks(service, 0, 0, B, A, 9) == pytest.approx([0.0, 0.0, 4.5 / 5, 4.5 / 6, 0.0])


def test_attained_rank_is_zero_for_a_returning_request() -> None:
    service = AttainedService(1.0, 1.0)
    service.charge_outputs([output(A, 10)], 0.0)
    returning = of_session(A, has_run=True, attained_rank=0.9)
    assert service.ranked(returning, 0.0).attained_rank == 0.0
    assert ranks(service, A) == [0.5], "it was not counted among the recent ones"


def test_attained_service_forgets_idle_sessions() -> None:
    service = AttainedService(1.0, 1.0)
    service.charge_outputs([output(A, 10), output(B, 10)], 0.0)
    service.charge_outputs([output(A, 10)], 5.0)
    assert ranks(service, A, now=EXPIRES_S) == [0.5]
    assert (service.attained(A), service.attained(B)) == (20, 0)
    ranks(service, 0, now=EXPIRES_S + 5.0)
    assert len(service) == 0


def test_attained_service_keeps_the_sessions_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attained_service, "MAX_SESSIONS", 3)
    service = AttainedService(1.0, 1.0)
    for session in (1, 2, 3, 1, 4, 5):
        service.charge_outputs([output(session, 1)], 0.0)
        assert len(service) <= 3
    assert [service.attained(it) for it in range(1, 6)] == [2, 0, 0, 1, 1]
