"""Connection between a worker and a single caller in the same process, without a gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from everlift.v1 import session_pb2
from worker.serving.loop import FirstSteps, Report
from worker.serving.sessions import Sessions

_NAME = "local"


class LocalSession:
    """Replacement of a rank's gRPC server for a caller in the same process.

    ``receive`` is called with each progress message of a request. The calls are made in the event
    loop's thread, and never from inside ``start_all`` or ``abort``.
    """

    address = ""
    has_no_router = False

    def __init__(self, sessions: Sessions, receive: Callable[[session_pb2.Progress], None]) -> None:
        self._sessions = sessions
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._is_flush_scheduled = False
        self._session = sessions.open_session(_NAME, self._notify)

    def start_all(self, starts: Iterable[session_pb2.Start]) -> None:
        self._send(session_pb2.RouterFrame(starts=starts))

    def abort(self, epoch: int, choices: Iterable[int] = ()) -> None:
        """Abort the given choices of a request, or all of them if ``choices`` is empty.

        ``epoch`` identifies the request. ``receive`` gets no further progress of aborted choices.
        A call from inside ``receive`` is the only exception: progress messages that were collected
        together with the current one still follow.
        """
        abort = session_pb2.Abort(epoch=epoch, choices=choices)
        self._send(session_pb2.RouterFrame(aborts=[abort]))

    def _send(self, frame: session_pb2.RouterFrame) -> None:
        self._sessions.receive(self._session, frame, self._loop.time())

    async def start(self, info: session_pb2.WorkerInfo) -> None:
        """Do nothing, because no router needs the worker's description."""

    def deliver(self, report: Report) -> None:
        self._sessions.deliver(report)

    def announce(self, first: FirstSteps, confirmed: Callable[[], None]) -> None:
        self._sessions.announce(first, confirmed)

    async def drain(self) -> None:
        """Do nothing, because there is no other worker to which requests could be migrated."""

    async def stop(self) -> None:
        self._sessions.end_session(self._session)

    def _notify(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        # Routers need the worker's state for placement; with a single worker it is not used.
        for progress in self._session.outbox.take_frame(session_pb2.WorkerState()).progress:
            self._receive(progress)
