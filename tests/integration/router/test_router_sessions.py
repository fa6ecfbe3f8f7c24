"""A router's links to workers over real gRPC: liveness, loss and false alarms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from everlift.errors import UnknownWorker
from everlift.hashes import BLOCK_SIZE
from everlift.transport import GRPC
from everlift.v1 import chaos_pb2, session_pb2, session_pb2_grpc
from router import worker_sessions as module
from router.config import RouterConfig
from router.event_loop import FREEZE_S
from router.worker_sessions import Sessions
from tests.support.in_process import until

#: Pauses below FREEZE_S count as silence, and must not suffice for a loss.
CONFIG = RouterConfig(model="fake", worker_silence=2 * FREEZE_S)
HELLO = session_pb2.RouterHello(router_id="router", cluster_id="here")


class Worker(session_pb2_grpc.WorkerSessionServicer):
    """Worker that sends a frame every 20 ms while ``moving`` is set."""

    def __init__(self, worker_id: str = "w", address: str = "127.0.0.1:0") -> None:
        self.info = session_pb2.WorkerInfo(worker_id=worker_id, block_size=BLOCK_SIZE)
        self.state = session_pb2.WorkerState(num_running=3, num_waiting=1)
        #: sent with the next frame
        self.progress: list[session_pb2.Progress] = []
        self.frames: list[session_pb2.RouterFrame] = []
        self.num_streams = 0
        self.num_left = 0
        self.moving = asyncio.Event()
        self.moving.set()
        self._server = grpc.aio.server()
        session_pb2_grpc.add_WorkerSessionServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.info.address = f"127.0.0.1:{port}"

    async def Connect(
        self, request_iterator: AsyncIterator[session_pb2.RouterFrame], context: Any
    ) -> AsyncIterator[session_pb2.WorkerFrame]:
        reader = asyncio.create_task(self._read(request_iterator))
        self.num_streams += 1
        try:
            yield session_pb2.WorkerFrame(hello=self.info, state=self.state)
            while True:
                await asyncio.sleep(0.02)
                await self.moving.wait()
                progress, self.progress = self.progress, []
                yield session_pb2.WorkerFrame(state=self.state, progress=progress)
        finally:
            self.num_left += 1
            reader.cancel()

    async def _read(self, frames: AsyncIterator[session_pb2.RouterFrame]) -> None:
        async for frame in frames:
            self.frames.append(frame)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)


@dataclass
class Listener:
    """Listener that records the events of workers."""

    words: list[str] = field(default_factory=list)
    #: epochs of progress, and "turn" for the first iteration of the event loop after epoch 1
    epochs: list[int | str] = field(default_factory=list)

    def worker_up(self, info: session_pb2.WorkerInfo) -> None:
        self.words.append(f"up {info.worker_id}")

    def worker_frame(self, worker_id: str, frame: session_pb2.WorkerFrame) -> None:
        pass

    def worker_progress(self, worker_id: str, progress: session_pb2.Progress) -> None:
        self.epochs.append(progress.epoch)
        if progress.epoch == 1:
            asyncio.get_running_loop().call_soon(self.epochs.append, "turn")

    def worker_lost(self, worker_id: str) -> None:
        self.words.append(f"lost {worker_id}")


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def sessions(worker: Worker, listener: Listener) -> AsyncIterator[Sessions]:
    sessions = Sessions(CONFIG, HELLO, listener, GRPC)
    await sessions.reconcile([worker.info])
    await until(lambda: listener.words == ["up w"])
    yield sessions
    await sessions.close()


async def test_session_yields_to_event_loop_during_large_batch(
    sessions: Sessions, worker: Worker, listener: Listener
) -> None:
    worker.progress = [session_pb2.Progress(epoch=n) for n in range(1, 201)]
    await until(lambda: 200 in listener.epochs)
    assert listener.epochs.index("turn") < 100
    listener.epochs.remove("turn")
    assert listener.epochs == [*range(1, 201)]


def policies(worker: Worker) -> list[tuple[bool, int, str]]:
    """Return the policies that the worker received, and whether each came with the hello."""
    received = [frame for frame in worker.frames if frame.HasField("engine_policy")]
    return [
        (it.HasField("hello"), it.engine_policy.version, it.engine_policy.name) for it in received
    ]


async def test_session_sends_engine_policy_on_every_connection(
    sessions: Sessions, worker: Worker, listener: Listener
) -> None:
    sessions.set_policy(session_pb2.EnginePolicy(version=1, name="slai"))
    await until(lambda: policies(worker) == [(False, 1, "slai")])
    sessions.set_policy(session_pb2.EnginePolicy(version=2, name="static"))
    await until(lambda: policies(worker)[1:] == [(False, 2, "static")])
    worker.moving.clear()
    await until(lambda: listener.words[1:] == ["lost w"])
    worker.moving.set()
    await until(lambda: policies(worker)[2:] == [(True, 2, "static")])
    later = Worker("later")
    await later.start()
    await sessions.reconcile([worker.info, later.info])
    await until(lambda: policies(later) == [(True, 2, "static")])
    await later.stop()


async def test_session_sends_only_latest_pending_policy(sessions: Sessions, worker: Worker) -> None:
    for version, name in ((1, "slai"), (2, "magnus"), (3, "default")):
        sessions.set_policy(session_pb2.EnginePolicy(version=version, name=name))
    await until(lambda: policies(worker) == [(False, 3, "default")])


async def test_silent_worker_is_declared_lost_and_stream_closed(
    sessions: Sessions, worker: Worker, listener: Listener
) -> None:
    worker.moving.clear()
    await until(lambda: listener.words == ["up w", "lost w"])
    # The closed stream makes the worker abort this router's requests.
    await until(lambda: worker.num_left == 1)
    assert sessions.false_alarms == 0


@pytest.mark.parametrize(("quiet", "is_lost"), [(0.8, False), (0.86, True)])
async def test_worker_is_declared_lost_before_full_silence(
    sessions: Sessions,
    listener: Listener,
    quiet: float,
    is_lost: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker is lost after 85 to 90 % of worker_silence."""
    link = sessions.links[0]
    monkeypatch.setattr(module, "now", lambda: link.last_message_at + quiet * CONFIG.worker_silence)
    link._check_silence()
    assert (listener.words == ["up w", "lost w"]) == is_lost


