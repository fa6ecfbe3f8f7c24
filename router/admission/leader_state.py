"""State of the leader during one term. Pure.

The state is empty at the election. The live routers, which are called gateways in this role, then
report their requests (the handover). Each model has a queue and workers of its own, so that no
request waits for another model's workers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

from everlift.v1 import session_pb2
from router.admission.fair_share import FairShare
from router.admission.handover import Generations, QueueHandover
from router.admission.load_shedding import Refusal
from router.admission.model_queue import MessageEffects, ModelQueue, Placed
from router.admission.placements import Placements
from router.admission.policy import Rules, key_of
from router.admission.preemption import Move
from router.admission.request import Running, Waiting
from router.config import RouterConfig

#: Message of a gateway's report that names a model.
_Report = TypeVar("_Report", session_pb2.ServedTokens, session_pb2.SessionOutput)


class LeaderState:
    """State of the leader; ``now`` is the router's clock, ``ledger_now`` the ledger's, in seconds.

    ``occupants`` returns the ids of the requests that have a slot at a worker. ``generation`` names
    the present run of the ledger's servers. ``fair_share`` creates the fair shares of a model's
    queue; it is None if tenants are not distinguished. ``gateway`` is the id of a router.
    """

    def __init__(
        self,
        config: RouterConfig,
        rules: Rules,
        placements: Placements,
        occupants: Callable[[str], Collection[str]],
        generation: str,
        now: float,
        fair_share: Callable[[], FairShare] | None = None,
    ) -> None:
        self._config = config
        self._rules = rules
        self._placements = placements
        self._occupants = occupants
        self._fair_share = fair_share
        self._queues: dict[str, ModelQueue] = {}
        #: index of the queue that is served first; the next one takes its place at each call
        self._turn = 0
        # After two heartbeats every gateway has asked twice which router leads.
        self.handover = QueueHandover(now, timeout_s=2 * config.heartbeat)
        self.generations = Generations(generation, now, timeout_s=config.lease)
        #: whether the previous leader's tenant counters are restored, or there are none
        self.has_restored_counters = fair_share is None

    def queue(self, model: str) -> ModelQueue:
        """Return the queue of a model, which is created at the first call."""
        if (queue := self._queues.get(model)) is None:
            fair_share = None if self._fair_share is None else self._fair_share()
            queue = self._queues[model] = ModelQueue(
                self._config,
                self._rules,
                self._placements[model],
                self._occupants,
                self.handover,
                fair_share,
            )
        return queue

    @property
    def queued(self) -> int:
        return sum(queue.queued for queue in self._queues.values())

    @property
    def running(self) -> int:
        return sum(queue.running for queue in self._queues.values())

    @property
    def has_work(self) -> bool:
        """Return whether any request is queued, or waits at its worker after a preemption."""
        return any(queue.has_work for queue in self._queues.values())

    def apply_rules(self, rules: Rules, now: float) -> Iterator[None]:
        """Apply changed rules to all models' queues; each iteration of the result is one step.

        ``ModelQueue.apply_rules`` describes the steps.
        """
        self._rules = rules
        for queue in [*self._queues.values()]:
            yield from queue.apply_rules(rules, now)

    # service of tenants

    def restore_counters(self, last: session_pb2.ClusterLoad) -> None:
        """Restore the tenants' token counters from the previous leader's report.

        Only the first call has an effect.
        """
        if not self.has_restored_counters:
            self.has_restored_counters = True
            for model, load in last.models.items():
                # The queue is created now, so that the next report has its counters, too.
                self.queue(model).restore_counters(load.services)

    # gateways

    def connect(self, gateway: str, now: float) -> None:
        self.handover.connect(gateway, now)
        self.generations.connect(gateway, now)

    def disconnect(self, gateway: str) -> None:
        self.handover.disconnect(gateway)
        self.generations.disconnect(gateway)
        for queue in self._queues.values():
            queue.disconnect(gateway)

    def on_message(
        self, gateway: str, message: session_pb2.GatewayMessage, now: float
    ) -> MessageEffects:
        effects = MessageEffects([], [], [])
        order = self._rules.order
        if message.order not in ("", order.place_name):
            # The gateway reports in another order, so that its unreported requests may precede
            # reported ones. Waiting for its marker is therefore useless.
            self.handover.complete(gateway)
        for reported in message.enqueue:
            waiting = Waiting.from_proto(gateway, reported)
            self.handover.on_waiting(gateway, key_of(order, waiting), now)
            self.queue(waiting.model).enqueue(waiting, reported.accepted, now, effects)
        for request_id in message.withdraw:
            for queue in self._queues.values():
                queue.withdraw(gateway, request_id, now, effects)
        for running in message.running:
            self.queue(running.model).add_running(Running.from_proto(gateway, running))
        if message.is_complete:
            self.handover.complete(gateway)
        if message.generation:
            self.generations.note_resync(gateway, message.generation, now)
        self._count(gateway, message, now)
        return effects

    def _count(self, gateway: str, message: session_pb2.GatewayMessage, now: float) -> None:
        for model, served in _by_model(message.served).items():
            self.queue(model).charge_served(served)
        for model, outputs in _by_model(message.session_outputs).items():
            self.queue(model).charge_sessions(outputs, now)
        for ratio in message.tpot_ratios:
            self.queue(ratio.model).note_tpot_ratio(ratio.ratio)
        for start in message.starts:
            self.queue(start.model).starts.update([start], now)
        for demand in message.demands:
            self.queue(demand.model).demands.update(gateway, demand)

    # overload

    def update_estimates(self, now: float) -> None:
        """Update the estimates of waits; to be called five times a second. O(workers)."""
        for model in self._placements.models:
            self.queue(model).update_estimates(now)

    def expire(self, ledger_now: float) -> list[Refusal]:
        """Remove queued requests that have waited for too long, and return their refusals."""
        return [it for queue in self._queues.values() for it in queue.expire(ledger_now)]

    def queue_estimates(self) -> list[session_pb2.QueueEstimate]:
        """Return the estimated waits by class of each model's queue."""
        estimates = []
        for model, queue in self._queues.items():
            estimate = queue.queue_estimate()
            estimate.model, estimate.queued = model, queue.queued
            estimates.append(estimate)
        return estimates

    def load(self, term: int, now: float, ledger_now: float) -> session_pb2.ClusterLoad:
        """Return the load of the cluster in the leader's ``term``, in total and by model."""
        loads = {model: it.load(now, ledger_now) for model, it in self._queues.items()}
        for model, placement in self._placements.items():
            for worker in placement.workers.values():
                first = worker.capacity.first_model or model
                before, after = loads.get(first), loads.get(model)
                if first == model or before is None or after is None:
                    continue
                if before.HasField("wanted_workers") and after.HasField("wanted_workers"):
                    # An operator has changed the worker's model, so it is wanted where it is now.
                    before.wanted_workers = max(0, before.wanted_workers - 1)
                    after.wanted_workers += 1
        return total_load(term, loads)

    @property
    def is_scaled(self) -> bool:
        """Return whether an autoscaler sets the number of any model's workers."""
        return any(queue.demands.is_scaled for queue in self._queues.values())

    def scale(self, scaling: session_pb2.Scaling, reported_at: float) -> None:
        """Record the wanted number of a model's workers, which an autoscaler reported.

        ``reported_at`` is the time of the report, in seconds of the router's clock.
        """
        self.queue(scaling.model).demands.scale(scaling, reported_at)

    # decisions

    def note_workers(self, now: float) -> None:
        """Record which models have a connected worker, for the statistics of waits."""
        for model in self._placements.models:
            self.queue(model).note_workers(now)

    def place(
        self, now: float, ledger_now: float, limit: int, make_epoch: Callable[[], int]
    ) -> list[Placed]:
        """Remove up to ``limit`` requests from the queues, and return their dispatches to workers.

        The models are served in turn, so that none of them uses the whole limit each time.
        """
        placed: list[Placed] = []
        for queue in self._in_turn():
            placed += queue.place(now, ledger_now, limit - len(placed), make_epoch)
        return placed

    def _in_turn(self) -> list[ModelQueue]:
        queues = [*self._queues.values()]
        if len(queues) > 1:
            self._turn = (self._turn + 1) % len(queues)
        return queues[self._turn :] + queues[: self._turn]

    @property
    def next_expiry(self) -> float | None:
        """Time at which the next wait for a cached prefix or an adapter ends; None without any.

        The time is in seconds of the router's clock, and may be too early, but not too late.
        ``place`` must be called at this time.
        """
        times = (queue.next_expiry for queue in self._queues.values())
        return min((time for time in times if time is not None), default=None)

    def reserve(self, waiting: Waiting, now: float, make_epoch: Callable[[], int]) -> Placed | None:
        """Reserve a worker for a new request (``ModelQueue.reserve``)."""
        return self.queue(waiting.model).reserve(waiting, now, make_epoch)

    def cancel_reservation(self, placed: Placed) -> None:
        """Cancel a reservation, because the ledger did not dispatch its request."""
        self._queues[placed.waiting.model].cancel_reservation(placed)

    def confirm_reservation(self, placed: Placed, gateway: str, now: float) -> None:
        """Confirm a reservation, because the ledger has dispatched its request."""
        self._queues[placed.waiting.model].confirm_reservation(placed, gateway, now)

    def on_dispatched(self, placed: Placed, gateway: str) -> None:
        """Record that the ledger accepted the dispatch; ``gateway`` is the request's router."""
        self._queues[placed.waiting.model].on_dispatched(placed, gateway)

    def moves(self, now: float, ledger_now: float) -> list[Move]:
        """Return moves of preempted requests to workers at which they resume sooner."""
        return [it for queue in self._queues.values() for it in queue.moves(now, ledger_now)]

    def prune(self, now: float) -> None:
        """Drop outdated records of each model's queue, and apply the end of the handover.

        ``ModelQueue.prune`` has the details.
        """
        for queue in self._queues.values():
            queue.prune(now)


