"""A gateway's line to the leader: what waits and runs goes up, dispatches come down.

The leader may be this very replica or another one, and may change; at each new line the leader is
told everything that the gateway has. While nobody leads, requests simply wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Protocol

import grpc

from everlift import logs
from everlift.request_id import tenant_of
from everlift.transport import Transport
from everlift.v1 import session_pb2, session_pb2_grpc
from router.admission.fair_share import ServedOutputs
from router.admission.handover import HandoverSender
from router.admission.policy import Policy
from router.event_loop import now
from router.leader.leader import Arriving, Leader, Reservation

log = logs.get(__name__)

#: A leader speaks five times a second. One that is silent for so long may lead no more.
_QUIET_S = 0.6
#: The line to one that is silent for so long leads nowhere.
_DEAD_S = 2.0


class Gateway(Protocol):
    """Who is at this end of the line."""

    def waiting(self, order: Policy) -> Iterable[session_pb2.Waiting]:
        """All that waits, in this order. Read part by part: what has changed meanwhile may be
        missing."""
        ...

    def running(self) -> Iterable[session_pb2.Running]:
        """All that workers have, likewise."""
        ...

    def dispatched(self, message: session_pb2.Dispatched) -> None: ...

    def refused(self, refusal: session_pb2.Refusal) -> None:
        """Out of the queue, or never in it."""
        ...

    def withdrawn(self, message: session_pb2.Withdrawn) -> None:
        """It had waited until it was."""
        ...

    def foresee(self, outlook: session_pb2.Outlook) -> None:
        """What those that come now have to expect."""
        ...

    def adopt_soon(self, request_id: str) -> None: ...

    def stale(self, request_id: str) -> None: ...

    def move(self, epoch: int) -> None: ...

    def evict(self, eviction: session_pb2.Eviction) -> None: ...


class LeaderClient:
    def __init__(self, router_id: str, leader: Leader, transport: Transport) -> None:
        self._router_id = router_id
        self._local = leader
        self._transport = transport
        self._gateway: Gateway | None = None
        #: what this line's leader is still to be told; none while there is no line
        self._telling: HandoverSender | None = None
        #: also from before the line
        self._served = ServedOutputs()
        self._is_served_due = False
        self._starts: list[session_pb2.WorkerStart] = []
        self._demand = session_pb2.WorkerDemand()
        self._is_demand_due = False
        self._tpot_ratios: list[float] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._followed = ("", "")
        self._heard_at = 0.0
        self._generation = ""
        self.queued = 0

    def serve(self, gateway: Gateway) -> None:
        """Whose requests go over this line. Once, before the first leader is followed."""
        self._gateway = gateway

    @property
    def is_open(self) -> bool:
        """Whether there is somebody at the other end, as far as one knows."""
        return self._task is not None and not self._task.done() and self._silence_s < _DEAD_S

    @property
    def is_quiet(self) -> bool:
        """Whether it may be another one who leads by now."""
        return not self.is_open or self._silence_s > _QUIET_S

    @property
    def _silence_s(self) -> float:
        return now() - self._heard_at

    # what the leader is asked and told

    def reserve(self, request: Arriving) -> Reservation | None:
        """As the leader's, where it is this very replica that leads and it knows all that there is
        to be told."""
        if self._telling is None or self._telling:
            return None
        return self._local.reserve(self._router_id, request)

    def enqueue(self, waiting: session_pb2.Waiting) -> None:
        if self._telling is not None:
            self._telling.enqueue(waiting)
            self._changed.set()

    def withdraw(self, request_id: str) -> None:
        """It needs no worker any more: neither its place in the queue nor what it had."""
        if self._telling is not None:
            self._telling.withdraw(request_id)
            self._changed.set()

    def running(self, running: session_pb2.Running) -> None:
        """Its worker preempted it, or goes on with it."""
        if self._telling is not None:
            self._telling.run(running)
            self._changed.set()

    def served(self, request_id: str, priority: int, tokens: int) -> None:
        """So much more of its output came. It is told with the next message."""
        if tenant := tenant_of(request_id):
            self._served.add(tenant, priority, tokens)

    def tell_served(self) -> None:
        """What came is told now."""
        if self._served:
            self._is_served_due = True
            self._changed.set()

    def finished(self, tpot_ratio: float) -> None:
        """A request did, and each of its tokens took so many times as long as was predicted. It is
        told with the next message."""
        if self._telling is not None:
            self._tpot_ratios.append(tpot_ratio)

    def worker_starts(self, start: session_pb2.WorkerStart) -> None:
        """It says so again: a leader that comes later hears of it then."""
        if self._telling is not None:
            self._starts.append(start)
            self._changed.set()

    def demand(self, demand: session_pb2.WorkerDemand) -> None:
        """Tell each leader the workers that this cluster is to have, until they are others."""
        if demand != self._demand:
            self._demand.CopyFrom(demand)
            self._is_demand_due = True
            self._changed.set()

    def asserted(self, generation: str) -> None:
        """The ledger of this generation has been told again what it may have lost."""
        self._generation = generation
        if self._telling is not None:
            self._telling.assert_generation(generation)
            self._changed.set()

    # the line

    async def follow(self, leader: str, address: str) -> None:
        """Holds the line to this leader from now on; nothing happens if it does already."""
        if (leader, address) == self._followed and self.is_open:
            return
        await self.close()
        self._followed, self._heard_at = (leader, address), now()
        if leader == self._router_id and self._local.is_leading:
            self._task = asyncio.create_task(self._speak(""))
        elif leader and leader != self._router_id:
            self._task = asyncio.create_task(self._speak(address))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _speak(self, address: str) -> None:
        """With this very replica, if there is no address. What fails in between ends the line; the
        next one is opened at the next beat."""
        try:
            await (self._speak_to(address) if address else self._speak_locally())
        except Exception:
            log.exception("the line to the leader failed")

    async def _speak_locally(self) -> None:
        with self._told() as messages:
            async with aclosing(self._local.converse(messages)) as answers:
                await self._listen(answers)

    async def _speak_to(self, address: str) -> None:
        async with self._transport.channel(address) as channel:
            stub: session_pb2_grpc.RouterInternalAsyncStub
            stub = session_pb2_grpc.RouterInternalStub(channel)
            with self._told() as messages:
                try:
                    await self._listen(stub.Admission(messages))
                except grpc.aio.AioRpcError as error:
                    log.info("line to the leader broke", address=address, code=error.code().name)

    @contextmanager
    def _told(self) -> Iterator[AsyncIterator[session_pb2.GatewayMessage]]:
        """What a new leader is told, from the beginning."""
        assert self._gateway is not None
        order = self._local.rules.order
        waiting, running = self._gateway.waiting(order), self._gateway.running()
        telling = HandoverSender(self._router_id, waiting, running, self._generation, order)
        self._telling = telling
        self._is_demand_due = True
        self._changed.set()
        try:
            yield self._messages(telling)
        finally:
            self._telling = None
            self._changed.set()

    async def _messages(self, telling: HandoverSender) -> AsyncIterator[session_pb2.GatewayMessage]:
        """Until the line is over: gRPC goes on asking a dead stream's iterator."""
        while True:
            await self._changed.wait()
            if self._telling is not telling:
                return
            self._changed.clear()
            while (telling or self._has_more) and self._telling is telling:
                yield self._part(telling)
                await asyncio.sleep(0)

    @property
    def _has_more(self) -> bool:
        """To be told beside what the gateway has."""
        return self._is_served_due or self._is_demand_due or bool(self._starts)

    def _part(self, telling: HandoverSender) -> session_pb2.GatewayMessage:
        message = telling.part()
        message.served.extend(self._served.take())
        message.starts.extend(self._starts)
        message.tpot_ratios.extend(self._tpot_ratios)
        self._starts.clear()
        self._tpot_ratios.clear()
        self._is_served_due = False
        if self._is_demand_due:
            message.demand.CopyFrom(self._demand)
            self._is_demand_due = False
        return message

    # what the leader says

    async def _listen(self, messages: AsyncIterable[session_pb2.LeaderMessage]) -> None:
        """Until the leader resigns, or the line breaks. After one that led, the next is looked for
        at once."""
        has_led = False
        try:
            async for message in messages:
                self._heard(message)
                if message.resigned:
                    return
                has_led = True
        finally:
            if has_led:
                self._local.changed.set()

    def _heard(self, message: session_pb2.LeaderMessage) -> None:
        assert self._gateway is not None
        self._heard_at = now()
        self.queued = message.queued
        for dispatched in message.dispatched:
            if self._telling is not None:
                self._telling.dispatched(dispatched.request_id)
            self._gateway.dispatched(dispatched)
        for refusal in message.refusals:
            self._gateway.refused(refusal)
        for withdrawn in message.withdrawn:
            self._gateway.withdrawn(withdrawn)
        for outlook in message.outlooks[-1:]:
            self._gateway.foresee(outlook)
        for request_id in message.adopt:
            self._gateway.adopt_soon(request_id)
        for request_id in message.stale:
            self._gateway.stale(request_id)
        for epoch in message.move:
            self._gateway.move(epoch)
        for eviction in message.evictions:
            self._gateway.evict(eviction)
