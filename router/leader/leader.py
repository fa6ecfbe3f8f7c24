"""Leader of the admission queue: the loop that runs the decisions of ``LeaderState``.

Every router replica runs this loop; only the one that holds the leader's lease acts. The queue is
in memory while a replica leads (``LeaderState``). Live routers report their queued requests to a
new leader, and it finds the requests of dead routers in the ledger. Each model has a queue of its
own. Names use "gateway" for a router that is connected to the leader. A move sends a preempted
request to another worker, at which it resumes sooner.

    routers' streams --receive--> LeaderState --place--> ledger.dispatch --> Dispatched, to routers
    workers' frames  --report---> Placements  --moves-->                     move, to routers
    its own router   --reserve--> LeaderState --> ledger.open with a dispatch, if the queue is empty

No request is dispatched or moved while routers restore possibly lost state in the ledger.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from everlift import logs
from everlift.errors import LedgerUnavailable
from everlift.v1 import inference_pb2, session_pb2
from router.admission.fair_share import FairShare
from router.admission.handover import DISPATCHES_AT_ONCE, MOVES_S, TICK_S
from router.admission.leader_state import LeaderState
from router.admission.load_shedding import Refusal
from router.admission.model_queue import Placed
from router.admission.placements import Placements
from router.admission.policy import Rules
from router.admission.request import Waiting
from router.admission.workers import Capacity, Load, WorkerView
from router.config import RouterConfig
from router.event_loop import now
from router.leader.lease import Lease
from router.leader.server import LeaderServer
from router.leader.sweep import Sweep
from router.ledger.base import Ledger, Membership, NotQueued, StaleTerm
from router.ledger.entry import Dispatch, Entry

log = logs.get_logger(__name__)

#: Maximum number of dispatches that are being retried because the ledger did not answer. They do
#: not count towards ``DISPATCHES_AT_ONCE``.
_MAX_RETRYING = 512
#: Seconds before the first retry of a dispatch, and the maximum, up to which the wait doubles.
_RETRY_S, _MOST_RETRY_S = 0.2, 2.0
#: Seconds between two queries for the live routers, while the leader waits for them.
_GATEWAY_POLL_S = 0.05


#: Function that returns a new request, given its arrival (ledger time in seconds).
Arriving: TypeAlias = Callable[[float], Waiting]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Worker that is reserved for a request that is not in the ledger yet.

    The holder calls exactly one of ``confirm`` and ``cancel``. ``leader_state`` is the state of the
    leader in the term in which the reservation was made.
    """

    leader: Leader
    leader_state: LeaderState
    placed: Placed
    dispatch: Dispatch

    def dispatched(self, entry: Entry) -> session_pb2.Dispatched:
        waiting = self.placed.waiting
        return dispatched(
            entry,
            predicted_ttft_s=waiting.predicted_ttft_s,
            predicted_tpot_s=waiting.predicted_tpot_s,
            cached_tokens=self.placed.cached_tokens,
        )

    def confirm(self) -> bool:
        """Record that the ledger has dispatched the request to the worker.

        Returns whether the replica is still in the term in which it made the reservation. If it
        lost the lease since then, the result is False even if it leads again.
        """
        return self.leader.settle_reservation(self, is_dispatched=True)

    def cancel(self) -> None:
        """Release the worker, because the ledger did not dispatch the request."""
        self.leader.settle_reservation(self, is_dispatched=False)


