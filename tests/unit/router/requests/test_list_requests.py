"""Visibility of requests in listings, and valid queries."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable

import pytest

from everlift.errors import EverliftError, Forbidden, InvalidRequest, OutOfRange
from everlift.transport import GRPC
from everlift.v1 import inference_pb2 as pb
from router.api.service import Inference
from router.auth.caller import ANYONE, Caller, Scope
from router.ledger.entry import State
from router.ledger.memory.memory import MemoryLedger
from tests.support.ledger.ledgers import make_request
from tests.support.router.gateway_support import Gateway

INFER, ADMIN = Scope.INFER, Scope.ADMIN
ACME = Caller("acme", frozenset({INFER}))
OPERATOR = Caller("ops", frozenset({INFER, ADMIN}))


@pytest.fixture
async def ledger() -> MemoryLedger:
    ledger = MemoryLedger(time.time)
    for request_id in ("acme/a", "acme/b", "acme.b/a", "ops/a"):
        await ledger.open(make_request(request_id), "gateway")
    await ledger.end_request("acme/a", State.CANCELLED, "cancelled", "")
    return ledger


@pytest.fixture
async def inference(ledger: MemoryLedger) -> AsyncIterator[Inference]:
    gateway = Gateway(ledger)
    yield Inference(gateway.requests, gateway.models, GRPC)
    await gateway.requests.stop(0.0)


async def ask(inference: Inference, caller: Caller, **fields: object) -> pb.ListRequestsResponse:
    return await inference.list_requests(caller, pb.ListRequestsRequest(**fields))  # type: ignore[arg-type]


def names(requests: Iterable[pb.RequestSummary]) -> list[str]:
    return [each.request_id for each in requests]


async def test_listing_shows_a_tenant_its_own_requests(inference: Inference) -> None:
    answer = await ask(inference, ACME)
    assert names(answer.requests) == ["b", "a"]
    assert answer == await ask(inference, ACME, tenant="acme")
    assert [each.state for each in answer.requests] == [
        pb.REQUEST_STATE_QUEUED,
        pb.REQUEST_STATE_CANCELLED,
    ]
    assert answer.requests[1].error_slug == "cancelled"


@pytest.mark.parametrize("tenant", ["", "acme.b", "nobody", "*"])
async def test_listing_of_another_tenant_is_forbidden(inference: Inference, tenant: str) -> None:
    with pytest.raises(Forbidden):
        await ask(inference, ACME, tenant=tenant)


async def test_page_token_of_another_tenant_grants_no_access(inference: Inference) -> None:
    everybodys = await ask(inference, OPERATOR, tenant="", page_size=1)
    assert names(everybodys.requests) == ["ops/a"]
    answer = await ask(inference, ACME, page_token=everybodys.next_page_token)
    assert names(answer.requests) == ["b", "a"]


async def test_listing_shows_an_admin_every_tenant(
    inference: Inference,
) -> None:
    everybodys = ["ops/a", "acme.b/a", "acme/b", "acme/a"]
    assert names((await ask(inference, OPERATOR)).requests) == ["ops/a"]
    assert names((await ask(inference, OPERATOR, tenant="acme")).requests) == everybodys[2:]
    assert names((await ask(inference, OPERATOR, tenant="")).requests) == everybodys
    assert names((await ask(inference, ANYONE)).requests) == everybodys


async def test_listing_of_all_tenants_needs_a_right(
    inference: Inference,
) -> None:
    with pytest.raises(Forbidden):
        await ask(inference, Caller("", frozenset({INFER})))


async def test_listing_pages_cover_all_requests(inference: Inference) -> None:
    found, token = [], ""
    for _ in range(4):
        page = await ask(inference, ANYONE, page_size=1, page_token=token)
        found += names(page.requests)
        token = page.next_page_token
    assert (found, token) == (["ops/a", "acme.b/a", "acme/b", "acme/a"], "")


async def test_listing_filters_by_state(inference: Inference) -> None:
    answer = await ask(inference, ANYONE, states=[pb.REQUEST_STATE_CANCELLED])
    assert names(answer.requests) == ["acme/a"]
    answer = await ask(inference, ANYONE, states=pb.RequestState.values()[1:])
    assert len(answer.requests) == 4


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (dict(page_size=1001), OutOfRange),
        (dict(page_token="x"), InvalidRequest),
        (dict(states=[0]), InvalidRequest),
        (dict(states=[99]), InvalidRequest),
        (dict(states=[pb.REQUEST_STATE_QUEUED] * 7), OutOfRange),
        (dict(tenant="A/b"), InvalidRequest),
    ],
)
async def test_listing_rejects_invalid_fields(
    inference: Inference, fields: dict[str, object], error: type[EverliftError]
) -> None:
    with pytest.raises(error):
        await ask(inference, ANYONE, **fields)
