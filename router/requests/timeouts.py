"""How long a request may go on: to its deadline, and for a while without a client."""

from __future__ import annotations

import asyncio

from everlift.errors import Cancelled, DeadlineExceeded
from everlift.messages import OnDisconnect
from router.ledger.entry import State
from router.requests.attempts import Attempts
from router.requests.request import LiveRequest


class Patience:
    def __init__(self, grace_s: float, attempts: Attempts) -> None:
        self._grace_s = grace_s
        self._attempts = attempts

    def expire_in(self, live: LiveRequest, timeout_s: float | None) -> None:
        """It has no deadline if that is None."""
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_later(max(0.0, timeout_s), self._expire, live)

    def _expire(self, live: LiveRequest) -> None:
        if not live.is_ending:
            self._attempts.end(live, State.EXPIRED, DeadlineExceeded("the deadline passed"))

    def reader_left(self, live: LiveRequest, *, has_grace: bool) -> None:
        """Maybe its last one. Who ``has_grace`` has it although its request says otherwise."""
        if live.is_ending or live.has_readers:
            return
        if live.on_disconnect is OnDisconnect.CANCEL and not has_grace:
            self._give_up(live, "its client disconnected")
        else:
            self.wait_for_reader(live)

    def wait_for_reader(self, live: LiveRequest) -> None:
        """For as long as the request says."""
        if live.on_disconnect is not OnDisconnect.CONTINUE:
            cause = f"no client came back within {self._grace_s:g} s"
            live.end_grace()
            loop = asyncio.get_running_loop()
            live.grace = loop.call_later(self._grace_s, self._give_up, live, cause)

    def _give_up(self, live: LiveRequest, cause: str) -> None:
        if not (live.is_ending or live.has_readers):
            self._attempts.end(live, State.CANCELLED, Cancelled(cause))
