"""Queue of one model at the leader, and the decisions about its requests. Pure.

A queue exists for one term of the leader (``LeaderState``). The view of the workers is kept in
``Placement``. A gateway is a router in its role towards the leader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

from everlift.messages import BATCH_PRIORITY
from everlift.v1 import session_pb2
from router.admission.attained_service import AttainedService
from router.admission.demands import Demands
from router.admission.fair_share import FairShare
from router.admission.handover import QueueHandover
from router.admission.load_shedding import Bounds, Refusal
from router.admission.parking import Parked, Parking, Wait
from router.admission.placement import Choice, Placement, Waited
from router.admission.policy import Rules, key_of
from router.admission.preemption import (
    MOVE_HEADROOM,
    Evictions,
    Move,
    MovePolicy,
    OutputReservations,
)
from router.admission.queue import AdmissionQueue
from router.admission.request import Key, Ordered, Running, RunningTable, Waiting
from router.admission.starting_workers import StartingWorkers
from router.admission.wait_estimate import WaitEstimator
from router.admission.wait_stats import bypassed
from router.config import RouterConfig

#: Seconds for which a request that was moved or evicted is neither moved nor evicted again.
_SPARED_S = 5.0
#: Seconds after which a request is tried again whose adapter no worker serves.
_ADAPTER_RETRY_S = 1.0
#: Seconds after which a request is tried again that avoids the only worker with capacity for it,
#: fewer than the request has for evicting others (``Evictions``).
_AVOIDED_RETRY_S = 0.25
#: Maximum number of requests that wait for no particular worker and are tried at each placement.
_MOST_TRIED = 64
#: An evicted request is spared for at least this many times its recompute time, so that it makes
#: progress in between.
_SPARED_FACTOR = 3


@dataclass(frozen=True, slots=True)
class MessageEffects:
    """Effects of one router's message on the queue.

    ``refused`` are rejected requests. ``replaced`` are queued requests that other routers had
    reported, and that the message replaced. ``withdrawn`` are requests that left the queue without
    a dispatch, with the times that they waited.
    """

    refused: list[Refusal]
    replaced: list[Waiting]
    withdrawn: list[session_pb2.Withdrawn]


@dataclass(frozen=True, slots=True)
class Placed:
    """Decision to dispatch a request to a worker, where the ``victims`` are evicted for it.

    ``epoch`` is the random id of the dispatch, by which outdated messages are recognised. The
    worker is expected to have the first ``cached_tokens`` tokens of the request in its prefix
    cache. ``queue_wait`` is None if the request was dispatched without being queued.
    """

    waiting: Waiting
    worker_id: str
    epoch: int
    victims: tuple[Running, ...] = ()
    cached_tokens: int = 0
    queue_wait: session_pb2.QueueWait | None = None

    @property
    def bypassed(self) -> int:
        """Number of later requests that left the queue before this one."""
        return 0 if self.queue_wait is None else bypassed(self.queue_wait)


class ModelQueue:
    """Queued and running requests of one model during one term of the leader.

    ``now`` is the router's clock and ``ledger_now`` the ledger's, in seconds. ``occupants`` returns
    the ids of the requests that have a slot at a worker. ``handover`` is the progress of the term's
    handover, which the queues of all models share. ``fair_share`` is None if tenants are not
    distinguished. ``gateway`` is the id of a router.
    """

    def __init__(
        self,
        config: RouterConfig,
        rules: Rules,
        placement: Placement,
        occupants: Callable[[str], Collection[str]],
        handover: QueueHandover,
        fair_share: FairShare | None = None,
    ) -> None:
        self._order, self._fair_share_enabled = rules.order, rules.fair_share
        self._placement = placement
        self._fair_share = fair_share
        self._attained_service = AttainedService(
            config.prompt_token_weight, config.output_token_weight
        )
        self._queue = AdmissionQueue(
            rules.order, rules.class_floor, fair_share, is_fair=rules.fair_share
        )
        self._waits = WaitEstimator(placement.workers)
        self._bounds = Bounds(rules, self._queue, self._waits)
        self._running = RunningTable()
        self._parking = Parking()
        self._may_park = True
        self._num_losses = placement.num_losses
        self._move_policy = MovePolicy(config.move_reserve)
        self._output_reservations = OutputReservations(self._running)
        self._evictions = Evictions(self._running, occupants, config.max_pending_prefill)
        #: by request id: time until which the request is neither moved nor evicted
        self._spared: dict[str, float] = {}
        self._handover = handover
        self.starts = StartingWorkers()
        self.demands = Demands()
        #: predicted tokens to compute for all requests that arrived during this leader's term,
        #: except those in the class of batches
        self.offered_tokens = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Predicted number of tokens to compute for all queued requests."""
        return self._queue.work_tokens

    @property
    def batch_tokens(self) -> int:
        """Part of ``queued_tokens`` that belongs to the priority class BATCH_PRIORITY."""
        return self._queue.backlog.work_of(BATCH_PRIORITY)

    def _count_offered(self, waiting: Waiting, sign: int = 1) -> None:
        if waiting.priority > BATCH_PRIORITY:
            self.offered_tokens += sign * waiting.work_tokens

    def class_queues(self) -> list[session_pb2.ClassQueue]:
        """Return the number of queued requests of each class that has any."""
        return [
            session_pb2.ClassQueue(priority=priority, queued=number)
            for priority, number in self._queue.numbers.items()
        ]

    def tenant_queues(self) -> list[session_pb2.TenantQueue]:
        """Return the longest queues by tenant and class; empty if tenants are not distinguished."""
        return self._fair_share.queues() if self._fair_share is not None else []

    def waited_s(self, now: float, ledger_now: float) -> float:
        """Return the seconds that the next request has waited; 0 if there is none.

        Parked requests (``Wait``) are left out. The time counts from the next request's arrival or,
        if it has been dispatched before, from when it was queued again. The result is also 0 if the
        next request has the class BATCH_PRIORITY, because its wait requires no further worker.
        """
        head = self._queue.peek(ledger_now)
        if head is None or head.priority == BATCH_PRIORITY:
            return 0.0
        since_s = self._queue.waited_s(head, now) if head.has_run else ledger_now - head.arrived
        return max(0.0, since_s)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Return whether any request is queued, or waits at its worker after a preemption."""
        return bool(self._queue) or self._running.has_preempted

    def apply_rules(self, rules: Rules, now: float) -> Iterator[None]:
        """Apply changed rules; each iteration of the result is one step.

        The first step applies all rules except the order of the queue and fair shares, which change
        when the iterator is exhausted. The order and fair shares stay unchanged if the caller stops
        before. A change of either first unparks all requests, and no request is parked until the
        iterator ends.
        """
        self._bounds.rules, self._queue.class_floor = rules, rules.class_floor
        if (rules.order, rules.fair_share) != (self._order, self._fair_share_enabled):
            self._return_parked(self._parking.release(()), now)
            self._parking, self._may_park = Parking(), False
            try:
                yield from self._queue.reorder(rules.order, is_fair=rules.fair_share)
            finally:
                self._may_park = True
            self._order, self._fair_share_enabled = rules.order, rules.fair_share
            self._handover.complete_all()

    # service of tenants

    def restore_counters(self, services: Iterable[session_pb2.TenantService]) -> None:
        """Restore the tenants' token counters from the previous leader's report."""
        if self._fair_share is not None:
            self._fair_share.restore_counters(services)

    def services(self) -> list[session_pb2.TenantService]:
        return self._fair_share.report() if self._fair_share is not None else []

    @property
    def service_gap(self) -> float:
        """Largest difference between two tenants' token counters of the same priority class.

        Only tenants with queued requests of that class count. The difference is 0 if there are
        none, or if tenants are not distinguished.
        """
        return self._fair_share.gap if self._fair_share is not None else 0.0

    # reports of gateways

    def disconnect(self, gateway: str) -> None:
        """Remove the requests of a gateway that is no longer connected."""
        self._queue.withdraw_gateway(gateway)
        self._parking.keep(self._queue.is_parked)
        self._running.remove_gateway(gateway)
        self.demands.disconnect(gateway)

    def enqueue(
        self, waiting: Waiting, accepted: bool, now: float, effects: MessageEffects
    ) -> None:
        """Queue a request, or refuse it; one that was accepted once is never refused.

        ``effects`` receives the requests that are refused or replaced.
        """
        is_new = not accepted and waiting.request_id not in self._queue
        waiting = self._bounds.predict(waiting)
        if is_new:
            if (refusal := self._bounds.refuse(waiting)) is not None:
                effects.refused.append(refusal)
                self._parking.remove(refusal.waiting.request_id)
                if refusal.waiting is waiting:
                    return
            self._count_offered(waiting)
        self._running.remove(waiting.request_id)
        self._parking.remove(waiting.request_id)
        known = self._queue.get(waiting.request_id, waiting.gateway)
        if self._order.name == "attained" and known is None:
            waiting = self._attained_service.ranked(waiting, now)
        elif known is not None:
            waiting = waiting._replace(attained_rank=known.attained_rank)
        replaced = self._queue.push(waiting, now)
        if replaced is not None and replaced.gateway != waiting.gateway:
            effects.replaced.append(replaced)

    def withdraw(self, gateway: str, request_id: str, now: float, effects: MessageEffects) -> None:
        """Remove the request of ``gateway`` with this id, queued or running, if there is one.

        A queued request is added to ``effects.withdrawn``, with its wait.
        """
        waiting = self._queue.get(request_id, gateway)
        if waiting is not None:
            queue_wait = self._queue_wait(waiting, now)
            effects.withdrawn.append(
                session_pb2.Withdrawn(request_id=request_id, queue_wait=queue_wait)
            )
            self._queue.withdraw(request_id, gateway)
            self._parking.remove(request_id)
        running = self._running.get(request_id)
        if running is not None and running.gateway == gateway:
            self._running.remove(request_id)

    def add_running(self, running: Running) -> None:
        """Record that a worker has a request, which therefore is not queued."""
        if self._queue.withdraw(running.request_id, running.gateway):
            self._parking.remove(running.request_id)
        self._running.add(running)

    def charge_served(self, served: Iterable[session_pb2.ServedTokens]) -> None:
        """Count output tokens that tenants were served."""
        if self._fair_share is not None:
            self._fair_share.charge_outputs(served)

    def charge_sessions(self, outputs: Iterable[session_pb2.SessionOutput], now: float) -> None:
        """Add the output tokens of ended requests to the attained service of their sessions."""
        self._attained_service.charge_outputs(outputs, now)

    def note_tpot_ratio(self, ratio: float) -> None:
        """Record the measured time per output token of a request over the predicted one."""
        self._waits.least_tpot_ratio.note(ratio)

    # overload

    def update_estimates(self, now: float) -> None:
        """Update the estimates of waits; to be called five times a second. O(workers)."""
        self._waits.update(self.queued - self._queue.num_parked, now)

    def expire(self, ledger_now: float) -> list[Refusal]:
        """Remove queued requests that have waited for too long, and return their refusals."""
        refusals = self._bounds.expire(ledger_now)
        for refusal in refusals:
            self._parking.remove(refusal.waiting.request_id)
        return refusals

    @property
    def wait_s(self) -> float | None:
        """Predicted seconds until all queued requests are dispatched; None if unknown."""
        return self._waits.wait_s(self.queued_tokens)

    def queue_estimate(self) -> session_pb2.QueueEstimate:
        """Return the estimated waits by class, by which routers reject requests early."""
        waits = (
            session_pb2.ClassWait(
                priority=priority,
                wait_s=self._waits.least_wait_s(self._waits.wait_s(work) or 0.0),
                work_tokens=work,
            )
            for priority, work in self._queue.backlog.work.items()
        )
        return session_pb2.QueueEstimate(
            tokens_per_s=self._waits.tokens_per_s,
            least_tpot_s=self._waits.least_tpot_s,
            lowest=self._queue.backlog.lowest,
            waits=waits,
        )

    def load(self, now: float, ledger_now: float) -> session_pb2.ClusterLoad:
        """Return the load of the model's workers and queue, for the report to the ledger.

        Draining workers are left out. O(workers + tenants).
        """
        staying = [worker for worker in self._placement.workers.values() if worker.is_open]
        rates = [
            worker.throughput.full_rate
            for worker in staying
            if worker.throughput.full_rate is not None
        ]
        load = session_pb2.ClusterLoad(
            workers=len(staying),
            queued=self.queued,
            queued_tokens=self.queued_tokens,
            batch_tokens=self.batch_tokens,
            waited_s=self.waited_s(now, ledger_now),
            running=sum(worker.load.num_running + worker.num_ahead for worker in staying),
            slots=sum(worker.slots for worker in staying),
            blocks_used=sum(worker.load.blocks_used for worker in staying),
            blocks_total=sum(worker.capacity.num_blocks for worker in staying),
            offered_tokens=self.offered_tokens,
            worker_rate=fmean(rates) if rates else 0.0,
            services=self.services(),
            service_gap=self.service_gap,
            wait_s=self.wait_s,
            class_queues=self.class_queues(),
            tenant_queues=self.tenant_queues(),
            ray_clusters=Counter(
                it.capacity.ray_cluster for it in staying if it.capacity.ray_cluster
            ),
            starting_workers=self.starts.count(now),
            starting_s=self.starts.longest_s(now),
        )
        demand = self.demands.total(now)
        if demand.workers is not None:
            load.wanted_workers = demand.workers
        load.unplaced_workers, load.unplaced_cause = demand.unplaced, demand.cause
        return load

    # decisions

    def note_workers(self, now: float) -> None:
        """Record whether any worker is connected, for the statistics of waits."""
        self._queue.wait_stats.update(now, has_worker=bool(self._placement.workers))

    def place(
        self, now: float, ledger_now: float, limit: int, make_epoch: Callable[[], int]
    ) -> list[Placed]:
        """Remove up to ``limit`` requests from the queue, and return their dispatches to workers.

        Dispatching stops at the first request for which no worker has enough free capacity and no
        eviction is due or helps. ``make_epoch`` returns a random id for each new dispatch.
        """
        placed = self._place_parked(now, ledger_now, limit, make_epoch)
        self._unpark(now)
        while len(placed) < limit and (head := self._head(now, ledger_now)) is not None:
            one = self._place(head, now, ledger_now, make_epoch)
            if one is None:
                break
            if isinstance(one, Wait):
                self._queue.park(head.request_id, one)
                self._parking.add(head, one, now)
            else:
                placed.append(self._dispatch(one, now, ledger_now))
        if len(self._queue) == self._queue.num_parked:
            self._waits.drain.pause()
        return placed

    def _dispatch(self, placed: Placed, now: float, ledger_now: float) -> Placed:
        waiting = placed.waiting
        queue_wait = self._queue_wait(waiting, now)
        self._parking.remove(waiting.request_id)
        self._queue.dispatch(waiting, placed.cached_tokens)
        self._attained_service.charge_prompt(waiting, placed.cached_tokens, now)
        self._placement.reserve(placed.worker_id, placed.epoch, waiting, now, placed.cached_tokens)
        self._waits.note_departure(waiting, ledger_now)
        return replace(placed, queue_wait=queue_wait)

    def _unpark(self, now: float) -> None:
        """Unpark the requests whose wait has ended or whose worker is lost.

        Unparked requests regain their places in the order of the queue. The loss of any worker also
        ends the waits that are for no particular worker.
        """
        if self._num_losses != self._placement.num_losses:
            self._num_losses = self._placement.num_losses
            self._return_parked(self._parking.release(self._placement.workers), now)
        self._return_parked(self._parking.expire(now), now)

    def _return_parked(self, requests: Iterable[Parked], now: float) -> None:
        for parked in requests:
            request_id = parked.waiting.request_id
            if self._queue.is_parked(request_id):
                self._queue.unpark(request_id, now - parked.since)

    def _place_parked(
        self, now: float, ledger_now: float, limit: int, make_epoch: Callable[[], int]
    ) -> list[Placed]:
        """Dispatch parked requests that can be dispatched now, ``limit`` at most.

        The worker that a request waits for must have credit for it; if the request waits for no
        particular worker, any worker may have it.

        A request goes to the worker that is the best one now, which may differ from the one that it
        waited for. A request stays parked if the queue's next request is of a higher class. Parked
        requests do not yield to others of their class, because each was the queue's next request
        when it was parked.
        """
        placed: list[Placed] = []
        if not len(self._parking):
            return placed
        head = self._head(now, ledger_now)
        for worker_id in filter(None, self._parking.workers()):
            while len(placed) < limit and (parked := self._parking.first(worker_id)) is not None:
                waiting = parked.waiting
                if not self._queue.is_parked(waiting.request_id):
                    self._parking.remove(waiting.request_id)
                    continue
                if head is not None and head.priority > waiting.priority:
                    break
                taken = self._placement.take(worker_id, waiting)
                if taken is None:
                    break
                # The worker may have evicted the prefix meanwhile, or may have more to compute.
                choice = self._placement.choose(waiting) or taken
                one = Placed(waiting, choice.worker_id, make_epoch(), (), choice.cached_tokens)
                placed.append(self._dispatch(one, now, ledger_now))
        for waiting in self._parked_anywhere():
            if len(placed) == limit or (head is not None and head.priority > waiting.priority):
                break
            if (found := self._placement.choose(waiting)) is not None:
                one = Placed(waiting, found.worker_id, make_epoch(), (), found.cached_tokens)
                placed.append(self._dispatch(one, now, ledger_now))
        return placed

    def _parked_anywhere(self) -> list[Waiting]:
        """Return requests that wait for no particular worker, those of higher classes first.

        The requests that were parked first are considered, ``_MOST_TRIED`` at most.
        """
        # Removes the requests that have left from the beginning of the line.
        self._parking.first("")
        found = [parked.waiting for parked in islice(self._parking.line(""), _MOST_TRIED)]
        able = [
            it
            for it in found
            if self._queue.is_parked(it.request_id) and self._placement.serves(it.adapter)
        ]
        return sorted(able, key=lambda it: -it.priority)

    def _queue_wait(self, waiting: Waiting, now: float) -> session_pb2.QueueWait:
        message = self._queue.queue_wait(waiting, self._order.name, now, is_fair=self._is_fair)
        wait = self._queue.last_wait(waiting.request_id)
        if wait is not None and wait.worker_id:
            parked = self._parking.get(waiting.request_id)
            seconds = self._queue.parked_s(waiting.request_id)
            if parked is not None:
                seconds += now - parked.since
            message.prefix.seconds = seconds
            message.prefix.tokens, message.prefix.saved_s = wait.cached_tokens, wait.saved_s
            message.prefix.compute_s = wait.compute_s
        return message

    @property
    def next_expiry(self) -> float | None:
        """Time at which the next wait of a parked request ends; None without any.

        ``place`` must be called then. The time may be too early, but not too late.
        """
        return self._parking.next_expiry

    def _head(self, now: float, ledger_now: float) -> Waiting | None:
        """Return the next request; None if there is none, or an unreported one may precede it.

        Requests are ordered by their sort keys alone during a handover: the credit that lower
        classes have earned (``Classes``) and fair shares are ignored.
        """
        if self._handover.is_complete(now):
            return self._queue.peek(ledger_now)
        head = self._queue.peek()
        allowed = head is not None and self._handover.allows(self._key(head), now)
        return head if allowed else None

    def _place(
        self, head: Waiting, now: float, ledger_now: float, make_epoch: Callable[[], int]
    ) -> Placed | Wait | None:
        if not self._placement.serves(head.adapter):
            return self._retry_later(now + _ADAPTER_RETRY_S)
        choice = self._placement.choose(head)
        if choice is not None:
            last = self._queue.last_wait(head.request_id)
            waited = (
                Waited(self._queue.parked_s(head.request_id), last.saved_s) if last else Waited()
            )
            wait = self._wait_for(head, choice, waited, now)
            return wait or Placed(head, choice.worker_id, make_epoch(), (), choice.cached_tokens)
        placed = self._place_by_eviction(head, now, ledger_now, make_epoch)
        if placed is None and self._placement.take(head.avoid, head._replace(avoid="")) is not None:
            return self._retry_later(now + _AVOIDED_RETRY_S)
        return placed

    def _retry_later(self, at: float) -> Wait | None:
        """Return the decision to park a request that must not block those behind it in the queue.

        The result is None if no request may be parked.
        """
        return Wait("", 0, 0.0, 0.0, at) if self._may_park else None

    def _place_by_eviction(
        self, head: Waiting, now: float, ledger_now: float, make_epoch: Callable[[], int]
    ) -> Placed | None:
        # If the head is next because of its class's credit, it must not keep a request of a higher
        # class from evicting others.
        highest = self._queue.peek_highest(ledger_now)
        if highest is not None and highest.priority > head.priority:
            head = highest
        workers = self._placement.workers
        eviction = self._evictions.choose(head, workers, self._spared, ledger_now)
        if eviction is None:
            return None
        for victim in eviction.victims:
            self._spared[victim.request_id] = now + self._spared_s(victim)
        self._evictions.record(eviction, now)
        return Placed(head, eviction.worker_id, make_epoch(), eviction.victims)

    def _wait_for(
        self, waiting: Waiting, choice: Choice, waited: Waited, now: float
    ) -> Wait | None:
        if not self._may_park:
            return None
        return self._placement.wait_for(waiting, choice, self._parking, waited, now)

    def _spared_s(self, victim: Running) -> float:
        worker = self._placement.workers[victim.worker_id]
        return max(_SPARED_S, _SPARED_FACTOR * (worker.prefill_s(victim.known_tokens) or 0.0))

    def reserve(self, waiting: Waiting, now: float, make_epoch: Callable[[], int]) -> Placed | None:
        """Reserve a worker for a new request; return None if the request has to queue.

        The request has to queue in these cases:

        - another request waits after a preemption, or is queued and not parked
        - an unreported request may precede the new one
        - no worker has enough free capacity
        - the new request should wait for a busy worker that has more of its tokens cached
          (``Placement.wait_for``)

        ``make_epoch`` returns a random id for each new dispatch. The caller must later confirm or
        cancel the reservation.
        """
        others = len(self._queue) > self._queue.num_parked or self._running.has_preempted
        if others or not self._handover.allows(self._key(waiting), now):
            return None
        choice = self._placement.choose(waiting)
        if choice is None or self._wait_for(waiting, choice, Waited(), now):
            return None
        waiting, epoch = self._bounds.predict(waiting), make_epoch()
        self._placement.reserve(choice.worker_id, epoch, waiting, now, choice.cached_tokens)
        self._count_offered(waiting)
        return Placed(waiting, choice.worker_id, epoch, (), choice.cached_tokens)

    def cancel_reservation(self, placed: Placed) -> None:
        """Cancel a reservation, because the ledger did not dispatch its request."""
        self._placement.cancel(placed.worker_id, placed.epoch)
        self._count_offered(placed.waiting, -1)

    def confirm_reservation(self, placed: Placed, gateway: str, now: float) -> None:
        """Confirm a reservation, because the ledger has dispatched its request."""
        waiting, cached_tokens = placed.waiting, placed.cached_tokens
        self._queue.note_direct_dispatch(waiting, cached_tokens)
        self._attained_service.charge_prompt(waiting, cached_tokens, now)
        self.on_dispatched(placed, gateway)

    def on_dispatched(self, placed: Placed, gateway: str) -> None:
        """Record that the ledger accepted the dispatch; ``gateway`` is the request's router."""
        waiting, worker_id, epoch = placed.waiting, placed.worker_id, placed.epoch
        self._running.add(Running.dispatched(waiting, gateway, worker_id, epoch))

    def moves(self, now: float, ledger_now: float) -> list[Move]:
        """Return moves of preempted requests to workers at which they resume sooner.

        Reserves capacity for the requests at these workers. O(preempted requests x workers).
        """
        is_fair = self._is_fair and self._handover.is_complete(now)
        head = self._queue.peek_highest(ledger_now) if is_fair else self._queue.peek()
        candidates = self._move_policy.candidates(
            self._running.preempted(), head, self._fair_key if is_fair else self._key
        )
        moves: list[Move] = []
        workers = self._placement.workers
        reserved = self._output_reservations.blocks(workers, now)
        for running, needed in candidates:
            if not self._handover.allows(self._key(running), now):
                break
            if running.request_id in self._spared:
                continue
            move = self._move_policy.choose(running, needed, workers, reserved)
            if move is not None:
                self._reserve_for_move(move, now)
                moves.append(move)
                reserved = self._output_reservations.blocks(workers, now)
        return moves

    @property
    def _is_fair(self) -> bool:
        return self._fair_share_enabled and self._fair_share is not None

    def _key(self, ordered: Ordered) -> Key:
        return key_of(self._order, ordered)

    def _fair_key(self, ordered: Ordered) -> Key:
        assert self._fair_share is not None
        return (
            -ordered.priority,
            self._fair_share.counter_of(ordered),
            *self._order.place(ordered),
        )

    def _reserve_for_move(self, move: Move, now: float) -> None:
        running = move.running
        self._output_reservations.add(
            running, move.worker_id, round((MOVE_HEADROOM - 1) * running.known_tokens), now
        )
        self._placement.reserve_for_move(
            move.worker_id, running.request_id, running.known_tokens, running.choices, now
        )
        self._spared[running.request_id] = now + _SPARED_S

    def prune(self, now: float) -> None:
        """Drop expired exemptions from eviction and moves, old victims and outdated reservations.

        The call also reports a completed handover to ``FairShare.handover_ended``.
        """
        self._spared = {r: until for r, until in self._spared.items() if until > now}
        self._evictions.prune(now)
        self._output_reservations.prune(self._placement.workers, now)
        if self._fair_share is not None and self._handover.is_complete(now):
            self._fair_share.handover_ended()
