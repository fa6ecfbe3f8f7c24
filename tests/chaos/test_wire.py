"""Hostile connections to a real router: its memory for them is bounded.

Users of the client library are not disturbed. Other clients may receive CANCELLED: a gRPC server
with thousands of calls drops some of them.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.raw_http2 import connection
from tests.chaos.support import Cluster, Load, config, resident, running

GENERATE = "/everlift.v1.Inference/Generate"


@pytest.mark.long
@pytest.mark.parametrize(
    "reset",
    [True, pytest.param(False, marks=pytest.mark.long)],
    ids=["taken back at once", "left open"],
)
async def test_connection_with_100_000_streams_disturbs_no_client(
    tmp_path: Path, reset: bool
) -> None:
    async with running(config(tmp_path, workers=1)) as cluster:
        before = resident(cluster.routers[0].pids[0])
        async with Load(cluster.addresses, 8, max_tokens=300) as load:
            await load.until(5)
            async with connection(cluster.address) as hostile:
                with suppress(ConnectionError):
                    await hostile.open(GENERATE, 100_000, reset=reset)
                await load.finish()
                load.check()
                await check_served(cluster, seed=1)
        await check_served(cluster, seed=2)
        assert resident(cluster.routers[0].pids[0]) - before < 200 << 20


async def check_served(cluster: Cluster, seed: int) -> None:
    async with Load(cluster.addresses, 4, seed=seed, max_tokens=20) as load:
        await load.finish()
    load.check()


async def test_invalid_frames_end_only_their_connection(tmp_path: Path) -> None:
    async with running(config(tmp_path, workers=1)) as cluster:
        places = (cluster.address, cluster.routers[0].internal_address, worker_address(cluster))
        async with Load(cluster.addresses, 8, max_tokens=300, plain=True) as load:
            await load.until(5)
            for place in places * 3:
                async with connection(place) as hostile:
                    with suppress(ConnectionError):
                        await hostile.send(os.urandom(1 << secrets.randbelow(20)))
            await load.finish()
        load.check()
        assert not load.moved


def worker_address(cluster: Cluster) -> str:
    ready = [event for event in cluster.events("worker-0") if event["event"] == "rank ready"]
    return str(ready[-1]["address"])