class Leader:
    """Leader loop of a router replica, which acts only while the replica leads.

    ``weight_of`` returns the fair-share weight of a tenant by its name; if it is None, tenants are
    not distinguished.
    """

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        address: str,
        ledger: Ledger,
        weight_of: Callable[[str], float] | None = None,
    ) -> None:
        self._config = config
        self._weight_of = weight_of
        self._ledger = ledger
        self._lease = Lease(config, router_id, address, ledger, self._start_term, self._end_term)
        self.rules = Rules.of(config)
        self._placements = Placements(config)
        self._leader_state: LeaderState | None = None
        self._server = LeaderServer(self)
        self._sweep = Sweep(config, ledger, self._assignees, self._send, self._server.redirect)
        #: sequences in the slots of each worker, by worker id, as the worker last reported them
        self._slots: dict[str, Sequence[inference_pb2.RunningSequence]] = {}
        self._generation = ""
        #: ledger time minus the router's clock, in seconds
        self._ledger_offset_s = 0.0
        #: time from which the next moves of preempted requests may be made
        self._move_after = 0.0
        self._is_reporting = False
        #: settings of each model's autoscaler, by name, that of the main model first; the
        #: autoscalers read them with the load report
        self.autoscale: Mapping[str, Mapping[str, float]] = {}
        #: number of times that this replica became the leader
        self.num_terms = 0
        #: number of workers that were lost without a drain while this replica led
        self.num_losses = 0
        #: number of dispatches in flight, and of those among them that are retried
        self._num_in_flight = self._num_retrying = 0
        self._wake = asyncio.Event()
        #: wakes the dispatch loop when a wait for a worker with a cached prefix ends
        self._timer: asyncio.TimerHandle | None = None
        self._term_started = asyncio.Event()
        self._rules_changed = asyncio.Event()
        #: set when this replica begins or ceases to lead, or its stream to the leader has ended
        self.changed = asyncio.Event()

    @property
    def is_leading(self) -> bool:
        return self._lease.is_held

    @property
    def queued(self) -> int:
        return self._leader_state.queued if self._leader_state else 0

    @property
    def running(self) -> int:
        """Number of the cluster's requests that are at workers; 0 if another replica leads."""
        return self._leader_state.running if self._leader_state else 0

    @property
    def views(self) -> Mapping[str, WorkerView]:
        """Views of the workers that are connected, by worker id."""
        return self._placements.workers

    def cached_tokens(self, model: str, chunks: Sequence[int], num_tokens: int) -> int:
        """Return the length in tokens of a request's longest prefix in any worker's prefix cache.

        ``chunks`` are the ids of the chunks of the request's ``num_tokens`` tokens. Only workers of
        ``model`` count. The last token never counts, because it is always computed.
        """
        return self._placements[model].most_cached(chunks, num_tokens)

    def view(self, worker_id: str) -> WorkerView | None:
        """Return the view of a worker; None if it is not connected."""
        return self._placements.view(worker_id)

    async def run(self) -> None:
        """Compete for the lease and lead while it is held, until cancelled; then release the lease.

        The leader dispatches requests, and assigns requests of dead routers to live ones.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lease.campaign())
                tasks.create_task(self._await_gateways())
                tasks.create_task(self._apply_rules_loop())
                tasks.create_task(self._dispatch_loop(tasks))
                tasks.create_task(self._tick(tasks))
                tasks.create_task(self._sweep.run())
        finally:
            await self._lease.resign()

    # leadership

    async def back_off(self) -> None:
        """Release the lease and leave it to other replicas for the duration of one lease."""
        await self._lease.back_off()

    def on_heartbeat(self, membership: Membership) -> None:
        """Apply the ledger's answer to a heartbeat: its clock, its leader and its generation.

        The generation is an id that changes when the ledger may have lost data.
        """
        self._ledger_offset_s = membership.now - now()
        if not membership.leader:
            self._lease.campaign_now()
        if membership.generation != self._generation:
            self._generation = membership.generation
            self._lease.confirm()
            self._sweep.pause()
            if self._leader_state is not None:
                self._leader_state.generations.change(self._generation, now())

    def _start_term(self) -> None:
        self.num_terms += 1
        self._leader_state = LeaderState(
            self._config,
            self.rules,
            self._placements,
            self._occupants,
            self._generation,
            now(),
            None if self._weight_of is None else partial(self._fair_share, self._weight_of),
        )
        self._sweep.pause()
        self._term_started.set()
        self.changed.set()

    def _fair_share(self, weight_of: Callable[[str], float]) -> FairShare:
        config = self._config
        return FairShare(config.prompt_token_weight, config.output_token_weight, weight_of)

    def _end_term(self) -> None:
        self._leader_state = None
        self._server.disconnect_all()
        self.changed.set()

    async def _await_gateways(self) -> None:
        while True:
            await self._term_started.wait()
            self._term_started.clear()
            leader_state = self._leader_state
            while leader_state is not None and leader_state is self._leader_state:
                self._wake.set()
                if not leader_state.handover.is_awaiting_gateways(now()):
                    break
                try:
                    await self._restore_counters(leader_state)
                    leader_state.handover.set_live_gateways(await self._ledger.gateways())
                except LedgerUnavailable:
                    log.info("live gateways unknown")
                await asyncio.sleep(_GATEWAY_POLL_S)

    # changes by operators

    def apply_rules(self, rules: Rules) -> None:
        """Set the rules of the queue, such as its order.

        A background task then applies them to the requests that are queued already.
        """
        self.rules = rules
        self._placements.set_tpot_target(rules.tpot_target)
        self._rules_changed.set()

    async def _apply_rules_loop(self) -> None:
        while True:
            await self._rules_changed.wait()
            self._rules_changed.clear()
            leader_state = self._leader_state
            for _ in leader_state.apply_rules(self.rules, now()) if leader_state else ():
                await asyncio.sleep(0)
                if leader_state is not self._leader_state or self._rules_changed.is_set():
                    break
            self._wake.set()

    # messages from gateways

    async def serve_stream(
        self, messages: AsyncIterator[session_pb2.GatewayMessage]
    ) -> AsyncGenerator[session_pb2.LeaderMessage, None]:
        """Serve a router's stream: handle ``messages``, and yield the leader's messages to it.

        The iteration ends when the router closes the stream, or when this replica no longer leads.
        If it does not lead at the start, only one message, with ``resigned`` set, is yielded.
        """
        if not self.is_leading:
            yield session_pb2.LeaderMessage(resigned=True)
            return
        async with aclosing(self._server.serve_stream(messages)) as answers:
            async for message in answers:
                yield message

    def connected(self, gateway: str) -> None:
        if self._leader_state is None:
            self._send(gateway, session_pb2.LeaderMessage(resigned=True))
        else:
            self._leader_state.connect(gateway, now())
            self._send(gateway, session_pb2.LeaderMessage())

    def disconnected(self, gateway: str) -> None:
        if self._leader_state is not None:
            self._leader_state.disconnect(gateway)

    def receive(self, gateway: str, message: session_pb2.GatewayMessage) -> None:
        if self._leader_state is None:
            return
        effects = self._leader_state.on_message(gateway, message, now())
        self._refuse(effects.refused)
        for replaced in effects.replaced:
            self._send_stale(replaced)
        if effects.withdrawn:
            self._send(gateway, session_pb2.LeaderMessage(withdrawn=effects.withdrawn))
        self._wake.set()

    def reserve(self, gateway: str, request: Arriving) -> Reservation | None:
        """Reserve a worker for a new request of this replica's own router, ``gateway``.

        The ledger does not have the request yet. ``request`` is called with the arrival (ledger
        time in seconds) and returns the request. Returns None if the request has to queue, if
        another replica leads, or if the leader may not dispatch now.
        """
        leader_state = self._leader_state
        if leader_state is None or gateway not in self._server.gateways or not self._may_act():
            return None
        moment = now()
        waiting = request(moment + self._ledger_offset_s)
        placed = leader_state.reserve(waiting, moment, _new_epoch)
        if placed is None:
            return None
        dispatch = Dispatch(placed.worker_id, placed.epoch, self._lease.term)
        return Reservation(self, leader_state, placed, dispatch)

    def settle_reservation(self, reservation: Reservation, *, is_dispatched: bool) -> bool:
        """Confirm a reservation if ``is_dispatched`` is True, otherwise release its worker.

        Returns whether the replica is still in the term in which it made the reservation.
        """
        leader_state, placed = reservation.leader_state, reservation.placed
        if is_dispatched:
            leader_state.confirm_reservation(placed, placed.waiting.gateway, now())
        else:
            leader_state.cancel_reservation(placed)
            self._wake.set()
        return leader_state is self._leader_state

    def _refuse(self, refusals: Iterable[Refusal]) -> None:
        for refusal in refusals:
            waiting = refusal.waiting
            message = session_pb2.Refusal(
                request_id=waiting.request_id,
                slug=refusal.slug,
                retry_after_s=refusal.retry_after_s,
                least_tokens=refusal.least_tokens,
            )
            self._send(waiting.gateway, session_pb2.LeaderMessage(refusals=[message]))

    def _send(self, gateway: str, message: session_pb2.LeaderMessage) -> None:
        message.queued = self.queued
        self._server.send(gateway, message)

    # messages from workers

    def worker_up(self, info: session_pb2.WorkerInfo) -> None:
        self._placements.join(info.worker_id, info.model, Capacity.from_proto(info))
        self._wake.set()

    def worker_lost(self, worker_id: str) -> None:
        view = self.view(worker_id)
        self.num_losses += self.is_leading and view is not None and not view.load.draining
        self._placements.remove_worker(worker_id)
        self._slots.pop(worker_id, None)
        self._wake.set()

    def worker_frame(self, worker_id: str, frame: session_pb2.WorkerFrame) -> None:
        placement = self._placements.of_worker(worker_id)
        if placement is None:
            return
        for epoch in frame.accepted_epochs:
            placement.acknowledge(worker_id, epoch)
        index = placement.index
        if frame.stored_chunks or frame.evicted_chunks:
            index.update(worker_id, frame.stored_chunks, frame.evicted_chunks)
        if frame.stored_host_chunks or frame.evicted_host_chunks:
            index.update_host(worker_id, frame.stored_host_chunks, frame.evicted_host_chunks)
        for epoch in frame.prefilled_epochs:
            index.settle(worker_id, epoch)
        if frame.HasField("loaded_adapters"):
            placement.report_adapters(worker_id, frame.loaded_adapters)
        if frame.HasField("state"):
            placement.report(worker_id, Load.from_proto(frame.state), now())
            if frame.state.running or not frame.state.num_running:
                self._slots[worker_id] = frame.state.running
            if self._leader_state is not None and self._leader_state.has_work:
                self._wake.set()

    def _occupants(self, worker_id: str) -> Collection[str]:
        """Return the ids of the requests in the slots of a worker, as it last reported them.

        The id of a request with several choices is repeated for each slot.
        """
        return [sequence.request_id for sequence in self._slots.get(worker_id, ())]

    # dispatch

    async def _dispatch_loop(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._move()
            if (leader_state := self._leader_state) is not None:
                for placed in self._place(leader_state):
                    self._num_in_flight += 1
                    tasks.create_task(self._dispatch(placed, leader_state, self._lease.term))
                self._wake_at(leader_state.next_expiry if self._may_act() else None)

    def _wake_at(self, moment: float | None) -> None:
        """Wake the dispatch loop at ``moment``, in seconds of the router's clock.

        Any wake-up that an earlier call set is cancelled. No new one is set if ``moment`` is None.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if moment is not None:
            delay_s = max(0.0, moment - now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake.set)

    def _may_act(self) -> bool:
        """Return whether this replica may dispatch and move requests.

        It may if it leads and the ledger has confirmed its term (number of its leadership). If the
        ledger may have lost data, all routers must also have sent their requests to the ledger
        again.
        """
        return (
            self._leader_state is not None
            and self._lease.is_confirmed
            and self._leader_state.generations.agree(now())
        )

    def _move(self) -> None:
        moment = now()
        if self._leader_state is None or moment < self._move_after or not self._may_act():
            return
        self._move_after = moment + MOVES_S
        for move in self._leader_state.moves(moment, moment + self._ledger_offset_s):
            running = move.running
            log.info(
                "request moved",
                request_id=running.request_id,
                source=running.worker_id,
                to=move.worker_id,
            )
            self._send(running.gateway, session_pb2.LeaderMessage(move=[running.epoch]))

    def _place(self, leader_state: LeaderState) -> list[Placed]:
        moment, may_act = now(), self._may_act()
        leader_state.note_workers(moment)
        if not may_act:
            return []
        self._refuse(leader_state.expire(moment + self._ledger_offset_s))
        return leader_state.place(moment, moment + self._ledger_offset_s, self._limit, _new_epoch)

    @property
    def _limit(self) -> int:
        """Number of dispatches that may be started now."""
        at_once = DISPATCHES_AT_ONCE - (self._num_in_flight - self._num_retrying)
        return max(0, at_once) if self._num_retrying < _MAX_RETRYING else 0

    async def _dispatch(self, placed: Placed, leader_state: LeaderState, term: int) -> None:
        try:
            await self._try_dispatch(placed, leader_state, term)
        finally:
            self._num_in_flight -= 1
            self._wake.set()

    async def _try_dispatch(self, placed: Placed, leader_state: LeaderState, term: int) -> None:
        sent_at = now()
        try:
            entry = await self._ledger_dispatch(placed, term)
        except NotQueued:
            self._placements[placed.waiting.model].cancel(placed.worker_id, placed.epoch)
            self._send_stale(placed.waiting)
            return
        except StaleTerm:
            # The request has left this queue, but its gateway reports it again on its next stream.
            if term == self._lease.term:
                self._lease.lose()
            return
        # A disconnected gateway reports its running requests itself when it connects again.
        if entry.gateway in self._server.gateways:
            leader_state.on_dispatched(placed, entry.gateway)
        self._send_dispatched(placed, entry, now() - sent_at)
        if entry.gateway != placed.waiting.gateway:
            self._send_stale(placed.waiting)
        self._send_evictions(placed)

    def _send_dispatched(self, placed: Placed, entry: Entry, dispatch_s: float) -> None:
        waiting = placed.waiting
        message = dispatched(
            entry,
            placed.bypassed,
            waiting.predicted_ttft_s,
            waiting.predicted_tpot_s,
            placed.queue_wait,
            placed.cached_tokens,
        )
        if placed.queue_wait is not None:
            message.queue_wait.dispatch_s = dispatch_s
        self._send(entry.gateway, session_pb2.LeaderMessage(dispatched=[message]))

    def _send_stale(self, waiting: Waiting) -> None:
        self._send(waiting.gateway, session_pb2.LeaderMessage(stale=[waiting.request_id]))

    def _send_evictions(self, placed: Placed) -> None:
        request_id = placed.waiting.request_id
        for victim in placed.victims:
            log.info(
                "preempting for a request of a higher class",
                request_id=victim.request_id,
                to=request_id,
            )
            eviction = session_pb2.Eviction(epoch=victim.epoch, request_id=request_id)
            self._send(victim.gateway, session_pb2.LeaderMessage(evictions=[eviction]))

    async def _ledger_dispatch(self, placed: Placed, term: int) -> Entry:
        try:
            return await self._ledger_dispatch_once(placed, term)
        except LedgerUnavailable:
            self._num_retrying += 1
            self._wake.set()
        try:
            return await self._retry_ledger_dispatch(placed, term)
        finally:
            self._num_retrying -= 1

    async def _retry_ledger_dispatch(self, placed: Placed, term: int) -> Entry:
        pause_s = _RETRY_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                return await self._ledger_dispatch_once(placed, term)
            except LedgerUnavailable:
                pause_s = min(2 * pause_s, _MOST_RETRY_S)

    async def _ledger_dispatch_once(self, placed: Placed, term: int) -> Entry:
        return await self._ledger.dispatch(
            placed.waiting.request_id, placed.worker_id, placed.epoch, term
        )

    async def _tick(self, tasks: asyncio.TaskGroup) -> None:
        """Periodically expire reservations, send queue estimates to routers, and store the load."""
        while True:
            await asyncio.sleep(TICK_S)
            self._placements.expire(now())
            if self._leader_state is not None:
                self._leader_state.update_estimates(now())
                self._leader_state.prune(now())
                if not self._is_reporting:
                    self._is_reporting = True
                    tasks.create_task(self._report(self._leader_state))
            self._wake.set()
            self._send_queue_estimates()

    def _send_queue_estimates(self) -> None:
        gateways = self._server.gateways
        leader_state = self._leader_state
        queue_estimates = leader_state.queue_estimates() if leader_state is not None else []
        for gateway in gateways:
            self._send(gateway, session_pb2.LeaderMessage(queue_estimates=queue_estimates))

    def load(self) -> session_pb2.ClusterLoad | None:
        """Return the load of the cluster; None if another replica leads."""
        return self._load(self._leader_state) if self._leader_state is not None else None

    def _load(self, leader_state: LeaderState) -> session_pb2.ClusterLoad:
        moment = now()
        load = leader_state.load(self._lease.term, moment, moment + self._ledger_offset_s)
        for number, (model, settings) in enumerate(self.autoscale.items()):
            load.models[model].autoscale.update(settings)
            if number == 0:
                # Those of the main model's workers are also those of the routers.
                load.autoscale.update(settings)
        return load

    async def _restore_counters(self, leader_state: LeaderState) -> None:
        if not leader_state.has_restored_counters:
            report = await self._ledger.load()
            leader_state.restore_counters(
                report.load if report is not None else session_pb2.ClusterLoad()
            )

    async def _read_scaling(self, leader_state: LeaderState) -> None:
        if leader_state.is_scaled:
            for report in await self._ledger.scaling():
                leader_state.scale(report.scaling, now() - report.age_s)

    async def _report(self, leader_state: LeaderState) -> None:
        try:
            # The counters in the previous leader's report are read before it is overwritten.
            await self._restore_counters(leader_state)
            await self._read_scaling(leader_state)
            await self._ledger.put_load(self._load(leader_state))
        except LedgerUnavailable as error:
            log.info("load report failed", cause=str(error))
        finally:
            self._is_reporting = False

    def _assignees(self) -> list[str]:
        return self._server.gateways if self._may_act() else []


def _new_epoch() -> int:
    return secrets.randbits(64) or 1


def dispatched(
    entry: Entry,
    bypassed: int = 0,
    predicted_ttft_s: float | None = None,
    predicted_tpot_s: float | None = None,
    queue_wait: session_pb2.QueueWait | None = None,
    cached_tokens: int = 0,
) -> session_pb2.Dispatched:
    """Return the message that notifies a router of the dispatch of its request.

    ``entry`` is the request's entry in the ledger after the dispatch. ``bypassed`` is the number of
    requests that arrived later and left the queue earlier. The predicted time to first token and
    time per output token are in seconds, None if unknown. ``queue_wait`` is None if the
    request never entered the queue. The worker is expected to have the request's first
    ``cached_tokens`` tokens, of its prompt and any earlier output, in its prefix cache.
    """
    return session_pb2.Dispatched(
        request_id=entry.request_id,
        worker_id=entry.worker,
        epoch=entry.epoch,
        attempt=entry.attempts,
        moves=entry.moves,
        bypassed=bypassed,
        predicted_ttft_s=predicted_ttft_s,
        predicted_tpot_s=predicted_tpot_s,
        queue_wait=queue_wait,
        cached_tokens=cached_tokens,
    )
