"""The leader of the admission queue: holds the lease, knows the credits, dispatches.

Every router replica runs this; only the one that holds the leader's lease in the ledger acts. Its
queue lives in memory: a new leader is told by the living gateways what they have waiting, and
finds the requests of dead ones in the ledger. Each leadership has a fresh random term, without
which the ledger refuses to dispatch.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from everlift import logs
from everlift.errors import LedgerUnavailable
from everlift.v1 import session_pb2
from router.admission.placement import Capacity, Load, Placement
from router.admission.policy import Fifo, Waiting
from router.admission.queue import AdmissionQueue
from router.config import RouterConfig
from router.ledger.base import Ledger, NotQueued, StaleTerm
from router.ledger.entry import Entry

log = logs.get(__name__)

Send = Callable[[session_pb2.LeaderMessage], None]

_DISPATCHES_AT_ONCE = 64
_TICK_S = 0.2
_ORPHANS_AT_ONCE = 256
#: An orphan that was given to a gateway is not given to another one for so long.
_ADOPTION_S = 5.0


@dataclass(frozen=True, slots=True)
class _Assignment:
    waiting: Waiting
    worker_id: str
    epoch: int
    term: int


class Leader:
    def __init__(self, config: RouterConfig, router_id: str, address: str, ledger: Ledger) -> None:
        self._config = config
        self._router_id = router_id
        self._address = address
        self._ledger = ledger
        self._queue = AdmissionQueue(Fifo())
        self._placement = Placement(
            config.local_depth, config.max_pending_prefill, config.dispatch_ack
        )
        self._gateways: dict[str, Send] = {}
        self._adopting: dict[str, float] = {}
        self._next_heir = 0
        self._sweep_after = 0.0
        self._term = 0
        self._lease_until = 0.0
        self._wake = asyncio.Event()
        self.is_leading = False
        #: set when this replica begins or ceases to lead
        self.changed = asyncio.Event()

    @property
    def queued(self) -> int:
        return len(self._queue)

    async def run(self) -> None:
        """Campaigns, dispatches and sweeps until cancelled; then gives the lease back."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._campaign())
                tasks.create_task(self._dispatch_for_ever())
                tasks.create_task(self._tick())
                tasks.create_task(self._sweep_for_ever())
        finally:
            await self._resign()

    # the lease

    async def _campaign(self) -> None:
        while True:
            await self._renew(time.monotonic())
            await asyncio.sleep(self._config.beat)

    async def _renew(self, now: float) -> None:
        if not self.is_leading:
            self._term = secrets.randbits(64) or 1
        try:
            held = await self._ledger.lead(
                self._router_id, self._address, self._term, self._config.lease
            )
        except LedgerUnavailable:
            held = self.is_leading and now < self._lease_until
        else:
            self._lease_until = now + self._config.lease
        if held and not self.is_leading:
            self.is_leading = True
            self.changed.set()
            self._wait_with_sweeping()
            log.info("leading", router_id=self._router_id)
        elif not held and self.is_leading:
            self._step_down()

    def _step_down(self) -> None:
        if not self.is_leading:
            return
        log.warning("no longer leading", router_id=self._router_id)
        self.is_leading = False
        self.changed.set()
        self._queue = AdmissionQueue(Fifo())
        for send in list(self._gateways.values()):
            send(session_pb2.LeaderMessage(resigned=True))
        self._gateways.clear()

    async def _resign(self) -> None:
        if self.is_leading:
            self._step_down()
            try:
                await self._ledger.resign(self._term)
            except LedgerUnavailable:
                log.info("lease left to run out", router_id=self._router_id)

    # gateways speak

    def connect(self, gateway: str, send: Send) -> None:
        """A gateway's line is open; ``send`` must not block."""
        self._gateways[gateway] = send

    def disconnect(self, gateway: str, send: Send) -> None:
        if self._gateways.get(gateway) is send:
            del self._gateways[gateway]
            self._queue.withdraw_gateway(gateway)

    def receive(self, gateway: str, message: session_pb2.GatewayMessage) -> None:
        refused = [w.request_id for w in message.enqueue if not self._enqueue(gateway, w)]
        for request_id in message.withdraw:
            self._queue.withdraw(request_id, gateway)
        if refused:
            self._tell(gateway, session_pb2.LeaderMessage(refused=refused))
        self._wake.set()

    def _enqueue(self, gateway: str, message: session_pb2.Waiting) -> bool:
        # What was accepted once keeps its right to go on, however full the queue is.
        is_new = not message.accepted and message.request_id not in self._queue
        if is_new and self.queued >= self._config.max_queued:
            return False
        replaced = self._queue.push(
            Waiting(
                request_id=message.request_id,
                gateway=gateway,
                arrived=message.arrived,
                prefill_tokens=message.prompt_tokens,
                max_tokens=message.max_tokens,
                avoid=message.avoid,
                choices=message.choices,
            )
        )
        if replaced is not None and replaced.gateway != gateway:
            self._tell(replaced.gateway, session_pb2.LeaderMessage(stale=[message.request_id]))
        return True

    # workers speak

    def worker_up(self, info: session_pb2.WorkerInfo) -> None:
        capacity = Capacity(info.max_num_seqs, info.num_blocks)
        self._placement.join(info.worker_id, capacity)

    def worker_lost(self, worker_id: str) -> None:
        self._placement.leave(worker_id)

    def worker_frame(self, worker_id: str, frame: session_pb2.WorkerFrame) -> None:
        for epoch in frame.accepted_epochs:
            self._placement.acknowledge(worker_id, epoch)
        if frame.HasField("state"):
            self._placement.report(worker_id, _load(frame.state))
            if self._queue:
                self._wake.set()

    # dispatch

    async def _dispatch_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.is_leading and (assignments := self._assign()):
                await asyncio.gather(*map(self._dispatch, assignments))

    def _assign(self) -> list[_Assignment]:
        """Takes from the queue, in its order, what has a credit now."""
        assignments: list[_Assignment] = []
        while len(assignments) < _DISPATCHES_AT_ONCE and (waiting := self._queue.peek()):
            worker_id = self._placement.choose(waiting)
            if worker_id is None:
                break
            self._queue.pop()
            epoch = secrets.randbits(64) or 1
            self._placement.reserve(worker_id, epoch, waiting, time.monotonic())
            assignments.append(_Assignment(waiting, worker_id, epoch, self._term))
        return assignments

    async def _dispatch(self, assignment: _Assignment) -> None:
        waiting, worker_id, epoch = assignment.waiting, assignment.worker_id, assignment.epoch
        try:
            entry = await self._move(assignment)
        except NotQueued:
            self._placement.acknowledge(worker_id, epoch)
            self._tell(waiting.gateway, session_pb2.LeaderMessage(stale=[waiting.request_id]))
            return
        except StaleTerm:
            self._step_down()
            return
        dispatched = session_pb2.Dispatched(
            request_id=entry.request_id, worker_id=worker_id, epoch=epoch, attempt=entry.attempts
        )
        self._tell(entry.gateway, session_pb2.LeaderMessage(dispatched=[dispatched]))
        if entry.gateway != waiting.gateway:
            self._tell(waiting.gateway, session_pb2.LeaderMessage(stale=[waiting.request_id]))

    async def _move(self, assignment: _Assignment) -> Entry:
        """The ledger's word. An answer that was lost is asked for again, under the same epoch."""
        while True:
            try:
                return await self._ledger.dispatch(
                    assignment.waiting.request_id,
                    assignment.worker_id,
                    assignment.epoch,
                    assignment.term,
                )
            except LedgerUnavailable:
                await asyncio.sleep(_TICK_S)

    def _tell(self, gateway: str, message: session_pb2.LeaderMessage) -> None:
        """A gateway that is gone hears nothing: the sweep finds its requests in the ledger."""
        send = self._gateways.get(gateway)
        if send is not None:
            message.queued = self.queued
            send(message)

    async def _tick(self) -> None:
        """What time alone changes: credits that run out, and what gateways know of the queue."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._placement.expire(time.monotonic())
            self._wake.set()
            for send in list(self._gateways.values()):
                send(session_pb2.LeaderMessage(queued=self.queued))

    # orphans

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._config.beat)
            if self.is_leading and time.monotonic() > self._sweep_after:
                try:
                    self._give_away(await self._ledger.orphans(_ORPHANS_AT_ONCE))
                except LedgerUnavailable:
                    self._wait_with_sweeping()

    def _wait_with_sweeping(self) -> None:
        """While the ledger was away nobody could renew a lease: the living come first."""
        self._sweep_after = time.monotonic() + self._config.lease

    def _give_away(self, orphans: list[str]) -> None:
        now, heirs = time.monotonic(), list(self._gateways.values())
        self._adopting = {r: until for r, until in self._adopting.items() if until > now}
        for request_id in orphans if heirs else ():
            if request_id not in self._adopting:
                self._adopting[request_id] = now + _ADOPTION_S
                self._next_heir = (self._next_heir + 1) % len(heirs)
                heirs[self._next_heir](
                    session_pb2.LeaderMessage(adopt=[request_id], queued=self.queued)
                )


def _load(state: session_pb2.WorkerState) -> Load:
    return Load(
        sequence_number=state.sequence_number,
        num_running=state.num_running,
        num_waiting=state.num_waiting,
        blocks_used=state.blocks_used,
        pending_prefill_tokens=state.pending_prefill_tokens,
        committed_tokens=state.committed_tokens,
        draining=state.draining,
    )
