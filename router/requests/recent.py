"""What ended in a gateway's hands, was refused a place in the queue, or was forgotten through it, a
moment ago: a ledger whose server came back without its last second has to be told of it again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from router.requests.request import LiveRequest

#: Ended requests that are kept at most, with all their tokens.
_MAX_ENDED = 10_000


class Recent:
    """Each for so many seconds. An id is one request's: of what ended, was refused or forgotten."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended: dict[str, LiveRequest] = {}
        self._refused: dict[str, None] = {}
        self._forgotten: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def ended(self) -> Iterable[LiveRequest]:
        """Oldest first."""
        return list(self._ended.values())

    @property
    def refused(self) -> Iterable[str]:
        return list(self._refused)

    @property
    def forgotten(self) -> Iterable[str]:
        return list(self._forgotten)

    def get(self, request_id: str) -> LiveRequest | None:
        """One that ended."""
        return self._ended.get(request_id)

    def arrival_of_forgotten(self, request_id: str) -> float | None:
        """When it had come, in ledger time: whoever has its id and came later is another one."""
        return self._forgotten.get(request_id)

    def was_refused(self, request_id: str) -> bool:
        return request_id in self._refused

    def has(self, live: LiveRequest) -> bool:
        """It ended, and was not forgotten."""
        return self._ended.get(live.request_id) is live

    def end(self, live: LiveRequest) -> None:
        if len(self._ended) == _MAX_ENDED:
            self.begin(next(iter(self._ended)))
        self.begin(live.request_id)
        self._ended[live.request_id] = live
        self._let_go_later(live.request_id)

    def refuse(self, request_id: str) -> None:
        self.begin(request_id)
        self._refused[request_id] = None
        self._let_go_later(request_id)

    def forget(self, request_id: str, arrived: float) -> None:
        self.begin(request_id)
        self._forgotten[request_id] = arrived
        self._let_go_later(request_id)

    def begin(self, request_id: str) -> None:
        """The id is another request's from now on."""
        self._ended.pop(request_id, None)
        self._refused.pop(request_id, None)
        self._forgotten.pop(request_id, None)
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

    def _let_go_later(self, request_id: str) -> None:
        # A timer that held the request would keep its tokens for so long, however many there are.
        loop = asyncio.get_running_loop()
        self._timers[request_id] = loop.call_later(self._seconds, self.begin, request_id)
