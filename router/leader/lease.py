"""The lease of whoever leads: taken when it is free, renewed while it is held, given back.

Each leadership has a fresh random term, without which the ledger refuses to dispatch. A leader that
was away for longer than its lease finds that out from the ledger, here or at its next dispatch. If
another one led meanwhile, even if nobody does now, it begins anew under a fresh term: what it knows
of the queue is old.
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
    """Lease of the leader; ``began`` and ``ended`` are called when this router's lead changes."""

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        address: str,
        ledger: Ledger,
        began: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._config = config
        self._router_id = router_id
        self._address = address
        self._ledger = ledger
        self._began = began
        self._ended = ended
        self._ends = 0.0
        self._stands_back_until = 0.0
        self._asking = asyncio.Lock()
        self._hurry = asyncio.Event()
        self.term = _fresh_term()
        self.is_held = False
        #: False while the ledger may have forgotten the term
        self.is_confirmed = False

    async def campaign(self) -> None:
        """Campaign for the lease, and renew it, until cancelled."""
        while True:
            async with self._asking:
                if (moment := now()) >= self._stands_back_until:
                    await self._renew(moment)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.heartbeat):
                    await self._hurry.wait()
            self._hurry.clear()

    def hurry(self) -> None:
        """Try to lead at once: there is no known leader."""
        self._hurry.set()

    def confirm(self) -> None:
        """Send the term again to a ledger that lost its last second."""
        self.is_confirmed = False
        self._hurry.set()

    async def _renew(self, moment: float) -> None:
        term = self.term
        try:
            held = await first_answer(lambda: self._lead(term), self._config.heartbeat)
        except LedgerUnavailable:
            held = self.is_held and moment < self._ends
        else:
            self._ends, self.is_confirmed = moment + self._config.lease, held
        if held and not self.is_held:
            self.is_held, self.term = True, term
            log.info("leadership acquired", router_id=self._router_id)
            self._began()
        elif not held:
            self.lose()

    def _lead(self, term: int) -> Coroutine[Any, Any, bool]:
        return self._ledger.lead(
            self._router_id, self._address, term, self._config.lease, is_new=not self.is_held
        )

    def lose(self) -> None:
        """Give up the lead to another replica."""
        if self.is_held:
            log.warning("leadership lost", router_id=self._router_id)
            self.is_held = self.is_confirmed = False
            self.term = _fresh_term()
            self._ended()

    async def stand_back(self) -> None:
        """Give the lease back, if held, and let others take it for one lease duration."""
        async with self._asking:
            self._stands_back_until = now() + self._config.lease
            await self.resign()

    async def resign(self) -> None:
        """Give it back, if it is held."""
        if self.is_held:
            term = self.term
            self.lose()
            try:
                await self._ledger.resign(term)
            except LedgerUnavailable:
                log.info("leader lease left to expire", router_id=self._router_id)


def _fresh_term() -> int:
    """Return a new term.

    It is requested until it is granted: if the answer was lost, another term would be refused for
    as long as the lease.
    """
    return secrets.randbits(64) or 1
