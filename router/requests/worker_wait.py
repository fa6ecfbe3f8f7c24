"""How long requests wait where there is no worker at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from everlift.errors import NoWorker
from router.requests.request import LiveRequest, Phase


class WorkerWait:
    """At the beginning there is none. ``give_up`` ends a request with an error."""

    def __init__(self, longest_s: float, give_up: Callable[[LiveRequest, NoWorker], None]) -> None:
        self._longest_s = longest_s
        self._give_up = give_up
        self._has_worker = False

    def enter(self, live: LiveRequest) -> None:
        """It waits from now on."""
        live.end_worker_wait()
        if not self._has_worker:
            loop = asyncio.get_running_loop()
            live.worker_wait = loop.call_later(self._longest_s, self._expire, live)

    def worker_up(self, all_live: Iterable[LiveRequest]) -> None:
        if not self._has_worker:
            self._has_worker = True
            for live in all_live:
                live.end_worker_wait()

    def last_worker_lost(self, all_live: Iterable[LiveRequest]) -> None:
        self._has_worker = False
        for live in all_live:
            if live.phase is Phase.WAITING:
                self.enter(live)

    def _expire(self, live: LiveRequest) -> None:
        if live.phase is Phase.WAITING:
            self._give_up(live, NoWorker(f"no worker was there for {self._longest_s:g} s"))
