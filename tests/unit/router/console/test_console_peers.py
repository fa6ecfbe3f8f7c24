"""Counts of other routers, including silent ones and those with several leases."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from everlift.v1 import session_pb2
from router.console import console
from router.console.console import Console
from router.console.counts import Peers
from tests.support.router.console_support import FakeCluster

SILENT = "10.0.0.9:1"


class Channel:
    """Channel to a router, which answers unless it is the ``SILENT`` one."""

    def __init__(self, address: str) -> None:
        self._address = address

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        async def count(request: session_pb2.CountRequest, timeout: float) -> session_pb2.Counts:
            # As over a network, all routers are asked before one of them answers.
            await asyncio.sleep(0)
            if self._address == SILENT:
                raise AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata())
            return session_pb2.Counts(router_id=self._address)

        return count

    unary_stream = stream_unary = stream_stream = unary_unary

    async def close(self) -> None:
        await asyncio.sleep(0)


class Cluster:
    """Ledger with leases, and transport that records the addresses of its channels."""

    def __init__(self, leases: dict[str, str]) -> None:
        self._leases = leases
        self.asked: list[str] = []

    async def gateways(self) -> dict[str, str]:
        return self._leases

    def channel(self, address: str) -> Channel:
        self.asked.append(address)
        return Channel(address)


async def counts(cluster: Cluster) -> tuple[list[str], int]:
    answered, num_silent = await Peers("me", cast("Any", cluster), cast("Any", cluster)).counts()
    return [each.router_id for each in answered], num_silent


async def test_peers_ask_an_address_with_two_leases_once() -> None:
    cluster = Cluster({"me": "a:1", "b": "b:1", "c": SILENT, "c again": SILENT, "b again": "b:1"})
    assert await counts(cluster) == (["b:1"], 1)
    assert sorted(cluster.asked) == [SILENT, "b:1"]


async def test_peers_skip_earlier_leases_of_their_own_address() -> None:
    cluster = Cluster({"me": "a:1", "me before": "a:1"})
    assert await counts(cluster) == ([], 0)
    assert not cluster.asked


async def test_console_keeps_asking_peers_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_POLL_INTERVAL_S", 0)
    polled_again = asyncio.Event()

    class Odd:
        num_asked = 0

        async def counts(self) -> tuple[list[session_pb2.Counts], int]:
            self.num_asked += 1
            if self.num_asked == 1:
                raise KeyError(SILENT)
            polled_again.set()
            return [], 0

        async def close(self) -> None:
            pass

    nobody = cast("Any", None)
    looking = Console(FakeCluster().snapshot(), nobody, nobody, nobody, cast("Any", Odd()))
    running = asyncio.create_task(looking.run())
    async with asyncio.timeout(20):
        await polled_again.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