def _by_model(reports: Iterable[_Report]) -> Mapping[str, list[_Report]]:
    by_model: dict[str, list[_Report]] = defaultdict(list)
    for report in reports:
        by_model[report.model].append(report)
    return by_model


#: Fields of a load report whose total over the models is their sum, and their largest value.
_SUMS = (
    *("workers", "queued", "queued_tokens", "batch_tokens", "running", "slots", "blocks_used"),
    *("blocks_total", "offered_tokens", "starting_workers", "unplaced_workers"),
)
_LARGEST = ("waited_s", "service_gap", "starting_s")


def total_load(term: int, models: Mapping[str, session_pb2.ClusterLoad]) -> session_pb2.ClusterLoad:
    """Return the load of all models together, with the load of each model.

    The total has no tenants' token counters, because each model has counters of its own.
    """
    total, loads = session_pb2.ClusterLoad(term=term, models=models), [*models.values()]
    for name in _SUMS:
        setattr(total, name, sum(getattr(load, name) for load in loads))
    for name in _LARGEST:
        setattr(total, name, max((getattr(load, name) for load in loads), default=0.0))
    measured = [load for load in loads if load.worker_rate]
    if num_measured := sum(load.workers for load in measured):
        rate = sum(load.workers * load.worker_rate for load in measured)
        total.worker_rate = rate / num_measured
    if loads and all(load.HasField("wait_s") for load in loads):
        total.wait_s = max(load.wait_s for load in loads)
    if wanted := [load.wanted_workers for load in loads if load.HasField("wanted_workers")]:
        total.wanted_workers = sum(wanted)
    total.unplaced_cause = next((it.unplaced_cause for it in loads if it.unplaced_workers), "")
    total.ray_clusters.update(_summed(load.ray_clusters for load in loads))
    classes = chain.from_iterable(load.class_queues for load in loads)
    by_class = _summed({it.priority: it.queued} for it in classes)
    total.class_queues.extend(
        session_pb2.ClassQueue(priority=priority, queued=by_class[priority])
        for priority in sorted(by_class, reverse=True)
    )
    tenants = chain.from_iterable(load.tenant_queues for load in loads)
    by_tenant = _summed({(it.tenant, it.priority): it.queued} for it in tenants)
    total.tenant_queues.extend(
        session_pb2.TenantQueue(tenant=tenant, priority=priority, queued=queued)
        for (tenant, priority), queued in sorted(
            by_tenant.items(), key=lambda item: (-item[1], item[0])
        )
    )
    return total


_Key = TypeVar("_Key")


def _summed(counts: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    total: Counter[_Key] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
