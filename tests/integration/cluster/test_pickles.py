"""Pickles that are sent to every port of a cluster of plain processes.

No process loads one, and all continue to serve. The ports are the documented ones.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from cluster.config import load
from cluster.local.processes import ProcessCluster
from everlift.client.client import AsyncClient
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from tests.conftest import listening_ports
from tests.support.router.bystander import beside_a_good_stream
from tests.support.router.fronts import GENERATE, INFER, Fronts
from tests.support.router.http_client import get
from tests.support.worker.pickles import leaving, saved

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
#: Byte orders of the length before a message.
LENGTHS = ("big", "little")
_ANSWER_S = 60.0


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ProcessCluster]:
    """Cluster whose worker has two ranks, and thus a connection between them."""
    settings = ["model=fake", "router.port=0", "router.http_port=0", "num_workers=1"]
    # A rank may wait for a core for seconds.
    settings += ["worker.tensor_parallel=2", "worker.rank_silence=20", "router.worker_silence=20"]
    settings += ["router.drain=0.2", "log_level=debug"]
    async with ProcessCluster(load(None, {}, [*settings, f"state_dir={tmp_path}"])) as cluster:
        yield cluster


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """Path of a file that a loaded pickle creates; it must not exist after the test."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


def test_marker_pickle_leaves_its_marker_when_loaded(tmp_path: Path) -> None:
    for protocol in PROTOCOLS:
        path = tmp_path / str(protocol)
        pickle.loads(leaving(path, protocol))
        assert path.exists()


def addresses(cluster: ProcessCluster) -> dict[str, set[tuple[str, int]]]:
    """Return the addresses on which each process listens, from /proc."""
    found = {f"{pid}": {decoded(it) for it in listening_ports(pid)} for pid in cluster.pids}
    return {pid: ports for pid, ports in found.items() if ports}


def decoded(address: str) -> tuple[str, int]:
    host, _, port = address.partition(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    # An IPv4 address may be written as an IPv6 one.
    name = socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
    return name, int(port, 16)


async def test_ports_are_documented_and_on_loopback(
    cluster: ProcessCluster,
) -> None:
    router, worker = cluster.routers[0], cluster.workers[0]
    places = [
        *(cluster.addresses[0], cluster.http_addresses[0], cluster.metrics_addresses[0]),
        *(router.internal_address, await worker_address(cluster)),
    ]
    found = addresses(cluster)
    expected = {(host, int(port)) for host, _, port in (place.rpartition(":") for place in places)}
    ours = set().union(*found.values())
    assert {host for host, _ in ours} == {"127.0.0.1"}
    assert expected <= ours
    # The ledger listens on a unix socket only.
    assert str(cluster._ledger.pid) not in found
    # One more may be the connection between the ranks.
    assert len(ours - expected) <= 1
    assert found.keys() == {str(pid) for pid in (*router.pids, worker.pids[0])}


async def worker_address(cluster: ProcessCluster) -> str:
    async with AsyncClient(cluster.address) as client:
        [worker] = (await client.status()).workers
        return worker.address


async def test_raw_pickles_are_loaded_at_no_port(cluster: ProcessCluster, marker: Path) -> None:
    ports = sorted(set().union(*addresses(cluster).values()))
    assert len(ports) >= 5
    async with beside_a_good_stream(cluster.address):
        for host, port in ports:
            for data in frames(marker):
                with suppress(ConnectionError):
                    await say(host, port, data)
    await serves(cluster)


def frames(marker: Path) -> Iterator[bytes]:
    """Yield raw pickles, and pickles in the framing of other servers' protocols."""
    zmq = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for protocol in PROTOCOLS:
        data = leaving(marker, protocol)
        yield data
        yield zmq + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x00" + data
        for order in LENGTHS:
            for size in (4, 8):
                yield len(data).to_bytes(size, order) + data  # type: ignore[arg-type]
    yield saved(marker)


async def say(host: str, port: int, data: bytes) -> None:
    """Send data and the end of the stream, and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(30):
            while await reader.read(1 << 16):
                pass
    finally:
        writer.transport.abort()


async def serves(cluster: ProcessCluster) -> None:
    """Check that all processes still serve, each at its own port.

    Without a worker a request would wait; then the workers' logs are shown.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            served = await Fronts(cluster.address, cluster.http_addresses[0], "fake").completion()
    except TimeoutError:
        logs = sorted((cluster.config.state_dir / "logs").glob("worker-*.log"))
        pytest.fail("\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs))
    assert served is None
    metrics = await get(cluster.metrics_addresses[0], "/metrics")
    assert metrics.status == 200 and b"everlift_requests_total" in metrics.body
    assert all(Path(f"/proc/{pid}/exe").exists() for pid in cluster.pids)


def methods() -> Iterator[str]:
    """Yield all gRPC methods of the port for clients and of the internal ports."""
    for file in (pb.DESCRIPTOR, session_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            yield from (f"/{service.full_name}/{method.name}" for method in service.methods)
    yield INFER


async def test_pickles_in_messages_and_fields_are_never_loaded(
    cluster: ProcessCluster, marker: Path
) -> None:
    places = [cluster.address, cluster.routers[0].internal_address, await worker_address(cluster)]
    data = leaving(marker)
    field = b"\x0a" + len(data).to_bytes(1, "big") + data
    async with beside_a_good_stream(cluster.address):
        for place in places:
            async with grpc.aio.insecure_channel(place) as channel:
                for method in methods():
                    for message in (data, field):
                        call = channel.stream_stream(method)(timeout=30)
                        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                            await call.write(message)
                            await call.done_writing()
                            async for _ in call:
                                pass
        await in_headers_and_bodies(cluster, data)
    await serves(cluster)


async def in_headers_and_bodies(cluster: ProcessCluster, data: bytes) -> None:
    fronts = Fronts(cluster.address, cluster.http_addresses[0], "fake")
    text = data.hex()
    for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
        headers = {"content-type": kind, "idempotency-key": text[:100], "cookie": text}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert await fronts.over_http(path, data, headers) is not None
    for headers in ({"idempotency-key": text}, {"traceparent": text}):
        await fronts.native(pb.GenerateRequest(text="a", max_tokens=1), headers)
    with pytest.raises(grpc.aio.AioRpcError):
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            call = channel.unary_stream(GENERATE)(b"", metadata=(("pickle-bin", data),))
            async for _ in call:
                pass


@pytest.mark.long
async def test_ledger_rejects_pickles_without_its_password(
    cluster: ProcessCluster, marker: Path
) -> None:
    [home] = cluster.config.state_dir.glob("ledger")
    [line] = (it for it in (home / "valkey.conf").read_text().splitlines() if "unixsocket " in it)
    path = line.split()[1].strip('"')
    for data in frames(marker):
        with socket.socket(socket.AF_UNIX) as line_, suppress(ConnectionError):
            line_.settimeout(30)
            line_.connect(path)
            line_.sendall(data)
            line_.shutdown(socket.SHUT_WR)
            while line_.recv(1 << 16):
                pass
    with Redis(unix_socket_path=path, retry=Retry(NoBackoff(), 0)) as redis:
        for command in (["SET", "a", data], ["EVAL", "return 1", 0], ["CONFIG", "GET", "*"]):
            with pytest.raises(RedisError):
                redis.execute_command(*command)
    await serves(cluster)
    assert os.stat(path).st_mode & 0o077 == 0
