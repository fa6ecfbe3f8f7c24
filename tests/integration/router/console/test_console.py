"""The console over HTTP: page, feed, operator calls and access."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import UnknownModel
from router.auth import key as keys
from router.auth.caller import Scope
from router.console import console
from router.router import Router
from tests.support.in_process import LONG_LEASE, ROUTER, WORKER, Cluster, cluster, until
from tests.support.router.http_client import JSON, ask, get, streamed
from tests.support.router.keyring import Keyring
from worker.config import FakeModel

PROMPT = [7] * 40
#: Ways to turn text into elements or scripts.
TEXT_AS_MARKUP = (
    *("innerHTML", "outerHTML", "insertAdjacent", "document.write", "srcdoc", "DOMParser"),
    *("createContextualFragment", "eval(", "Function(", "javascript:"),
)
LONG = 3000


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    async with cluster(workers=2) as parts:
        yield parts


@pytest.fixture
def address(parts: Cluster) -> str:
    return parts.routers[0].http_address


class Frames:
    """Data that a page received, by section; ``failed`` is the error code that ended the feed."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.received: dict[str, Any] = {}
        #: keys of the requests seen in slots
        self.keys: set[int] = set()
        self.names: dict[str, str] = {}
        self.failed: Any = None

    async def until(self, *sections: str, seconds: float = 60.0) -> dict[str, Any]:
        """Return the first frame that has these sections."""
        async with asyncio.timeout(seconds):
            while True:
                kind, data = (await anext(self._chunks)).decode().strip().split("\n")
                value = json.loads(data.removeprefix("data: "))
                if kind == "event: error":
                    self.failed = value["error"]["code"]
                    return {}
                self.received |= value
                self.keys |= {key for _, _, key, _ in value.get("seats", ()) if key}
                self.names |= value.get("names", {})
                if value.keys() >= set(sections):
                    return value


@asynccontextmanager
async def watching(
    address: str, query: str = "", headers: Mapping[str, str] = JSON
) -> AsyncIterator[Frames]:
    async with streamed(address, f"/console/feed{query}", None, headers, "GET") as stream:
        assert stream.status == 200, await stream.rest()
        assert stream.headers["content-type"].startswith("text/event-stream")
        try:
            yield Frames(stream._chunks())
        finally:
            stream.hang_up()


# the page


