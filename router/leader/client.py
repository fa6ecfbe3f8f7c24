"""Stream from a router to the leader: sends queued and running requests, receives dispatches.

The leader may be this replica or another one, and may change. On each new stream the router first
sends all its requests. While there is no leader, requests stay queued at their routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from copy import copy
from typing import Protocol

import grpc

from everlift import logs
from everlift.request_id import tenant_of
from everlift.transport import Transport
from everlift.v1 import session_pb2, session_pb2_grpc
from router.admission.fair_share import ServedOutputs
from router.admission.handover import HandoverSender
from router.admission.policy import Policy
from router.admission.request import Running, Waiting
from router.event_loop import now
from router.leader.leader import Arriving, Leader, Reservation

log = logs.get_logger(__name__)

#: Seconds of silence after which the leader may no longer lead; it sends five messages a second.
_QUIET_S = 0.6
#: Seconds of silence after which the stream is closed.
_DEAD_S = 2.0


class Gateway(Protocol):
    """Owner of the router's requests, which handles the leader's messages.

    On each new stream, LeaderClient reports the requests that ``waiting`` and ``running`` return.
    """

    def waiting(self, order: Policy) -> Iterable[Waiting]:
        """Yield the queued requests, sorted by the queue policy ``order``.

        A request that leaves the queue during the iteration is omitted if it was not yielded
        before.
        """
        ...

    def running(self) -> Iterable[Running]:
        """Return all requests that are at workers."""
        ...

    def dispatched(self, message: session_pb2.Dispatched) -> None: ...

    def refused(self, refusal: session_pb2.Refusal) -> None:
        """End a request that the leader rejected, with the error that ``refusal`` names."""
        ...

    def withdrawn(self, message: session_pb2.Withdrawn) -> None:
        """Record how long a request had waited in the queue when its router withdrew it."""
        ...

    def on_queue_estimates(self, estimates: Iterable[session_pb2.QueueEstimate]) -> None:
        """Replace the estimated waits of all models, by which requests are rejected early."""
        ...

    def schedule_adoption(self, request_id: str) -> None: ...

    def stale(self, request_id: str) -> None: ...

    def move(self, epoch: int) -> None: ...

    def evict(self, eviction: session_pb2.Eviction) -> None: ...


class LeaderClient:
    def __init__(self, router_id: str, leader: Leader, transport: Transport) -> None:
        self._router_id = router_id
        self._local = leader
        self._transport = transport
        self._gateway: Gateway | None = None
        #: sender of the requests that the leader does not know yet; None while there is no stream
        self._sender: HandoverSender | None = None
        #: counted output tokens that were not sent yet, including those from before the stream
        self._served = ServedOutputs()
        self._is_served_due = False
        self._starts: list[session_pb2.WorkerStart] = []
        #: by model: the workers that this cluster wants
        self._demands: dict[str, session_pb2.WorkerDemand] = {}
        self._is_demand_due = False
        self._tpot_ratios: list[session_pb2.TpotRatio] = []
        self._session_outputs: list[session_pb2.SessionOutput] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        #: id and address of the leader to which this client last connected
        self._followed = ("", "")
        self._last_message_at = 0.0
        self._generation = ""
        #: number of requests in the leader's queue, as the leader last reported it
        self.queued = 0

    def serve(self, gateway: Gateway) -> None:
        """Set the source of the requests to report, which also handles the leader's messages.

        Call it once, before ``follow``.
        """
        self._gateway = gateway

    @property
    def is_open(self) -> bool:
        """Return whether there is a stream to a leader that has been silent for less than 2 s.

        The silence is measured from the leader's last message, or else from the stream's start.
        """
        return self._task is not None and not self._task.done() and self._silence_s < _DEAD_S

    @property
    def is_quiet(self) -> bool:
        """Return whether no stream is open, or the leader has sent nothing for more than 0.6 s.

        The limit is shorter than that of ``is_open``, because a silent leader may have failed.
        """
        return not self.is_open or self._silence_s > _QUIET_S

    @property
    def _silence_s(self) -> float:
        return now() - self._last_message_at

    # requests and reports to the leader

    def reserve(self, request: Arriving) -> Reservation | None:
        """Reserve a worker for a new request, if the request need not queue and this replica leads.

        ``request`` is called with the arrival (ledger time in seconds) and returns the request.
        Returns None if the request has to queue, if another router leads, or if this leader may not
        dispatch now.
        """
        if self._sender is None or self._sender:
            return None
        return self._local.reserve(self._router_id, request)

    def enqueue(self, waiting: Waiting) -> None:
        if self._sender is not None:
            self._sender.enqueue(waiting)
            self._changed.set()

    def withdraw(self, request_id: str) -> None:
        """Notify the leader that a request has ended.

        The request then leaves the leader's queue, or no longer counts as load of its worker.
        """
        if self._sender is not None:
            self._sender.withdraw(request_id)
            self._changed.set()

    def report_running(self, running: Running) -> None:
        """Notify the leader that a request runs at a worker, or that the worker preempted it."""
        if self._sender is not None:
            self._sender.report_running(running)
            self._changed.set()

    def report_served(self, request_id: str, model: str, priority: int, tokens: int) -> None:
        """Count new output tokens of a request, to be sent with the next message to the leader.

        ``priority`` is the request's class. Tokens of a request without a tenant are ignored.
        """
        if tenant := tenant_of(request_id):
            self._served.add(model, tenant, priority, tokens)

    def flush_served(self) -> None:
        """Send the output token counts of ``report_served`` to the leader now, if there are any."""
        if self._served:
            self._is_served_due = True
            self._changed.set()

    def report_finished(self, model: str, tpot_ratio: float) -> None:
        """Report how well the time per output token of a finished request was predicted.

        ``tpot_ratio`` is the measured time divided by the predicted one. It is ignored if there is
        no stream.
        """
        if self._sender is not None:
            self._tpot_ratios.append(session_pb2.TpotRatio(model=model, ratio=tpot_ratio))

    def report_session_output(self, model: str, session: int, tokens: int) -> None:
        """Report the number of output tokens of a request that has ended, and its session.

        The report is ignored if there is no stream.
        """
        if self._sender is not None:
            output = session_pb2.SessionOutput(model=model, session=session, tokens=tokens)
            self._session_outputs.append(output)
            self._changed.set()

    def worker_starts(self, start: session_pb2.WorkerStart) -> None:
        """Report to the leader that a worker is starting; ignored without a stream to a leader.

        The worker repeats its report, so later leaders receive it, too.
        """
        if self._sender is not None:
            self._starts.append(start)
            self._changed.set()

    def report_demand(self, demand: session_pb2.WorkerDemand) -> None:
        """Set how many workers of a model this cluster is to have, and why some are missing.

        This is sent to the present leader and to later ones.
        """
        if demand != self._demands.get(demand.model):
            self._demands[demand.model] = copy(demand)
            self._is_demand_due = True
            self._changed.set()

    def report_generation(self, generation: str) -> None:
        """Report to the leader that this router has sent all its requests to the ledger again.

        ``generation`` is the ledger's present id, which changes when the ledger may have lost data.
        """
        self._generation = generation
        if self._sender is not None:
            self._sender.report_generation(generation)
            self._changed.set()

    def cached_tokens(self, model: str, chunks: Sequence[int], num_tokens: int) -> int:
        """Return the length in tokens of a request's longest prefix in any worker's prefix cache.

        ``chunks`` are the ids of the chunks of the request's ``num_tokens`` tokens. Only workers of
        ``model`` count. The last token never counts, because it is always computed.
        """
        return self._local.cached_tokens(model, chunks, num_tokens)

    # connection

    async def follow(self, leader: str, address: str) -> None:
        """Connect to this leader, unless connected already; if ``leader`` is empty, disconnect.

        ``leader`` is the id of a router, ``address`` its internal address. If ``leader`` is this
        router although it does not lead, disconnect, too.
        """
        if (leader, address) == self._followed and self.is_open:
            return
        await self.close()
        self._followed, self._last_message_at = (leader, address), now()
        if leader == self._router_id and self._local.is_leading:
            self._task = asyncio.create_task(self._run_stream(""))
        elif leader and leader != self._router_id:
            self._task = asyncio.create_task(self._run_stream(address))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run_stream(self, address: str) -> None:
        """Run the stream to the leader at ``address``, which is empty if this replica leads.

        An error ends the stream, and the next heartbeat opens another one.
        """
        try:
            await (self._stream_to(address) if address else self._stream_locally())
        except Exception:
            log.exception("stream to the leader failed")

    async def _stream_locally(self) -> None:
        with self._outgoing_messages() as messages:
            async with aclosing(self._local.serve_stream(messages)) as answers:
                await self._receive(answers)

    async def _stream_to(self, address: str) -> None:
        async with self._transport.channel(address) as channel:
            stub: session_pb2_grpc.RouterInternalAsyncStub
            stub = session_pb2_grpc.RouterInternalStub(channel)
            with self._outgoing_messages() as messages:
                try:
                    await self._receive(stub.Admission(messages))
                except grpc.aio.AioRpcError as error:
                    log.info(
                        "connection to the leader lost", address=address, code=error.code().name
                    )

    @contextmanager
    def _outgoing_messages(self) -> Iterator[AsyncIterator[session_pb2.GatewayMessage]]:
        assert self._gateway is not None
        order = self._local.rules.order
        waiting, running = self._gateway.waiting(order), self._gateway.running()
        sender = HandoverSender(self._router_id, waiting, running, self._generation, order)
        self._sender = sender
        self._is_demand_due = True
        self._changed.set()
        try:
            yield self._messages(sender)
        finally:
            self._sender = None
            self._changed.set()

    async def _messages(self, sender: HandoverSender) -> AsyncIterator[session_pb2.GatewayMessage]:
        while True:
            await self._changed.wait()
            if self._sender is not sender:
                return
            self._changed.clear()
            while (sender or self._has_more) and self._sender is sender:
                yield self._next_message(sender)
                await asyncio.sleep(0)

    @property
    def _has_more(self) -> bool:
        return bool(
            self._is_served_due or self._is_demand_due or self._starts or self._session_outputs
        )

    def _next_message(self, sender: HandoverSender) -> session_pb2.GatewayMessage:
        message = sender.next_message()
        message.served.extend(self._served.drain())
        message.starts.extend(self._starts)
        message.tpot_ratios.extend(self._tpot_ratios)
        message.session_outputs.extend(self._session_outputs)
        self._starts.clear()
        self._session_outputs.clear()
        self._tpot_ratios.clear()
        self._is_served_due = False
        if self._is_demand_due:
            message.demands.extend(self._demands.values())
            self._is_demand_due = False
        return message

    # messages from the leader

    async def _receive(self, messages: AsyncIterable[session_pb2.LeaderMessage]) -> None:
        """Handle the leader's messages until it resigns or the stream ends.

        Then wake the heartbeat, which finds the next leader. Do not wake it if no message came, or
        if the first message was already the resignation.
        """
        has_led = False
        try:
            async for message in messages:
                self._on_message(message)
                if message.resigned:
                    return
                has_led = True
        finally:
            if has_led:
                self._local.changed.set()

    def _on_message(self, message: session_pb2.LeaderMessage) -> None:
        assert self._gateway is not None
        self._last_message_at = now()
        self.queued = message.queued
        for dispatched in message.dispatched:
            if self._sender is not None:
                self._sender.dispatched(dispatched.request_id)
            self._gateway.dispatched(dispatched)
        for refusal in message.refusals:
            self._gateway.refused(refusal)
        for withdrawn in message.withdrawn:
            self._gateway.withdrawn(withdrawn)
        if message.queue_estimates:
            self._gateway.on_queue_estimates(message.queue_estimates)
        for request_id in message.adopt:
            self._gateway.schedule_adoption(request_id)
        for request_id in message.stale:
            self._gateway.stale(request_id)
        for epoch in message.move:
            self._gateway.move(epoch)
        for eviction in message.evictions:
            self._gateway.evict(eviction)
