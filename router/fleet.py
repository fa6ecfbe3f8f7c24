"""Who is there: this replica's own beat, the workers it dials, the leader it follows."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from everlift import logs
from everlift.errors import InvalidRequest, LedgerUnavailable
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.leader import Leader
from router.ledger.base import Ledger, Membership
from router.line import AdmissionLine
from router.sessions import Sessions

log = logs.get(__name__)


class Fleet:
    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        address: str,
        ledger: Ledger,
        sessions: Sessions,
        leader: Leader,
        line: AdmissionLine,
    ) -> None:
        self._config = config
        self._router_id = router_id
        self._address = address
        self._ledger = ledger
        self._sessions = sessions
        self._leader = leader
        self._line = line
        self._workers_version = -1
        self._dialling = asyncio.Lock()
        self.leader_id = ""

    async def run(self) -> None:
        """Beats until cancelled."""
        while True:
            try:
                await self._beat()
            except LedgerUnavailable as error:
                log.warning("beat failed", cause=str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.beat):
                    await self._leader.changed.wait()
            self._leader.changed.clear()

    async def announce(self, info: session_pb2.WorkerInfo) -> None:
        """A worker is ready. Raises InvalidRequest for one that does not fit the others."""
        for link in self._sessions.links:
            if link.is_up:
                _check_same(link.info, info)
        await self._ledger.put_worker(info)
        log.info("worker joined", worker_id=info.worker_id, address=info.address)
        await self._dial()

    async def _beat(self) -> None:
        membership = await self._ledger.beat(self._router_id, self._address, self._config.lease)
        if membership.workers_version != self._workers_version:
            await self._dial()
            self._workers_version = membership.workers_version
        await self._follow(membership)
        if self._leader.is_leading:
            await self._forget_unreachable()

    async def _dial(self) -> None:
        async with self._dialling:
            await self._sessions.reconcile(await self._ledger.workers())

    async def _follow(self, membership: Membership) -> None:
        self.leader_id = membership.leader
        await self._line.follow(membership.leader, membership.leader_address)

    async def _forget_unreachable(self) -> None:
        for worker_id in self._sessions.unreachable():
            log.warning("worker forgotten", worker_id=worker_id)
            await self._ledger.drop_worker(worker_id)


def _check_same(other: session_pb2.WorkerInfo, info: session_pb2.WorkerInfo) -> None:
    """Workers of one cluster serve the same model in the same blocks."""
    if other.worker_id == info.worker_id:
        return
    for field in ("fingerprint", "block_size"):
        mine, theirs = getattr(info, field), getattr(other, field)
        if mine != theirs:
            raise InvalidRequest(
                f"worker {info.worker_id} has {field} {mine}; the cluster's workers have {theirs}"
            )
