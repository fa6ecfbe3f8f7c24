"""Time limits of a request: its deadline, its grace period, and its wait for a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from everlift.errors import Cancelled, DeadlineExceeded, EverliftError, NoWorker
from everlift.messages import OnDisconnect
from router.ledger.entry import State
from router.requests.request import LiveRequest, Phase


class Timeouts:
    """Deadlines of requests, and grace periods of requests without a client.

    ``end`` ends a request with a state and an error.
    """

    def __init__(
        self, grace_s: float, end: Callable[[LiveRequest, State, EverliftError], object]
    ) -> None:
        self._grace_s = grace_s
        self._end = end

    def set_deadline(self, live: LiveRequest, timeout_s: float | None) -> None:
        """Expire the request after ``timeout_s`` seconds; None sets no deadline."""
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_later(max(0.0, timeout_s), self._expire, live)

    def _expire(self, live: LiveRequest) -> None:
        if not live.is_ending:
            self._end(live, State.EXPIRED, DeadlineExceeded("the deadline passed"))

    def on_reader_left(self, live: LiveRequest, *, has_grace: bool) -> None:
        """Cancel the request, or start its grace period, if no reader of it is left.

        It is cancelled at once if its ``on_disconnect`` is CANCEL and ``has_grace`` is False. Call
        this whenever a reader has left. Do nothing if the request is ending, or if its
        ``on_disconnect`` is CONTINUE.
        """
        if live.is_ending or live.has_readers:
            return
        if live.on_disconnect is OnDisconnect.CANCEL and not has_grace:
            self.cancel_unread(live, "its client disconnected")
        else:
            self.start_grace(live)

    def start_grace(self, live: LiveRequest) -> None:
        """Cancel the request after the grace period, unless a client attaches before.

        A request whose ``on_disconnect`` is CONTINUE is not cancelled.
        """
        if live.on_disconnect is not OnDisconnect.CONTINUE:
            cause = f"no client attached again within {self._grace_s:g} s"
            live.end_grace()
            loop = asyncio.get_running_loop()
            live.grace = loop.call_later(self._grace_s, self.cancel_unread, live, cause)

    def cancel_unread(self, live: LiveRequest, cause: str) -> None:
        """Cancel the request, unless it is ending or has readers."""
        if not (live.is_ending or live.has_readers):
            self._end(live, State.CANCELLED, Cancelled(cause))


class WorkerWait:
    """Time limit of queued requests while their model has no worker.

    After ``limit_s`` seconds without a worker, ``fail`` is called to end the request. Before its
    first ``worker_up``, a model counts as having no worker.
    """

    def __init__(self, limit_s: float, fail: Callable[[LiveRequest, NoWorker], None]) -> None:
        self._limit_s = limit_s
        self._fail = fail
        #: models with a worker
        self._models: set[str] = set()

    def start_timer(self, live: LiveRequest) -> None:
        """Start the time limit of a request that is queued now, if its model has no worker.

        An earlier time limit of the request is cancelled.
        """
        live.end_worker_wait()
        if live.request.model not in self._models:
            loop = asyncio.get_running_loop()
            live.worker_wait = loop.call_later(self._limit_s, self._expire, live)

    @property
    def models_with_workers(self) -> tuple[str, ...]:
        return tuple(self._models)

    def worker_up(self, model: str, requests: Iterable[LiveRequest]) -> None:
        if model not in self._models:
            self._models.add(model)
            for live in requests:
                if live.request.model == model:
                    live.end_worker_wait()

    def last_worker_lost(self, model: str, requests: Iterable[LiveRequest]) -> None:
        self._models.discard(model)
        for live in requests:
            if live.phase is Phase.WAITING and live.request.model == model:
                self.start_timer(live)

    def _expire(self, live: LiveRequest) -> None:
        if live.phase is Phase.WAITING:
            cause = f"no worker of the model {live.request.model!r} was connected for "
            self._fail(live, NoWorker(f"{cause}{self._limit_s:g} s"))
