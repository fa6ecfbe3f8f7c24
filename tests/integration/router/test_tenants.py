"""Isolation of tenants in a cluster of two routers, over real gRPC with keys in a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from everlift.client.client import AsyncClient
from everlift.errors import (
    EverliftError,
    Forbidden,
    OutOfRange,
    RateLimited,
    Unauthenticated,
    UnknownRequest,
)
from everlift.hashes import block_hashes
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.api.http.event_id import BEGIN, EventId
from router.auth.caller import Scope
from tests.support.in_process import ROUTER, Cluster, cluster, receive, right_tokens, until
from tests.support.router.http_client import JSON
from tests.support.router.http_client import ask as ask_http
from tests.support.router.keyring import Keyring

PROMPT = [7] * 70
LONG = 1000


@dataclass
class Parts:
    cluster: Cluster
    keyring: Keyring
    keys: dict[str, str]
    clients: dict[str, AsyncClient]
    #: exited at the end
    stack: AsyncExitStack

    def __getitem__(self, name: str) -> AsyncClient:
        return self.clients[name]

    async def began(self, name: str, request_id: str = "r") -> None:
        """Start a long request of a client; its worker is held after three steps."""
        [held] = self.cluster.hold()
        held.let(3)
        stream = self[name].generate(PROMPT, max_tokens=LONG, request_id=request_id)
        await anext(aiter(await self.stack.enter_async_context(stream)))


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    """Cluster with clients by tenant; "acme elsewhere" is connected to the second router."""
    keyring = Keyring(tmp_path / "keys.yaml")
    keys = {
        "acme": await keyring.key("acme"),
        "other": await keyring.key("other"),
        "admin": await keyring.key("ops", *Scope),
        "operator": await keyring.key("ops", Scope.ADMIN),
        "watcher": await keyring.key("ops", Scope.METRICS),
    }
    await keyring.limit("limited", max_tokens=8, max_priority=0, requests_per_minute=2)
    keys["limited"] = await keyring.key("limited")
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(cluster(2, 1, config))
        here, elsewhere = (router.address for router in parts.routers)
        clients = {name: AsyncClient(here, api_key=key) for name, key in keys.items()}
        clients |= {
            f"{name} elsewhere": AsyncClient(elsewhere, api_key=keys[name])
            for name in ("acme", "other", "limited")
        }
        clients["stranger"] = AsyncClient(here)
        for client in clients.values():
            await stack.enter_async_context(client)
        yield Parts(parts, keyring, keys, clients, stack)


Ask = Callable[[AsyncClient, str], Awaitable[object]]


async def attach(client: AsyncClient, request_id: str) -> object:
    async with client.attach(request_id) as stream:
        return await anext(aiter(stream))


ASKS: dict[str, Ask] = {
    "attach": attach,
    "cancel": lambda client, request_id: client.cancel(request_id),
    "forget": lambda client, request_id: client.forget(request_id),
    "get_request": lambda client, request_id: client.get_request(request_id),
    "explain": lambda client, request_id: client.explain(request_id),
}


async def failure(asked: Awaitable[object]) -> tuple[type[EverliftError], str]:
    with pytest.raises(EverliftError) as error:
        await asked
    return type(error.value), str(error.value)


@pytest.mark.parametrize("at", ["other", "other elsewhere"])
@pytest.mark.parametrize("ask", ASKS)
async def test_request_of_other_tenant_is_reported_unknown(parts: Parts, ask: str, at: str) -> None:
    await parts.began("acme")
    theirs, nobodys = [await failure(ASKS[ask](parts[at], request_id)) for request_id in ("r", "s")]
    assert theirs[0] is nobodys[0] is UnknownRequest
    assert (theirs[1], nobodys[1]) == ("no request r", "no request s")
    assert (await parts["acme"].get_request("r")).state != pb.REQUEST_STATE_CANCELLED


@pytest.mark.parametrize("ask", ["cancel", "forget", "get_request", "explain"])
async def test_tenant_prefix_in_request_id_requires_admin(parts: Parts, ask: str) -> None:
    await parts.began("acme")
    kind, cause = await failure(ASKS[ask](parts["other"], "acme/r"))
    assert (kind.slug, "acme" in cause) == ("invalid_request", False)
    await ASKS[ask](parts["operator"], "acme/r")


async def test_admin_sees_all_requests_and_cannot_generate(parts: Parts) -> None:
    await parts.began("acme")
    operator = parts["operator"]
    assert (await failure(operator.generate(PROMPT).text()))[0] is Forbidden
    [listed] = (await operator.list_requests(tenant="")).requests
    assert listed.request_id == "acme/r"
    [running] = [it for worker in (await operator.status()).workers for it in worker.running]
    assert running.request_id == "acme/r"
    assert (await operator.capacity()).workers == 1


async def test_http_resume_of_other_tenant_stream_is_rejected(parts: Parts) -> None:
    await parts.began("acme")
    address = parts.cluster.routers[0].http_address
    body = {"prompt": PROMPT, "max_tokens": LONG, "stream": True}
    for request_id in ("r", "s"):
        headers = {**JSON, "authorization": f"Bearer {parts.keys['other']}"}
        headers["last-event-id"] = str(EventId(request_id, [BEGIN]))
        answer = await ask_http(address, "/v1/completions", body, headers)
        assert (answer.status, answer.error[0]) == (404, "unknown_request")
        assert answer.json["error"]["message"] == f"no request {request_id}"


@pytest.mark.parametrize("ask", ASKS)
async def test_tenant_reaches_own_request_through_every_router(parts: Parts, ask: str) -> None:
    await parts.began("acme")
    await ASKS[ask](parts["acme elsewhere"], "r")


async def test_request_id_is_scoped_to_tenant(parts: Parts) -> None:
    prompts = {"acme": [1] * 40, "other": [2] * 40}
    for name, prompt in prompts.items():
        received = await receive(parts[name], prompt, 20, request_id="r")
        assert received.tokens == right_tokens(prompt, 20)
    for name in prompts:
        known = await parts[name].get_request("r")
        assert (known.request_id, known.output_tokens) == ("r", 20)
        # A repeated request returns the tenant's own output, too.
        assert (await receive(parts[name], prompts[name], 20, request_id="r")).is_contiguous
    described = await parts["admin"].get_request("acme/r")
    assert described.request_id == "acme/r"
    await parts["acme"].forget("r")
    assert (await parts["other"].get_request("r")).request_id == "r"


async def test_prefix_cache_blocks_are_not_shared_between_tenants(parts: Parts) -> None:
    """Shared blocks would reveal another tenant's prompts by their timing."""
    for name in ("acme", "other"):
        await receive(parts[name], PROMPT, 4, request_id="r")
    hits = [worker.counters.prefix_hit_tokens for worker in (await status(parts)).workers]
    assert hits == [0]
    await receive(parts["acme"], PROMPT, 4, request_id="r2")
    hits = [worker.counters.prefix_hit_tokens for worker in (await status(parts)).workers]
    assert hits[0] > 0
    salts = []
    for request_id in ("acme/r", "other/r", "acme/r2"):
        stored = await parts.cluster.ledger.read(request_id)
        assert stored.request.prompt_ids == tuple(PROMPT)
        salts.append(list(block_hashes(stored.request.prompt_ids, stored.request.salt)))
    assert salts[0] == salts[2]
    assert not set(salts[0]) & set(salts[1])


