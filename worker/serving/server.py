"""gRPC server of the sessions: one stream per router, handled in the event loop's thread.

    engine's thread --report--> deliver --> outbox --take_frame, when the stream is free--> frame

A frame is one message. A write to a slow router delays only the next frame to the same router.
Other routers receive a frame at least every ``heartbeat`` seconds (a setting), even while the
engine is idle or busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError

from everlift import logs
from everlift.address import join_host_port
from everlift.channels import MAX_MESSAGE_BYTES
from everlift.transport import Transport, internal
from everlift.v1 import chaos_pb2, session_pb2, session_pb2_grpc
from worker.config import WorkerConfig
from worker.serving.adapter_check import check_adapter
from worker.serving.fault import NetworkPartitions, kill_or_pause
from worker.serving.loop import FirstSteps, Report
from worker.serving.sessions import Session, Sessions

log = logs.get_logger(__name__)

_Context: TypeAlias = grpc.aio.ServicerContext[session_pb2.RouterFrame, session_pb2.WorkerFrame]

#: Seconds for which starts that routers sent before they knew of the drain are still answered.
_LINGER_S = 0.2
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A router that is frozen or unreachable loses its sequences after ten seconds.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Routers may ping at any rate.
    ("grpc.http2.max_ping_strikes", 0),
)


class SessionServer(session_pb2_grpc.WorkerSessionServicer):
    """Server of ``sessions``: bound to host and port when created, serving after ``start``."""

    def __init__(
        self, config: WorkerConfig, sessions: Sessions, transport: Transport | None = None
    ) -> None:
        """Create the server.

        ``transport`` is used instead of the default: gRPC over TCP, with TLS if it is configured.
        Raises SettingsError for invalid TLS files, and OSError if the port is taken.
        """
        self._config = config
        self._sessions = sessions
        self._info = session_pb2.WorkerInfo()
        self._changed = asyncio.Event()
        self._partitions = NetworkPartitions()
        self._num_streams = 0
        self._transport = transport or internal(config.internal_tls)
        self._server = self._transport.server(_OPTIONS)
        session_pb2_grpc.add_WorkerSessionServicer_to_server(self, self._server)
        self.address = self._bind(config.host, config.port)

    def _bind(self, host: str, port: int) -> str:
        return join_host_port(
            host, self._transport.listen(self._server, join_host_port(host, port))
        )

    @property
    def has_no_router(self) -> bool:
        """True if no router has a stream open."""
        return not self._num_streams

    async def start(self, info: session_pb2.WorkerInfo) -> None:
        """Start to accept routers; the first frame to each of them contains ``info``."""
        self._info = info
        await self._server.start()

    async def stop(self) -> None:
        """Stop serving and break all open streams."""
        self._partitions.heal()
        await self._server.stop(grace=None)

    def deliver(self, report: Report) -> None:
        self._sessions.deliver(report)
        self._changed.set()

    def announce(self, first: FirstSteps, confirmed: Callable[[], None]) -> None:
        self._sessions.announce(first, confirmed)

    async def drain(self) -> None:
        """Return all sequences to the routers, and end the sessions when that is done.

        The whole wait is limited by the setting ``drain_timeout``.
        """
        self._sessions.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout):
                await self._until(lambda: self._sessions.is_idle)
                await asyncio.sleep(_LINGER_S)
                self._sessions.end_all()
                await self._until(lambda: not self._num_streams)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # The generated type requires an iterator, but grpc.aio also accepts a coroutine that writes.
    async def Connect(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[session_pb2.RouterFrame],
        context: _Context,
    ) -> None:
        frames = aiter(request_iterator)
        first = await self._read_hello(frames, context)
        await self._partitions.wait_until_connected(first.hello.router_id)
        wake = asyncio.Event()
        session = self._sessions.open_session(first.hello.router_id, wake.set)
        self._num_streams += 1
        reader = asyncio.create_task(self._read(session, first, frames, context))
        try:
            await self._write(session, wake, context)
        finally:
            await self._partitions.wait_until_connected(session.router_id)
            self._sessions.end_session(session)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._num_streams -= 1
            self._changed.set()

    async def CheckAdapter(
        self,
        request: session_pb2.CheckAdapterRequest,
        context: grpc.aio.ServicerContext[
            session_pb2.CheckAdapterRequest, session_pb2.CheckAdapterResponse
        ],
    ) -> session_pb2.CheckAdapterResponse:
        return await check_adapter(self._config, request.source)

    async def _read_hello(
        self,
        frames: AsyncIterator[session_pb2.RouterFrame],
        context: _Context,
    ) -> session_pb2.RouterFrame:
        """Read and return the first frame of a router.

        The call is aborted if the frame has no router id, or if this worker has a cluster id and
        the frame does not have the same one.
        """
        try:
            first = await anext(frames, session_pb2.RouterFrame())
        except DecodeError:
            first = session_pb2.RouterFrame()
        if not first.hello.router_id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the first frame must have a hello with router_id"
            )
        expected = self._config.cluster_id
        if expected and first.hello.cluster_id != expected:
            log.warning("router belongs to another cluster", router_id=first.hello.router_id)
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "this worker belongs to another cluster"
            )
        return first

    async def _read(
        self,
        session: Session,
        first: session_pb2.RouterFrame,
        frames: AsyncIterator[session_pb2.RouterFrame],
        context: _Context,
    ) -> None:
        """Handle ``first`` and all further frames of a router, then end its session.

        An error is not raised: it sets the status of the call, and other sessions continue.
        """
        try:
            self._receive(session, first)
            async for frame in frames:
                await self._partitions.wait_until_connected(session.router_id)
                self._receive(session, frame)
        except DecodeError:
            log.warning("malformed frame", router_id=session.router_id)
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details("malformed frame")
        except Exception:
            log.exception("session failed", router_id=session.router_id)
            context.set_code(grpc.StatusCode.INTERNAL)
        finally:
            await self._partitions.wait_until_connected(session.router_id)
            self._sessions.end_session(session)

    def _receive(self, session: Session, frame: session_pb2.RouterFrame) -> None:
        if frame.HasField("fault"):
            self._inject(frame.fault)
        self._sessions.receive(session, frame, asyncio.get_running_loop().time())

    def _inject(self, fault: chaos_pb2.Fault) -> None:
        if not self._config.chaos:
            log.warning("fault ignored: this worker was started without chaos")
            return
        log.warning(
            "fault injected",
            worker_id=self._info.worker_id,
            kind=chaos_pb2.FaultKind.Name(fault.kind),
            rank=fault.rank,
            seconds=fault.seconds,
        )
        if fault.kind == chaos_pb2.FAULT_KIND_PARTITION:
            self._partitions.add(fault.peer, fault.seconds)
        elif fault.kind == chaos_pb2.FAULT_KIND_SLOW or fault.rank:
            self._sessions.inject(fault)
        else:
            kill_or_pause(fault)

    async def _write(
        self,
        session: Session,
        wake: asyncio.Event,
        context: _Context,
    ) -> None:
        frame = self._sessions.take_frame(session)
        frame.hello.CopyFrom(self._info)
        await context.write(frame)
        while not session.is_closed or session.outbox:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.heartbeat):
                    await wake.wait()
            wake.clear()
            await self._partitions.wait_until_connected(session.router_id)
            await context.write(self._sessions.take_frame(session))