async def test_console_loads_only_its_own_files(
    address: str,
) -> None:
    assert (await get(address, "/console")).headers["location"] == "console/"
    for path, kind in (
        ("", "text/html"),
        ("main.js", "text/javascript"),
        ("console.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
    ):
        answer = await get(address, f"/console/{path}")
        assert (answer.status, answer.headers["content-type"].split(";")[0]) == (200, kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        known = {"if-none-match": answer.headers["etag"]}
        assert await _first_status(address, f"/console/{path}", known) == 304
    for path in ("console.py", "..%2fconsole.py", "%2e%2e/console.py", "page/main.js", "none.js"):
        assert (await get(address, f"/console/{path}")).status == 404


def test_console_page_has_no_external_urls_or_inline_code() -> None:
    files = [*(Path(console.__file__).parent / "page").iterdir()]
    assert len(files) > 15
    for file in files:
        text = file.read_text()
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text, file
        assert not [it for it in TEXT_AS_MARKUP if it in text], file
        assert " style=" not in text and " onclick" not in text, file


async def test_console_disabled_returns_404(parts: Cluster) -> None:
    parts.router_config = replace(ROUTER, console=False)
    address = (await parts.add_router()).http_address
    for path in ("/console", "/console/", "/console/feed"):
        assert (await get(address, path)).status == 404


# the feed


async def test_console_feed_aggregates_counters_of_all_routers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_POLL_INTERVAL_S", 0.05)
    async with cluster(2, 1) as parts:
        here, there = parts.routers
        async with watching(here.http_address) as page, AsyncClient(there.address) as client:
            while page.received.get("routers") != {"heard": 2, "silent": 0}:
                await page.until("routers")
            for _ in range(2):
                await client.generate(PROMPT, max_tokens=3).text()
            with pytest.raises(UnknownModel):
                await client.generate(PROMPT, max_tokens=3, model="other").text()
            while page.received["totals"]["completed"] < 2 or not page.received["errors"]:
                await page.until()
            assert page.received["errors"][0][:2] == ["unknown_model", 1]
            while not page.received["latencies"]["latency"]["count"]:
                await page.until("latencies")
            await parts.kill_router(there)
            while page.received["routers"] != {"heard": 1, "silent": 1}:
                await page.until("routers")
            # Counters of a lost router are kept for a while.
            assert page.received["totals"]["completed"] == 2


async def test_console_feed_reports_migration_after_worker_loss(
    parts: Cluster, address: str
) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(parts.address))
        ids = [rank.worker_id for rank in parts.workers]
        page = await stack.enter_async_context(watching(address, f"?lanes={','.join(ids)}"))
        stream = client.generate(PROMPT, max_tokens=LONG, request_id="r")
        await anext(aiter(await stack.enter_async_context(stream)))
        seated = await page.until("seats")
        assert seated["names"] == {"1": "r"}
        [[lane, _, key, phase]] = seated["seats"]
        assert key == 1 and phase in (1, 2)
        await parts.kill_worker(parts.workers[lane])
        [transfer] = (await page.until("transfers"))["transfers"]
        assert transfer["cause"] == "worker_lost"
        assert (transfer["from"][0], transfer["to"][0]) == (lane, 1 - lane)


async def test_console_feed_of_follower_covers_whole_cluster() -> None:
    async with cluster(1, 2, LONG_LEASE) as parts:
        other = await parts.add_router()
        await until(lambda: other._heartbeat.leader_id)
        await check_follower(parts, other)


async def check_follower(parts: Cluster, other: Router) -> None:
    async with watching(other.http_address) as page:
        while not page.received.get("queue", {}).get("is_known"):
            await page.until()
        assert not page.received["router"]["is_leading"]
        assert page.received["router"]["leader"] == parts.routers[0].router_id
        await until(lambda: sum(link.is_up for link in other._sessions.links) == 2)
        while page.received["totals"]["up"] < 2:
            await page.until()


async def test_console_feed_limits_viewers_and_frees_slots(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "MAX_VIEWERS", 1)
    async with watching(address) as page:
        await page.until()
        refused = await get(address, "/console/feed")
        assert (refused.status, refused.error) == (503, ("too_many_connections", None))
    async with asyncio.timeout(10):
        while (status := await _first_status(address, "/console/feed")) == 503:
            await asyncio.sleep(0.01)
    assert status == 200


async def _first_status(address: str, path: str, headers: Mapping[str, str] = JSON) -> int:
    """Return the status of an answer, without reading the rest."""
    async with streamed(address, path, None, headers, "GET") as stream:
        stream.hang_up()
        return stream.status


async def test_stopping_router_closes_console_feed(parts: Cluster) -> None:
    router = await parts.add_router()
    async with watching(router.http_address) as page:
        await page.until()
        parts.routers.remove(router)
        await router.stop()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
            while True:
                await page.until()


async def test_console_feed_head_request_opens_no_stream(address: str) -> None:
    answer = await ask(address, "/console/feed", None, JSON, "HEAD")
    assert (answer.status, answer.body) == (200, b"")


# requests and operator calls


async def test_console_request_lookup_returns_record_and_events(
    parts: Cluster, address: str
) -> None:
    async with AsyncClient(parts.address) as client:
        async for _ in client.generate(PROMPT, max_tokens=3, request_id="r"):
            pass
    record = (await get(address, "/console/requests/r")).json
    assert (record["state"], record["output_tokens"]) == ("REQUEST_STATE_FINISHED", 3)
    assert [event["move"] for event in record["events"]] == ["open", "dispatch", "finish"]
    unknown = await get(address, "/console/requests/none")
    assert (unknown.status, unknown.error[0]) == (404, "unknown_request")


async def test_console_operator_endpoints_drain_and_set_policy(
    parts: Cluster, address: str
) -> None:
    [worker, _] = parts.workers
    drained = await ask(address, "/console/drain", {"worker_id": worker.worker_id})
    assert drained.json == {"worker_id": worker.worker_id, "num_running": 0}
    policy = await ask(address, "/console/policy", {"order": "hrrn", "max_queued": 7})
    assert (policy.json["order"], policy.json["overridden"]) == ("hrrn", ["order", "max_queued"])
    back = await ask(address, "/console/policy", {"reset": ["order", "max_queued"]})
    assert (back.json["order"], back.json["overridden"]) == ("fifo", [])
    fault = {"kind": "FAULT_KIND_KILL", "target": "any-worker"}
    forbidden = await ask(address, "/console/chaos", fault)
    assert (forbidden.status, forbidden.error[0]) == (403, "chaos_forbidden")


@pytest.mark.parametrize(
    "body",
    [{"worker": "a"}, {"worker_id": 7}, {"worker_id": None, "x": {}}, b"[]", b"{", b"\xff"],
)
async def test_console_rejects_malformed_operator_requests(address: str, body: object) -> None:
    answer = await ask(address, "/console/drain", body)
    assert answer.status in (400, 404)
    assert (await ask(address, "/console/policy", {"order": "none"})).status == 400
    assert (await ask(address, "/console/policy", {"max_queued": "many"})).status == 400


async def test_console_rejects_cross_site_requests(parts: Cluster, address: str) -> None:
    port = address.rpartition(":")[2]
    for headers, status in (
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        (JSON | {"origin": "http://evil.example"}, 403),
        (JSON | {"origin": "null"}, 403),
        (JSON | {"origin": "http://["}, 403),
        (JSON | {"host": "["}, 403),
        (JSON | {"host": ""}, 403),
        (JSON | {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"}, 403),
        (JSON | {"host": f"localhost:{port}", "origin": f"http://localhost:{port}"}, 200),
        (JSON | {"host": address, "origin": f"http://{address}"}, 200),
    ):
        assert (await ask(address, "/console/policy", {}, headers)).status == status, headers


# API keys


@dataclass
class Locked:
    cluster: Cluster
    keyring: Keyring
    keys: dict[str, Mapping[str, str]]

    @property
    def address(self) -> str:
        return self.cluster.routers[0].http_address


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[Locked]:
    keyring = Keyring(tmp_path / "keys.yaml")
    shown = {
        "acme": await keyring.key("acme", Scope.INFER, Scope.METRICS),
        "other": await keyring.key("other"),
        "watcher": await keyring.key("ops", Scope.METRICS),
        "operator": await keyring.key("ops", Scope.ADMIN),
    }
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    slow = replace(WORKER, fake=FakeModel(step_time=0.02))
    async with cluster(1, 1, config, slow) as parts:
        headers = {n: {**JSON, "authorization": f"Bearer {key}"} for n, key in shown.items()}
        yield Locked(parts, keyring, headers)


async def test_console_paths_require_same_scopes_as_grpc(locked: Locked) -> None:
    address, held = locked.address, locked.keys
    strange = {**JSON, "authorization": "Bearer ev_no_key"}
    for path in ("/console/", "/console/main.js"):
        assert (await get(address, path)).status == 200
    for method, path, statuses in (
        ("GET", "/console/requests/r", {"acme": 404, "operator": 404, "watcher": 403}),
        ("GET", "/console/requests", {"acme": 200, "operator": 200, "watcher": 403}),
        ("GET", "/v1/requests/r/explanation", {"acme": 404, "operator": 404, "watcher": 403}),
        ("POST", "/console/policy", {"operator": 200, "acme": 403, "watcher": 403}),
        ("POST", "/console/drain", {"operator": 404, "acme": 403, "other": 403}),
        ("POST", "/console/chaos", {"operator": 403, "acme": 403, "other": 403}),
        ("GET", "/console/feed", {"other": 403}),
    ):
        body = {} if method == "POST" else None
        assert (await ask(address, path, body, JSON, method)).status == 401, path
        assert (await ask(address, path, body, strange, method)).status == 401, path
        for name, status in statuses.items():
            answer = await ask(address, path, body, held[name], method)
            assert answer.status == status, (path, name)


async def test_console_tenant_sees_only_own_requests(locked: Locked) -> None:
    clients = {
        name: locked.keys[name]["authorization"].removeprefix("Bearer ")
        for name in ("acme", "other")
    }
    async with AsyncExitStack() as stack:
        for name, key in clients.items():
            client = AsyncClient(locked.cluster.address, api_key=key)
            await stack.enter_async_context(client)
            stream = client.generate(PROMPT, max_tokens=LONG, request_id=f"of-{name}")
            await anext(aiter(await stack.enter_async_context(stream)))
        seen = {}
        for name in ("acme", "watcher", "operator"):
            async with watching(locked.address, "", locked.keys[name]) as page:
                while len(page.keys) < 2:
                    await page.until()
                seen[name] = sorted(page.names.values())
        assert seen == {
            "acme": ["of-acme"],
            "watcher": [],
            "operator": ["acme/of-acme", "other/of-other"],
        }
        listed = {
            name: sorted(
                it["request_id"]
                for it in (await get(locked.address, "/console/requests", locked.keys[name])).json[
                    "requests"
                ]
            )
            for name in ("acme", "other", "operator")
        }
        assert listed == {
            "acme": ["of-acme"],
            "other": ["of-other"],
            "operator": ["acme/of-acme", "other/of-other"],
        }
        for name, status in (("acme", 200), ("other", 404)):
            answer = await get(locked.address, "/console/requests/of-acme", locked.keys[name])
            assert answer.status == status
        for path in ("/console/requests/acme%2Fof-acme", "/v1/requests/acme%2Fof-acme/explanation"):
            assert (await get(locked.address, path, locked.keys["operator"])).status == 200, path


async def test_console_feed_ends_when_key_is_revoked(locked: Locked) -> None:
    async with watching(locked.address, "", locked.keys["watcher"]) as page:
        await page.until()
        shown = locked.keys["watcher"]["authorization"].removeprefix("Bearer ")
        parts = keys.split_key(shown)
        assert parts is not None
        await locked.keyring._store.change(lambda document: document.with_key(parts[0], None))
        while page.failed is None:
            await page.until()
        assert page.failed == "unauthenticated"
