"""Simulated gRPC: calls between processes that can be slow, cut off, frozen and killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from everlift.v1 import session_pb2, session_pb2_grpc
from tests.simulated_cluster.clock import Clock, VirtualLoop
from tests.simulated_cluster.network import KEEPALIVE_S, Network
from tests.simulated_cluster.transport import SimTransport

LATENCY = 0.25
ADDRESS = "there:1"


class Echo(session_pb2_grpc.WorkerSessionServicer):
    """Server that answers each frame with one; a drain frame also ends the stream with an error."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.cancelled = 0

    async def Connect(self, frames: Any, context: Any) -> Any:  # type: ignore[override]
        try:
            async for frame in frames:
                self.received.append(frame.hello.router_id)
                if frame.drain:
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no", (("k", "v"),))
                name = frame.hello.router_id
                await context.write(
                    session_pb2.WorkerFrame(hello=session_pb2.WorkerInfo(worker_id=name))
                )
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, LATENCY)
        self.here, self.there = self.clock.process("here"), self.clock.process("there")
        self.echo = Echo()
        self.server = self._serve()
        self.got: list[str] = []
        self.error: BaseException | None = None

    def _serve(self) -> grpc.aio.Server:
        transport = SimTransport(self.network, self.there)
        server = transport.server(())
        session_pb2_grpc.add_WorkerSessionServicer_to_server(self.echo, server)
        transport.listen(server, ADDRESS)
        self.clock.run(self.there.create_task(server.start()), limit=1)
        return server

    def talk(self, *names: str, pause: float = 0.0, drain: bool = False) -> asyncio.Task[None]:
        """Send a frame for each name, and read the answers."""
        return self.here.create_task(self._talk(names, pause, drain))

    async def _talk(self, names: tuple[str, ...], pause: float, drain: bool) -> None:
        async def frames() -> AsyncIterator[session_pb2.RouterFrame]:
            for name in names:
                hello = session_pb2.RouterHello(router_id=name)
                yield session_pb2.RouterFrame(hello=hello, drain=drain)
                await asyncio.sleep(pause)

        async with SimTransport(self.network, self.here).channel(ADDRESS) as channel:
            stub: session_pb2_grpc.WorkerSessionAsyncStub
            stub = session_pb2_grpc.WorkerSessionStub(channel)
            try:
                async for frame in stub.Connect(frames()):
                    self.got.append(frame.hello.worker_id)
            except grpc.aio.AioRpcError as error:
                self.error = error

    @property
    def code(self) -> grpc.StatusCode:
        assert isinstance(self.error, grpc.aio.AioRpcError)
        return self.error.code()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    assert not world.clock.uncaught
    world.clock.close()


def test_sim_network_answers_in_order_after_a_round_trip(world: World) -> None:
    task = world.talk("a", "b")
    world.clock.run_for(2 * LATENCY - 0.01)
    assert world.got == []
    world.clock.run(task, limit=5)
    assert world.got == ["a", "b"]


def test_sim_network_stopped_server_is_unavailable(world: World) -> None:
    world.clock.run(world.there.create_task(world.server.stop(None)), limit=1)
    world.clock.run(world.talk("a"), limit=5)
    assert world.code is grpc.StatusCode.UNAVAILABLE


def test_sim_network_abort_carries_its_status(world: World) -> None:
    world.clock.run(world.talk("a", drain=True), limit=5)
    assert isinstance(world.error, grpc.aio.AioRpcError)
    assert world.code is grpc.StatusCode.FAILED_PRECONDITION
    assert world.error.details() == "no"
    assert ("k", "v") in [*world.error.trailing_metadata()]


def test_sim_network_cut_link_delays_messages_until_healed(world: World) -> None:
    task = world.talk("a", "b", "c", pause=1.0)
    world.clock.run_for(0.8)
    assert world.got == ["a"]
    world.network.cut(world.here, world.there, 4.0)
    world.clock.run_for(3.9)
    assert world.got == ["a"]
    world.clock.run(task, limit=5)
    assert world.got == ["a", "b", "c"]


def test_sim_network_long_cut_breaks_a_call_at_both_ends(world: World) -> None:
    task = world.talk("a", "b", pause=100.0)
    world.clock.run_for(1.0)
    world.network.cut(world.here, world.there, 2 * KEEPALIVE_S)
    world.clock.run(task, limit=KEEPALIVE_S + 1)
    assert world.code is grpc.StatusCode.UNAVAILABLE
    assert world.echo.cancelled == 1


def test_sim_network_reset_breaks_a_call_at_both_ends(world: World) -> None:
    task = world.talk("a", "b", pause=100.0)
    world.clock.run_for(1.0)
    world.network.reset(world.here, world.there)
    world.clock.run(task, limit=1)
    assert (world.got, world.echo.cancelled) == (["a"], 1)
    assert world.code is grpc.StatusCode.UNAVAILABLE


def test_sim_network_killed_server_breaks_its_calls(world: World) -> None:
    task = world.talk("a", "b", pause=100.0)
    world.clock.run_for(1.0)
    world.network.kill(world.there)
    world.clock.run(task, limit=1)
    assert world.code is grpc.StatusCode.UNAVAILABLE
    assert world.network.find(ADDRESS) is None


def test_sim_network_server_detects_a_killed_client(world: World) -> None:
    world.talk("a", "b", pause=100.0)
    world.clock.run_for(1.0)
    world.network.kill(world.here)
    world.clock.run_for(1.0)
    assert (world.echo.received, world.echo.cancelled) == (["a"], 1)


def test_sim_network_server_detects_a_cancelled_call(world: World) -> None:
    task = world.talk("a", "b", pause=100.0)
    world.clock.run_for(1.0)
    task.cancel()
    world.clock.run_for(1.0)
    assert world.echo.cancelled == 1


def test_sim_network_frozen_server_answers_after_thawing(world: World) -> None:
    world.network.freeze(world.there, 5.0)
    task = world.talk("a")
    world.clock.run_for(4.9)
    assert world.got == []
    world.clock.run(task, limit=5)
    assert world.got == ["a"]


def test_sim_network_stalled_reader_blocks_its_writer(world: World) -> None:
    world.network.freeze(world.there, 10.0)
    world.talk(*[str(n) for n in range(1000)])
    sent: list[Any] = []
    world.network.send = _counted(world.network, sent)  # type: ignore[method-assign]
    world.clock.run_for(9.0)
    assert 0 < len(sent) < 100
    world.clock.run_for(60.0)
    assert len(world.got) == 1000


def _counted(network: Network, sent: list[Any]) -> Any:
    send = network.send

    def counted(link: frozenset[VirtualLoop], to: VirtualLoop, *what: Any) -> None:
        sent.append(what)
        send(link, to, *what)

    return counted
