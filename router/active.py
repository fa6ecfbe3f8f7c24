"""Choice of the model that serves clients while one cluster replaces another.

Two clusters with different models use the same ledger server, with separate keys
(``ledger.key_prefix``) and one shared key (``ledger.active_key``), which names the active cluster.
Only its routers are ready, so that a load balancer sends clients to one model at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf
from typing import Protocol

from everlift import logs
from everlift.errors import LedgerUnavailable
from router.event_loop import now
from router.ledger.base import Ledger
from router.requests.served_models import ServedModels

log = logs.get_logger(__name__)

_POLL_INTERVAL_S = 1.0
#: Seconds that load balancers need to notice that the routers of another cluster became ready.
_NOTICED_S = 10.0


class Connections(Protocol):
    def close_when_idle(self) -> None:
        """Accept no new calls on the connections, and close each one when its calls have ended."""


class ActiveModel:
    """Periodic check whether this router's cluster is the active one, which serves clients."""

    def __init__(
        self, ledger: Ledger, models: ServedModels, connections: Sequence[Connections]
    ) -> None:
        self._ledger = ledger
        self._models = models
        self._connections = connections
        self._changed_at = -inf

    async def run(self) -> None:
        """Ask the ledger every second whether the cluster is active; pass the answer to ``note``.

        Runs until cancelled.
        """
        while True:
            try:
                self.note(await self._ledger.is_active(), now())
            except LedgerUnavailable as error:
                log.warning("active cluster unknown", cause=str(error))
            await asyncio.sleep(_POLL_INTERVAL_S)

    def note(self, is_active: bool, now: float) -> None:
        """Update ``is_active`` and ``is_switching`` of the router's ServedModels.

        ``is_active`` is the ledger's answer. ``is_switching`` is True while the cluster is
        inactive, and for 10 s after the cluster became active. Clients' connections to an inactive
        cluster are closed as soon as they are idle. ``now`` is the router's clock in seconds.
        """
        models = self._models
        if is_active != models.is_active:
            models.is_active, self._changed_at = is_active, now
            log.info(
                "cluster activated" if is_active else "cluster is replaced",
                model=models.first.name,
            )
        has_settled = now - self._changed_at >= _NOTICED_S
        # Until load balancers have noticed the change, clients may reach either cluster.
        models.is_switching = not (is_active and has_settled)
        if not is_active:
            # Clients would continue to reach this router on connections that stay open.
            for connections in self._connections:
                connections.close_when_idle()