async def status(parts: Parts) -> pb.GetStatusResponse:
    return await parts["admin"].status()


async def test_status_shows_running_request_ids_to_admin_only(parts: Parts) -> None:
    await parts.began("acme")
    seen = {}
    for name in ("admin", "watcher"):
        running = [s for w in (await parts[name].status()).workers for s in w.running]
        seen[name] = [sequence.request_id for sequence in running]
    assert seen == {"admin": ["acme/r"], "watcher": [""]}


async def test_scopes_are_enforced_per_method(parts: Parts) -> None:
    assert (await parts["watcher"].status()).model == "fake"
    for name in ("acme", "stranger"):
        wanted = Forbidden if name == "acme" else Unauthenticated
        assert (await failure(parts[name].status()))[0] is wanted
    assert (await failure(parts["watcher"].generate("x").text()))[0] is Forbidden
    assert (await failure(parts["stranger"].generate("x").text()))[0] is Unauthenticated
    assert (await failure(parts["acme"].drain("w")))[0] is Forbidden
    assert (await failure(parts["stranger"].drain("w")))[0] is Unauthenticated


@pytest.mark.parametrize("header", ["x-api-key", "api-key", "authorization"])
async def test_api_key_is_accepted_in_each_header(parts: Parts, header: str) -> None:
    key = parts["acme"]._routers.metadata[0][1].removeprefix("Bearer ")
    value = f"Bearer {key}" if header == "authorization" else key
    async with grpc.aio.insecure_channel(parts.cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.GetRequest(pb.GetRequestRequest(request_id="r"), metadata=((header, value),))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_probe_needs_no_key(parts: Parts) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(parts.cluster.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_revoked_key_is_rejected_and_new_key_accepted(parts: Parts) -> None:
    parts.keyring.path.unlink()
    await parts.keyring.key("nobody")
    accesses = [router._access for router in parts.cluster.routers]
    await until(lambda: all(len(a._table.document.keys) == 1 for a in accesses if a))
    assert (await failure(parts["acme"].get_request("r")))[0] is Unauthenticated
    async with AsyncClient(
        parts.cluster.address, api_key=await parts.keyring.key("acme")
    ) as client:

        async def is_in() -> bool:
            return (await failure(client.get_request("r")))[0] is UnknownRequest

        while not await is_in():
            await asyncio.sleep(0.01)


async def test_tenant_limits_hold_across_routers(parts: Parts) -> None:
    assert len((await receive(parts["limited"], PROMPT, 8)).tokens) == 8
    assert (await failure(parts["limited"].generate("x", max_tokens=9).text()))[0] is OutOfRange
    assert (await failure(parts["limited"].generate("x", priority=1).text()))[0] is OutOfRange
    # The tenant's limit applies without max_tokens, too.
    stream = parts["limited elsewhere"].generate("x", temperature=0)
    await stream.text()
    assert stream.usage is not None and stream.usage.output_tokens == 8
    for name in ("limited", "limited elsewhere"):
        with pytest.raises(RateLimited) as refusal:
            await parts[name].generate("x").text()
        assert "requests_per_minute (2)" in str(refusal.value)
        assert refusal.value.retry_after_s is not None and refusal.value.retry_after_s > 0
    await parts["acme"].generate("x", max_tokens=2).text()
