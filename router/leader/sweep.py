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

SendTo: TypeAlias = Callable[[str, session_pb2.LeaderMessage], None]

#: Maximum number of orphaned requests that are read from the ledger in one call.
_SWEEP_BATCH = 256
#: Seconds for which a request that was assigned to a gateway is not assigned again.
_ASSIGNED_S = 5.0


class Sweep:
    """Periodic search of the leader for requests whose router is dead.

    ``assignees`` returns the ids of the connected routers, or an empty list while nothing may be
    assigned. ``send`` sends a message to one of them. ``disconnect`` disconnects a router whose
    lease has expired.
    """

    def __init__(
        self,
        config: RouterConfig,
        ledger: Ledger,
        assignees: Callable[[], list[str]],
        send: SendTo,
        disconnect: Callable[[str], None],
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._assignees = assignees
        self._send = send
        self._disconnect = disconnect
        #: time until which a request is not assigned again, by request id
        self._assigned_until: dict[str, float] = {}
        self._next_assignee = 0
        self._paused_until = 0.0

    async def run(self) -> None:
        """Find and assign requests of dead routers at every heartbeat interval, until cancelled.

        Nothing is done during ``pause`` or while ``assignees`` returns no router.
        """
        while True:
            await asyncio.sleep(self._config.heartbeat)
            if now() > self._paused_until and self._assignees():
                await self._sweep()

    def pause(self) -> None:
        """Pause the search for the duration of one lease.

        Live routers then have time to renew their leases, which was not possible while the ledger
        was unavailable.
        """
        self._paused_until = now() + self._config.lease

    async def _sweep(self) -> None:
        try:
            orphans = await self._ledger.orphans(_SWEEP_BATCH)
            living = await self._ledger.gateways() if orphans else {}
        except LedgerUnavailable:
            self.pause()
            return
        if orphans:
            self._disconnect_dead(living)
        self._assign(orphans, now())

    def _disconnect_dead(self, living: Container[str]) -> None:
        """Disconnect the routers that are not in ``living``, because they have no lease.

        This removes their requests from the leader's queue. A frozen router still has a stream, and
        its queued requests would otherwise be dispatched and take capacity of workers.
        """
        for gateway in self._assignees():
            if gateway not in living:
                self._disconnect(gateway)

    def _assign(self, orphans: list[str], timestamp: float) -> None:
        assignees = self._assignees()
        self._assigned_until = {
            request_id: until
            for request_id, until in self._assigned_until.items()
            if until > timestamp
        }
        for request_id in orphans if assignees else ():
            if request_id not in self._assigned_until:
                self._assigned_until[request_id] = timestamp + _ASSIGNED_S
                self._next_assignee = (self._next_assignee + 1) % len(assignees)
                self._send(
                    assignees[self._next_assignee], session_pb2.LeaderMessage(adopt=[request_id])
                )
