"""Sweep: the leader finds requests of dead routers in the ledger and assigns them to live ones.

The router that owns a request is called its gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import TypeAlias

from everlift.errors import LedgerUnavailable
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.event_loop import now
from router.ledger.base import Ledger

Tell: TypeAlias = Callable[[str, session_pb2.LeaderMessage], None]

#: Most orphaned requests that are read from the ledger at once.
_AT_ONCE = 256
#: Seconds for which a request that was assigned to a gateway is not assigned again.
_ADOPTION_S = 5.0


class Sweep:
    """Periodic search of the leader for requests whose router is dead.

    ``heirs`` returns the ids of the connected routers, or an empty list while nothing may be
    assigned. ``tell`` sends a message to one of them. ``bury`` disconnects a router whose lease has
    expired.
    """

    def __init__(
        self,
        config: RouterConfig,
        ledger: Ledger,
        heirs: Callable[[], list[str]],
        tell: Tell,
        bury: Callable[[str], None],
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._heirs = heirs
        self._tell = tell
        self._bury = bury
        self._adopting: dict[str, float] = {}
        self._next_heir = 0
        self._after = 0.0

    async def run(self) -> None:
        """Find and assign requests of dead routers at every heartbeat interval, until cancelled.

        Nothing is done during ``hold_off`` or while ``heirs`` returns no router.
        """
        while True:
            await asyncio.sleep(self._config.heartbeat)
            if now() > self._after and self._heirs():
                await self._sweep()

    def hold_off(self) -> None:
        """Pause the search for the duration of one lease, so that live routers can renew theirs.

        They could not renew them while the ledger was unavailable.
        """
        self._after = now() + self._config.lease

    async def _sweep(self) -> None:
        try:
            orphans = await self._ledger.orphans(_AT_ONCE)
            living = await self._ledger.gateways() if orphans else {}
        except LedgerUnavailable:
            self.hold_off()
            return
        if orphans:
            self._bury_all_but(living)
        self._give_away(orphans, now())

    def _bury_all_but(self, living: Container[str]) -> None:
        """Disconnect the routers that are not in ``living``, because they have no lease.

        This removes their requests from the queue. A frozen router still has a stream, and its
        requests would take capacity of workers.
        """
        for gateway in self._heirs():
            if gateway not in living:
                self._bury(gateway)

    def _give_away(self, orphans: list[str], moment: float) -> None:
        heirs = self._heirs()
        self._adopting = {r: until for r, until in self._adopting.items() if until > moment}
        for request_id in orphans if heirs else ():
            if request_id not in self._adopting:
                self._adopting[request_id] = moment + _ADOPTION_S
                self._next_heir = (self._next_heir + 1) % len(heirs)
                self._tell(heirs[self._next_heir], session_pb2.LeaderMessage(adopt=[request_id]))
