"""Leader's lease: acquired when it is free, renewed while it is held, and released.

Each leadership has a new random number, its term, and the ledger refuses dispatches under any term
but the latest. A leader that was frozen for longer than its lease may renew it if no other router
led meanwhile. Otherwise it learns from the ledger, at the next renewal or dispatch, that it has
lost the lease. Then it needs a new term to lead again, even if no router leads now, because its
view of the queue is outdated.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from everlift import logs
from everlift.errors import LedgerUnavailable
from router.config import RouterConfig
from router.event_loop import first_answer, now
from router.ledger.base import Ledger

log = logs.get_logger(__name__)


class Lease:
    """Leader's lease, as this router competes for it and holds it.

    ``on_acquired`` is called when this router acquires the lease, ``on_lost`` when it loses or
    releases the lease.
    """

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        address: str,
        ledger: Ledger,
        on_acquired: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._config = config
        self._router_id = router_id
        self._address = address
        self._ledger = ledger
        self._on_acquired = on_acquired
        self._on_lost = on_lost
        self._expires_at = 0.0
        self._backs_off_until = 0.0
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self.term = _new_term()
        self.is_held = False
        #: False while the ledger may have lost the term
        self.is_confirmed = False

    async def campaign(self) -> None:
        """Try to acquire the lease, and renew it while it is held, until cancelled."""
        while True:
            async with self._lock:
                if (started_at := now()) >= self._backs_off_until:
                    await self._renew(started_at)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.heartbeat):
                    await self._wake.wait()
            self._wake.clear()

    def campaign_now(self) -> None:
        """Let ``campaign`` try to acquire the lease at once, because no leader is known."""
        self._wake.set()

    def confirm(self) -> None:
        """Let ``campaign`` renew the lease at once, because the ledger may have lost recent writes.

        Until then ``is_confirmed`` is False.
        """
        self.is_confirmed = False
        self._wake.set()

    async def _renew(self, started_at: float) -> None:
        term = self.term
        try:
            held = await first_answer(lambda: self._lead(term), self._config.heartbeat)
        except LedgerUnavailable:
            held = self.is_held and started_at < self._expires_at
        else:
            self._expires_at, self.is_confirmed = started_at + self._config.lease, held
        if held and not self.is_held:
            self.is_held, self.term = True, term
            log.info("leadership acquired", router_id=self._router_id)
            self._on_acquired()
        elif not held:
            self.lose()

    def _lead(self, term: int) -> Coroutine[Any, Any, bool]:
        return self._ledger.lead(
            self._router_id, self._address, term, self._config.lease, is_new=not self.is_held
        )

    def lose(self) -> None:
        """Stop leading: call ``on_lost``, and choose a new term for the next attempt.

        Do nothing if the lease is not held.
        """
        if self.is_held:
            log.warning("leadership lost", router_id=self._router_id)
            self.is_held = self.is_confirmed = False
            self.term = _new_term()
            self._on_lost()

    async def back_off(self) -> None:
        """Release the lease, if held, and leave it to others for the duration of one lease."""
        async with self._lock:
            self._backs_off_until = now() + self._config.lease
            await self.resign()

    async def resign(self) -> None:
        """Release the lease if it is held; without an answer of the ledger, it expires there."""
        if self.is_held:
            term = self.term
            self.lose()
            try:
                await self._ledger.resign(term)
            except LedgerUnavailable:
                log.info("leader lease left to expire", router_id=self._router_id)


def _new_term() -> int:
    """Return a new random term (number of a leadership).

    The caller requests the lease with the same term until the lease is granted. If the answer to a
    granted request was lost, the ledger would refuse another term until the lease expires.
    """
    return secrets.randbits(64) or 1
