"""Heartbeat of a router: renews its lease in the ledger, and applies the ledger's answer.

The answer concerns the workers, the run-time policy and the leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

from everlift import logs
from everlift.errors import InvalidRequest, LedgerUnavailable
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.event_loop import first_answer
from router.leader.client import LeaderClient
from router.leader.leader import Leader
from router.leader.policy_store import RuntimePolicy
from router.ledger.base import Ledger, Membership
from router.worker_sessions import Sessions

log = logs.get_logger(__name__)


#: The heartbeat's interval is divided by this while no leader is connected or the leader is silent,
#: so that the next leader is found sooner.
_SEARCH_FACTOR = 3


class Gateway(Protocol):
    """Owner of the router's requests, which is notified of the results of heartbeats."""

    def ledger_answered(self, membership: Membership) -> None: ...

    def ledger_failed(self) -> None: ...

    async def generation_changed(self, generation: str) -> None:
        """Send all requests to the ledger again, then notify the leader that this is done.

        ``generation`` is an id that changes when the ledger's servers restart or fail over and may
        have lost data. For the first generation that this router sees, nothing is sent to the
        ledger.
        """
        ...


class Heartbeat:
    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        address: str,
        ledger: Ledger,
        sessions: Sessions,
        leader: Leader,
        leader_client: LeaderClient,
        gateway: Gateway,
        runtime_policy: RuntimePolicy,
    ) -> None:
        self._config = config
        self._router_id = router_id
        self._address = address
        self._ledger = ledger
        self._sessions = sessions
        self._leader = leader
        self._leader_client = leader_client
        self._gateway = gateway
        self._runtime_policy = runtime_policy
        self._generation = ""
        self._resync_task: asyncio.Task[None] | None = None
        self._workers_version = -1
        self._dial_lock = asyncio.Lock()
        self.leader_id = ""

    async def run(self) -> None:
        """Send heartbeats at the configured interval, until cancelled.

        The interval is reduced to a third while there is no stream to the leader, or while the
        leader sends nothing. A change of leadership ends the interval early.
        """
        try:
            while True:
                try:
                    await self._send_heartbeat()
                except LedgerUnavailable as error:
                    log.warning("heartbeat failed", cause=str(error))
                    self._gateway.ledger_failed()
                await self._wait_interval()
        finally:
            if self._resync_task is not None:
                self._resync_task.cancel()

    async def _wait_interval(self) -> None:
        interval = (
            self._config.heartbeat / _SEARCH_FACTOR
            if self._leader_client.is_quiet
            else self._config.heartbeat
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(interval):
                await self._leader.changed.wait()
        self._leader.changed.clear()

    async def announce(self, info: session_pb2.WorkerInfo) -> None:
        """Store a ready worker in the ledger, and connect to it.

        Raises InvalidRequest if a connected worker has another KV block size. The error is also
        raised if a connected worker of the same model has another fingerprint, or other files of an
        adapter that both have. Raises LedgerUnavailable.
        """
        for link in self._sessions.links:
            if link.is_up:
                _check_same(link.info, info)
        await self._ledger.put_worker(info)
        log.info("worker joined", worker_id=info.worker_id, address=info.address)
        await self._dial()

    def worker_starts(self, start: session_pb2.WorkerStart) -> None:
        """Report to the leader that a worker is starting."""
        self._leader_client.worker_starts(start)

    async def _send_heartbeat(self) -> None:
        membership = await first_answer(self._renew_lease, self._config.heartbeat)
        self._leader.on_heartbeat(membership)
        self._gateway.ledger_answered(membership)
        if membership.generation != self._generation:
            await self._restore_workers()
        self._start_resync(membership.generation)
        if membership.workers_version != self._workers_version:
            await self._dial()
            self._workers_version = membership.workers_version
        await self._runtime_policy.sync(membership.policy_version)
        await self._follow(membership)
        if self._leader.is_leading:
            await self._forget_unreachable()

    def _renew_lease(self) -> Coroutine[Any, Any, Membership]:
        return self._ledger.heartbeat(self._router_id, self._address, self._config.lease)

    async def _restore_workers(self) -> None:
        for link in self._sessions.links:
            if link.is_up:
                await self._ledger.put_worker(link.info)
        # The server may have lost changes, so its versions are not comparable with earlier ones.
        self._workers_version = -1

    def _start_resync(self, generation: str) -> None:
        """If ``generation`` is new, start a task that sends all requests to the ledger again.

        Heartbeats continue meanwhile. The task first waits for the end of the task that was started
        for the previous generation.
        """
        if generation != self._generation:
            previous, self._generation = self._resync_task, generation
            self._resync_task = asyncio.create_task(self._resync(generation, previous))

    async def _resync(self, generation: str, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.gather(previous, return_exceptions=True)
        try:
            await self._gateway.generation_changed(generation)
        except Exception:
            log.exception("state not re-sent to the ledger")

    async def _dial(self) -> None:
        async with self._dial_lock:
            await self._sessions.reconcile(await self._ledger.workers())

    async def _follow(self, membership: Membership) -> None:
        self.leader_id = membership.leader
        await self._leader_client.follow(membership.leader, membership.leader_address)
        self._leader_client.flush_served()

    async def _forget_unreachable(self) -> None:
        for worker_id in self._sessions.unreachable():
            log.warning("worker forgotten", worker_id=worker_id)
            await self._ledger.drop_worker(worker_id)


def _check_same(other: session_pb2.WorkerInfo, info: session_pb2.WorkerInfo) -> None:
    if other.worker_id == info.worker_id:
        return
    same_model = other.model == info.model
    for field in ("fingerprint", "block_size") if same_model else ("block_size",):
        mine, theirs = getattr(info, field), getattr(other, field)
        if mine != theirs:
            raise InvalidRequest(
                f"worker {info.worker_id} has {field} {mine}; the cluster's workers of the model "
                f"{other.model!r} have {theirs}"
            )
    for name, digest in info.adapters.items() if same_model else ():
        if (theirs := other.adapters.get(name, digest)) != digest:
            raise InvalidRequest(
                f"worker {info.worker_id} has other files of the adapter {name!r} (digest "
                f"{digest}) than the cluster's workers ({theirs}): give a changed adapter a new "
                "name"
            )