async def test_worker_recovery_counts_as_false_alarm(
    sessions: Sessions, worker: Worker, listener: Listener
) -> None:
    worker.moving.clear()
    await until(lambda: listener.words == ["up w", "lost w"])
    worker.moving.set()
    await until(lambda: listener.words == ["up w", "lost w", "up w"])
    assert sessions.false_alarms == 1
    await sessions.reconcile([])
    assert sessions.false_alarms == 1


async def test_worker_at_reused_address_is_not_taken_for_old_one(
    sessions: Sessions, worker: Worker, listener: Listener
) -> None:
    await worker.stop()
    await until(lambda: listener.words == ["up w", "lost w"])
    other = Worker("next", worker.info.address)
    await other.start()
    await until(lambda: other.num_left == 1)
    await other.stop()
    assert listener.words == ["up w", "lost w"] and sessions.false_alarms == 0


async def test_stalled_router_declares_no_worker_lost(
    sessions: Sessions, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router wakes late, and has not read yet what arrived meanwhile."""
    link = sessions.links[0]
    checks: list[float] = []
    check = link._check_silence
    monkeypatch.setattr(link, "_check_silence", lambda: (checks.append(0.0), check()))
    link.last_message_at -= 10.0
    monkeypatch.setattr(module, "_STALL_S", -1.0)
    await asyncio.sleep(CONFIG.worker_silence / 4)
    assert not checks and listener.words == ["up w"]


async def test_worker_silence_restarts_after_router_freeze(
    sessions: Sessions, worker: Worker, listener: Listener
) -> None:
    worker.moving.clear()
    await asyncio.sleep(CONFIG.worker_silence / 4)
    time.sleep(2 * CONFIG.worker_silence + FREEZE_S)
    await asyncio.sleep(CONFIG.worker_silence / 4)
    assert listener.words == ["up w"]
    await until(lambda: listener.words == ["up w", "lost w"])


async def test_held_link_loses_worker_and_recovers(
    sessions: Sessions, worker: Worker, listener: Listener
) -> None:
    # Longer than a pause of this process and the silence together.
    sessions.links[0].delay_messages(5.0)
    await until(lambda: listener.words == ["up w", "lost w"])
    assert worker.num_left == 0
    await until(lambda: listener.words == ["up w", "lost w", "up w"])
    assert sessions.false_alarms == 1
    # The link reconnects, because the worker reports its whole cache only on a new stream.
    assert worker.num_left == 1


async def test_session_sends_drain_and_faults_to_worker(sessions: Sessions, worker: Worker) -> None:
    await until(lambda: sessions.links[0].state.num_running)
    assert sessions.drain("w") == 4
    sessions.inject("w", chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_SLOW, factor=9.0))
    await until(lambda: any(frame.drain for frame in worker.frames))
    await until(lambda: any(frame.fault.factor == 9.0 for frame in worker.frames))


async def test_session_rejects_commands_for_unknown_worker(sessions: Sessions) -> None:
    with pytest.raises(UnknownWorker):
        sessions.drain("stranger")
    with pytest.raises(UnknownWorker):
        sessions.inject("stranger", chaos_pb2.Fault())
