"""Console of one router: its page, its event stream (the feed), and its paths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from everlift import logs
from everlift.errors import EverliftError, LedgerUnavailable, TooManyConnections
from router.api.http import errors
from router.api.http.endpoint import Call, Disconnected, cancel_on_disconnect
from router.api.http.writer import encode
from router.api.http_api import Path
from router.auth.caller import Authenticator, Scope
from router.console.actions import Actions
from router.console.counts import Peers
from router.console.page import SECURITY_HEADERS, Page
from router.console.scaling import described
from router.console.slot_grid import MAX_LANES, Lanes
from router.console.snapshot import Snapshot
from router.console.viewer import Viewer
from router.event_loop import now
from router.ledger.base import Ledger, LoadReport, ScalingReport

log = logs.get_logger(__name__)

#: Seconds between two frames for a page that reads them in time.
FRAME_S = 0.25
#: Maximum number of pages that one router feeds.
MAX_VIEWERS = 32
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class Audience:
    """Count of the pages that receive the event stream, with an upper limit."""

    def __init__(self) -> None:
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def check_capacity(self) -> None:
        """Check that another page may connect. Raises TooManyConnections at the limit."""
        if self._size >= MAX_VIEWERS:
            raise TooManyConnections(f"this router already serves {MAX_VIEWERS} consoles")

    @contextmanager
    def connected(self) -> Iterator[None]:
        self._size += 1
        try:
            yield
        finally:
            self._size -= 1


class Feed:
    """ASGI response of the console's event stream.

    ``frame`` returns the next event as JSON: the changes since the last one. If it raises an
    EverliftError, this error is sent as the last event; for any other exception, an internal error
    without details is sent. A slow reader receives fewer events.
    """

    def __init__(self, audience: Audience, frame: Callable[[], str]) -> None:
        self._audience = audience
        self._frame = frame

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        with self._audience.connected(), suppress(Disconnected):
            await cancel_on_disconnect(receive, self._stream_frames(send))

    async def _stream_frames(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            while True:
                await _send_event(send, "frame", self._frame())
                await asyncio.sleep(FRAME_S)
        except EverliftError as error:
            await _send_event(send, "error", encode(errors.described(error, {})))
        except Exception:
            log.exception("the event stream of a console failed")
            unknown = EverliftError("internal error; see the router's log")
            await _send_event(send, "error", encode(errors.described(unknown, {})))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, kind: str, data: str) -> None:
    body = f"event: {kind}\ndata: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


#: Seconds between two snapshots while no page is open, so that a new page can show recent events.
_IDLE_S = 1.0
#: Minimum pause after a snapshot, as a multiple of its CPU time. The pause limits the router's load
#: in a cluster with many workers. The smaller CPU time of the last two snapshots is used, because a
#: single garbage collection during a snapshot would otherwise stop the page for many seconds.
_PAUSE_FACTOR = 50
#: While a page is open: seconds between two reads of the ledger, and of other routers' counters.
_POLL_INTERVAL_S = 1.0
#: Factor by which the other routers' counters are read less often while no page is open.
_IDLE_POLL_FACTOR = 10


class Console:
    def __init__(
        self,
        snapshot: Snapshot,
        actions: Actions,
        authenticator: Authenticator,
        ledger: Ledger,
        peers: Peers,
    ) -> None:
        self._snapshot = snapshot
        self._actions = actions
        self._authenticator = authenticator
        self._ledger = ledger
        self._peers = peers
        self._page = Page()
        self._audience = Audience()
        #: sections of the last snapshot
        self._sections: Mapping[str, Any] = {}
        #: sections of the last snapshot as JSON; empty until a page needs them
        self._encoded: dict[str, str] = {}
        #: messages of the failures that were logged; each is logged only once
        self._failed: set[str] = set()

    async def run(self) -> None:
        """Take snapshots of the cluster until cancelled."""
        polling = [
            asyncio.create_task(self._poll_ledger()),
            asyncio.create_task(self._poll_peers()),
        ]
        last_cost_s = 0.0
        try:
            while True:
                # The cost is CPU time of this thread, because elapsed time would make snapshots
                # less frequent on a busy machine.
                began = time.thread_time()
                self._take_snapshot()
                cost_s = time.thread_time() - began
                pause_s = FRAME_S if self._audience else _IDLE_S
                await asyncio.sleep(max(pause_s, _PAUSE_FACTOR * min(cost_s, last_cost_s)))
                last_cost_s = cost_s
        finally:
            for task in polling:
                task.cancel()
            await asyncio.gather(*polling, return_exceptions=True)
            await self._peers.close()

    def _take_snapshot(self) -> None:
        try:
            self._sections, self._encoded = self._snapshot.update(now()), {}
        except Exception:
            self._log_failure("the console's snapshot failed")

    def _log_failure(self, message: str) -> None:
        if message not in self._failed:
            self._failed.add(message)
            log.exception(message)

    def _as_json(self) -> Mapping[str, str]:
        if not self._encoded:
            self._encoded = {name: encode(value) for name, value in self._sections.items()}
        return self._encoded

    async def _poll_ledger(self) -> None:
        while True:
            try:
                load, scaling = await self._read_reports() if self._audience else (None, [])
                self._snapshot.load = load
                self._snapshot.scaling = described(scaling, now())
            except Exception:
                self._log_failure("the console could not read the ledger")
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _read_reports(self) -> tuple[LoadReport | None, list[ScalingReport]]:
        try:
            return await self._ledger.load(), await self._ledger.scaling()
        except LedgerUnavailable:
            return None, []

    async def _poll_peers(self) -> None:
        while True:
            await self._read_peers()
            for _ in range(_IDLE_POLL_FACTOR):
                await asyncio.sleep(_POLL_INTERVAL_S)
                if self._audience:
                    break

    async def _read_peers(self) -> None:
        try:
            counts, num_silent = await self._peers.counts()
            self._snapshot.add_counts(counts, num_silent, now())
        except LedgerUnavailable:
            # The ledger lists the other routers. Until it is available again, their last counters
            # are shown.
            pass
        except Exception:
            self._log_failure("the console could not read other routers")

    async def feed(self, call: Call) -> ASGIApp:
        """Return the event stream for a page.

        Raises TooManyConnections if too many pages are connected. The stream ends with the error
        Unauthenticated or Forbidden when the caller's key becomes invalid.
        """
        self._audience.check_capacity()
        call.response_headers |= SECURITY_HEADERS
        if call.request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if not self._audience:
            self._take_snapshot()
        requested = call.request.query_params.get("lanes")
        chosen = None if requested is None else [*filter(None, requested.split(",", MAX_LANES))]
        viewer = Viewer(self._snapshot, call.caller, Lanes(chosen))

        def frame() -> str:
            viewer.caller = self._authenticator.admit(call.headers)
            viewer.caller.check(Scope.METRICS, Scope.ADMIN)
            return viewer.frame(self._as_json(), now())

        return Feed(self._audience, frame)

    def paths(self) -> list[Path]:
        """Return the console's paths with the scopes (permissions) of which a caller needs one.

        The same calls over gRPC need the same scopes. A path without scopes is open to anyone.
        """
        page, actions = self._page, self._actions
        return [
            ("GET", "/console", page.without_slash),
            ("GET", "/console/", page.index),
            ("GET", "/console/feed", self.feed, Scope.METRICS, Scope.ADMIN),
            ("GET", "/console/requests", actions.recent, Scope.INFER, Scope.ADMIN),
            (
                *("GET", "/console/requests/{request_id:path}", actions.request),
                *(Scope.INFER, Scope.ADMIN),
            ),
            ("POST", "/console/drain", actions.drain, Scope.ADMIN),
            ("POST", "/console/policy", actions.policy, Scope.ADMIN),
            ("POST", "/console/chaos", actions.chaos, Scope.ADMIN),
            ("GET", "/console/{file}", page.file),
        ]
