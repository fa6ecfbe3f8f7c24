"""Health of a router: the interval of its checks, and the notifications of watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from router.api.grpc import health_server
from router.api.grpc.health_server import HealthServer

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN


class Requests:
    def __init__(self) -> None:
        self.is_fit = True
        self.num_looks = 0

    @property
    def accepts_requests(self) -> bool:
        self.num_looks += 1
        return self.is_fit


class Watcher:
    def __init__(self, server: HealthServer, service: str) -> None:
        self.statuses: list[int] = []
        call: Any = None
        asked = HealthCheckRequest(service=service).SerializeToString()
        self.task = asyncio.create_task(self._watch(server.watch(asked, call)))

    async def _watch(self, answers: AsyncIterator[HealthCheckResponse]) -> None:
        async for answer in answers:
            self.statuses.append(answer.status)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_health_check_is_shared_by_all_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The test calls the timer itself.
    monkeypatch.setattr(health_server, "_POLL_INTERVAL_S", 3600.0)
    requests = Requests()
    server = HealthServer(requests, ["x"])
    services = ["", "x", "live", "y"]
    watchers = [Watcher(server, services[i % 4]) for i in range(100)]
    await settled()
    assert server._num_watching == 100
    requests.num_looks = 0
    for _ in range(10):
        server._tick()
        await settled()
    assert requests.num_looks == 10
    for is_fit in (False, True):
        requests.is_fit = is_fit
        server._tick()
        await settled()
    both = [SERVING, NOT_SERVING, SERVING]
    assert [it.statuses for it in watchers] == [both, both, [SERVING], [UNKNOWN]] * 25
    for watcher in watchers:
        watcher.task.cancel()
    await asyncio.gather(*(it.task for it in watchers), return_exceptions=True)
    server._tick()
    assert server._timer is None


async def test_health_change_found_by_a_new_watcher_reaches_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timer alone would miss the change: the state is the same at both of its polls."""
    monkeypatch.setattr(health_server, "_POLL_INTERVAL_S", 3600.0)
    requests = Requests()
    server = HealthServer(requests, [])
    first = Watcher(server, "")
    await settled()
    requests.is_fit = False
    second = Watcher(server, "")
    await settled()
    requests.is_fit = True
    server._tick()
    await settled()
    assert first.statuses == [SERVING, NOT_SERVING, SERVING]
    assert second.statuses == [NOT_SERVING, SERVING]
    for watcher in (first, second):
        watcher.task.cancel()
    await asyncio.gather(first.task, second.task, return_exceptions=True)
