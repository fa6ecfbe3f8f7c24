"""A cluster on IPv6 addresses, as on a network without IPv4."""

from __future__ import annotations

import socket
from pathlib import Path

import aiohttp
import pytest

from cluster.commands.ledger import parse
from cluster.config import load
from cluster.local.processes import ProcessCluster
from everlift.address import join_host_port, strip_brackets
from everlift.client.client import AsyncClient
from tests.support.example_counts import long
from tests.support.in_process import receive, right_tokens


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@needs_ipv6
@pytest.mark.parametrize("host", [long("::1"), "[::1]"])
async def test_cluster_listens_and_is_reachable_on_ipv6(tmp_path: Path, host: str) -> None:
    names = ("router.host", "router.internal_host", "router.http_host", "worker.host")
    settings = [f"{name}={host}" for name in (*names, "router.metrics_host")]
    ports = ["router.port=0", "router.http_port=0", "router.drain=0.2"]
    config = load(None, {}, ["model=fake", f"state_dir={tmp_path}", *settings, *ports])
    async with ProcessCluster(config) as parts, AsyncClient(parts.address) as client:
        assert parts.address.startswith("[::1]:")
        assert (await receive(client, [5, 6], 9)).tokens == right_tokens([5, 6], 9)
        url = f"http://{parts.http_addresses[0]}/health"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200
            await answer.read()


def test_ipv6_address_is_bracketed_only_with_a_port() -> None:
    assert (join_host_port("::1", 4), join_host_port("a.example", 4)) == ("[::1]:4", "a.example:4")
    assert (strip_brackets("[::1]"), strip_brackets("::1"), strip_brackets("127.0.0.1")) == (
        "::1",
        "::1",
        "127.0.0.1",
    )
    assert parse("[::1]:6380") == parse("::1:6380") == ("::1", 6380)
