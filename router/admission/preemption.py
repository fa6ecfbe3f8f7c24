"""Eviction of running requests of lower classes, and moves of preempted requests. Pure.

The head is the next request of the queue. If no worker has free capacity for the head, and it would
miss a deadline by waiting, it is dispatched to a worker that evicts running requests for it. The
worker is chosen where the evicted requests have the fewest tokens to recompute. They are queued
again and keep their arrival times, queue keys and output. Workers assign blocks and slots by
priority class, so that no waiting sequence of a lower class precedes the head there.

A request that its worker has preempted is moved to another worker if it can resume sooner there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from router.admission.handover import TICK_S
from router.admission.request import Key, Ordered, Running, RunningTable, Waiting
from router.admission.workers import WorkerView, blocks_for, blocks_of, has_alternative

#: A request evicts others at least ``_MARGIN_S`` seconds before its latest start, or a tick and
#: ``_STEPS`` steps of the worker before, if that is longer: the leader decides once per tick, and
#: the worker's current step and the removal of the victims take some steps.
_MARGIN_S = 0.5
_STEPS = 3
#: Maximum number of victims of one eviction.
_MAX_VICTIMS = 8
#: An evicted request that has not left its worker after this many seconds no longer counts as
#: leaving: the eviction may have been lost.
_LEAVING_S = 2.0


@dataclass(frozen=True, slots=True)
class Eviction:
    """Decision to dispatch a request to a worker and to evict ``victims``, running requests, there.

    ``victims`` is empty if the worker has enough free capacity, but waiting sequences of lower
    classes or their pending prefill prevented a normal dispatch.
    """

    worker_id: str
    victims: tuple[Running, ...]


def _slack(waiting: Waiting, workers: Mapping[str, WorkerView], ledger_now: float) -> float:
    """Return the seconds until the last moment at which a dispatch still meets all deadlines.

    Deadlines that have passed are ignored. The result is infinite if there is no other deadline,
    and negative if it is too late to meet one of the others.
    """
    if not any(ledger_now < due < inf for due in (waiting.ttft_deadline, waiting.deadline)):
        return inf
    tokens = waiting.prefill_tokens
    prefill_s = min((it.prefill_s(tokens) or 0.0 for it in workers.values()), default=0.0)
    step_s = min(
        (it.throughput.step_s for it in workers.values() if it.throughput.step_s), default=0.0
    )
    decode_s = step_s * waiting.max_tokens / max(1, waiting.choices)
    latest_starts = [
        due - prefill_s - rest
        for due, rest in ((waiting.ttft_deadline, 0.0), (waiting.deadline, decode_s))
        if due > ledger_now
    ]
    return min(latest_starts, default=inf) - ledger_now


def _margin(worker: WorkerView, tokens_ahead: int) -> float:
    """Return the time by which a dispatch with evictions must precede a request's latest start.

    The time, in seconds, allows for the delay of the evictions, and for the prefill of
    ``tokens_ahead`` tokens of other requests that the worker computes first.
    """
    ahead_s = worker.prefill_s(tokens_ahead) or 0.0
    return max(_MARGIN_S, TICK_S + _STEPS * worker.throughput.step_s) + ahead_s


def _wait_s(waiting: Waiting, workers: Mapping[str, WorkerView]) -> float:
    waits = [
        max(0, blocks_of(waiting) + 1 - worker.free_blocks) / rate
        for worker in workers.values()
        if worker.is_open and (rate := worker.throughput.free_rate) is not None and rate > 0
    ]
    return min(waits, default=0.0)


class Evictions:
    """Eviction policy; ``occupants`` returns the ids of the requests in the slots of a worker.

    The ids are those of the worker's last report, one for each sequence. The worker reports its
    load more often than its slots.

    A worker is chosen only if the dispatched request can start there soon. The worker must have no
    tokens to prefill before the request, or at most ``max_pending_prefill`` including the request's
    own. Only tokens of the request's priority class and higher ones count, because the
    worker computes them first.
    """

    def __init__(
        self,
        running: RunningTable,
        occupants: Callable[[str], Collection[str]],
        max_pending_prefill: int,
    ) -> None:
        self._running = running
        self._occupants = occupants
        self._max_pending_prefill = max_pending_prefill
        #: by worker: evicted requests that may still have their slots, with the times of eviction
        self._evicted: dict[str, list[tuple[float, Running]]] = {}

    def choose(
        self,
        waiting: Waiting,
        workers: Mapping[str, WorkerView],
        spared: Collection[str],
        ledger_now: float,
    ) -> Eviction | None:
        """Return the eviction by which a request meets a deadline that it would miss by waiting.

        Return None if it can still wait, has no deadline that is yet to come, or if no eviction
        helps. Until a deadline has passed, an eviction is returned even if the deadline can no
        longer be met. Requests whose ids are in ``spared`` are not evicted.
        """
        if (slack := _slack(waiting, workers, ledger_now)) == inf:
            return None
        wait = _wait_s(waiting, workers)
        most = max((_margin(it, it.pending_prefill) for it in workers.values()), default=0.0)
        if slack > max(wait, most):
            return None
        eviction = self._cheapest(waiting, workers, spared)
        if eviction is None:
            return None
        worker = workers[eviction.worker_id]
        margin = _margin(worker, self._prefill_ahead(waiting, eviction.worker_id, worker))
        return eviction if slack <= max(wait, margin) else None

    def record(self, eviction: Eviction, now: float) -> None:
        """Count the resources of an eviction's victims as free from now on, until they have left.

        ``now`` is in seconds. The victims must be spared for at least _LEAVING_S seconds.
        """
        evicted = self._evicted.setdefault(eviction.worker_id, [])
        evicted += ((now, victim) for victim in eviction.victims)

    def prune(self, now: float) -> None:
        """Drop the victims of evictions that were recorded more than _LEAVING_S seconds ago."""
        self._evicted = {
            worker_id: recent
            for worker_id, evicted in self._evicted.items()
            if (recent := [it for it in evicted if now - it[0] <= _LEAVING_S])
        }

    def _prefill_ahead(self, waiting: Waiting, worker_id: str, worker: WorkerView) -> int:
        """Return an upper bound on the tokens that the worker prefills before the request."""
        others = self._running.from_class(waiting.priority, worker_id)
        return min(worker.pending_prefill, sum(other.known_tokens for other in others))

    def _cheapest(
        self, waiting: Waiting, workers: Mapping[str, WorkerView], spared: Collection[str]
    ) -> Eviction | None:
        """Return the eviction after which the fewest tokens must be computed again.

        If several are equal, the one at the worker with the least pending prefill is returned.
        Workers that are slow or that try a suspect request are ignored, and so is the worker that
        the request avoids, unless no other one is open and serves its adapter. Return None if no
        eviction frees enough capacity, or if none helps soon enough.
        """
        is_avoiding = has_alternative(waiting.avoid, waiting.adapter, workers)
        found = [
            (sum(victim.known_tokens for victim in victims), worker.pending_prefill, it, victims)
            for it, worker in workers.items()
            if worker.is_open and not worker.is_slow and not worker.trial
            if worker.capacity.serves(waiting.adapter)
            if it != waiting.avoid or not is_avoiding
            if (victims := self._victims(waiting, it, worker, spared)) is not None
        ]
        found.sort(key=lambda it: it[:3])
        cheapest = (
            Eviction(worker_id, victims)
            for *_, worker_id, victims in found
            if self._starts_soon(waiting, worker_id, workers[worker_id])
        )
        return next(cheapest, None)

    def _starts_soon(self, waiting: Waiting, worker_id: str, worker: WorkerView) -> bool:
        """Return whether little enough prefill is pending at the worker to dispatch the request.

        True if no tokens are to be prefilled before the request, or if these and the request's own
        are together at most ``max_pending_prefill``. Only tokens of requests of its class and of
        higher classes count.
        """
        tokens_ahead = self._prefill_ahead(waiting, worker_id, worker)
        return (
            not tokens_ahead or tokens_ahead + waiting.prefill_tokens <= self._max_pending_prefill
        )

    def _victims(
        self, waiting: Waiting, worker_id: str, worker: WorkerView, spared: Collection[str]
    ) -> tuple[Running, ...] | None:
        slots = self._occupants(worker_id)
        occupants = frozenset(slots)
        free = self._free_after(waiting, worker_id, worker, occupants, len(slots))
        victims: list[Running] = []
        lower = self._running.below(waiting.priority, worker_id)
        while not free.suffices:
            victim = next(lower, None)
            if victim is None or len(victims) == _MAX_VICTIMS:
                return None
            if victim.request_id in occupants and victim.request_id not in spared:
                victims.append(victim)
                free += _resources_of(victim)
        return tuple(victims)

    def _free_after(
        self,
        waiting: Waiting,
        worker_id: str,
        worker: WorkerView,
        occupants: Collection[str],
        num_sequences: int,
    ) -> _Resources:
        """Return the resources that are free once the request and all ahead of it have theirs.

        The resources of evicted requests count as free. Negative numbers are missing resources.
        The worker last reported ``num_sequences`` sequences in its slots, of the requests
        ``occupants``.
        """
        free = _free_resources(worker) - _Resources(waiting.choices, blocks_of(waiting) + 1)
        num_waiting, num_started = worker.load.num_waiting, 0
        for other in self._running.from_class(waiting.priority, worker_id):
            # ``_free_resources`` has subtracted unacknowledged dispatches.
            if other.request_id in occupants or other.epoch in worker.unacknowledged:
                continue
            if num_waiting > 0:
                num_waiting -= other.choices
                free -= _resources_of(other)
            else:
                # No more sequences wait, so these have got slots since the report of the slots.
                num_started += other.choices
        num_left = num_sequences + num_started - worker.load.num_running
        return free + self._leaving(worker_id, occupants, num_left)

    def _leaving(self, worker_id: str, occupants: Collection[str], num_left: int) -> _Resources:
        """Return the resources that evicted requests of a worker still have and will release.

        ``num_left`` sequences have left the worker since it reported ``occupants``. Victims are
        assumed to be the first of these.
        """
        leaving = _NOTHING
        for _, victim in self._evicted.get(worker_id, ()):
            latest = self._running.get(victim.request_id)
            has_returned = latest is not None and latest.epoch != victim.epoch
            if victim.request_id not in occupants or has_returned:
                continue
            if num_left > 0:
                num_left -= victim.choices
            else:
                leaving += _resources_of(victim)
        return leaving


@dataclass(frozen=True, slots=True)
class _Resources:
    slots: int
    blocks: int

    @property
    def suffices(self) -> bool:
        return self.slots >= 0 and self.blocks >= 0

    def __add__(self, other: _Resources) -> _Resources:
        return _Resources(self.slots + other.slots, self.blocks + other.blocks)

    def __sub__(self, other: _Resources) -> _Resources:
        return _Resources(self.slots - other.slots, self.blocks - other.blocks)


_NOTHING = _Resources(0, 0)


def _free_resources(worker: WorkerView) -> _Resources:
    slots = worker.slots - worker.load.num_running
    coming = worker.unacknowledged
    tokens = coming.tokens + coming.cached_tokens + worker.load.waiting_cached_tokens
    return _Resources(slots - coming.choices, worker.unused_blocks - blocks_for(tokens))


def _resources_of(running: Running) -> _Resources:
    return _Resources(running.choices, blocks_for(running.known_tokens))


#: Blocks that are reserved for the output of a moved request are released if the request has not
#: reached its worker after this many seconds.
_IN_TRANSIT_S = 2.0


@dataclass(frozen=True, slots=True)
class _OutputReservation:
    worker_id: str
    tokens: int
    choices: int
    since: float


class OutputReservations:
    """KV blocks that are reserved for the future output of requests that were moved.

    Such a reservation shrinks with the time since the decision to move the request, by one token
    per choice for each step time of the new worker. ``running`` is the table of requests at
    workers, which shows whether a moved request is at its new worker. ``now`` is in seconds.
    """

    def __init__(self, running: RunningTable) -> None:
        self._running = running
        #: reservations by request id
        self._reservations: dict[str, _OutputReservation] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    def add(self, running: Running, worker_id: str, tokens: int, now: float) -> None:
        """Reserve blocks for ``tokens`` more tokens of a moved request.

        The reservation replaces an earlier one of the same request.
        """
        self._reservations[running.request_id] = _OutputReservation(
            worker_id, tokens, running.choices, now
        )

    def blocks(self, workers: Mapping[str, WorkerView], now: float) -> Mapping[str, int]:
        """Return the number of blocks that are still reserved, by worker id. O(reservations)."""
        blocks: Counter[str] = Counter()
        for reservation in self._reservations.values():
            blocks[reservation.worker_id] += blocks_for(
                _remaining_tokens(reservation, workers, now)
            )
        return blocks

    def prune(self, workers: Mapping[str, WorkerView], now: float) -> None:
        """Drop reservations that are used up, or whose worker is lost or does not have the request.

        A request has _IN_TRANSIT_S seconds from the reservation on to reach the worker.
        """
        self._reservations = {
            request_id: reservation
            for request_id, reservation in self._reservations.items()
            if self._is_valid(request_id, reservation, now)
            and _remaining_tokens(reservation, workers, now) > 0
        }

    def _is_valid(self, request_id: str, reservation: _OutputReservation, now: float) -> bool:
        running = self._running.get(request_id)
        is_there = running is not None and running.worker_id == reservation.worker_id
        return is_there or now - reservation.since < _IN_TRANSIT_S


def _remaining_tokens(
    reservation: _OutputReservation, workers: Mapping[str, WorkerView], now: float
) -> int:
    worker = workers.get(reservation.worker_id)
    if worker is None:
        return 0
    step_s = worker.throughput.step_s
    steps = (now - reservation.since) / step_s if step_s else 0.0
    return max(0, round(reservation.tokens - reservation.choices * steps))


#: A request moves only to a worker with this many times its blocks free. If both workers are
#: overfull (benchmarks/preemption.py), the 99th percentile of the normalised latency is 0.80 of
#: that without moves, and 0.96 of it with a factor of 3.
MOVE_HEADROOM = 4
#: Assumed prefill rate of a worker in tokens per second, if no rate has been measured.
_UNKNOWN_RATE = 1000.0


@dataclass(frozen=True, slots=True)
class Move:
    """Decision to move a preempted request to ``worker_id``, a worker with capacity for it."""

    running: Running
    worker_id: str


class MovePolicy:
    """Policy that moves preempted requests to other workers.

    ``reserve`` is the share of the new worker's KV blocks that must stay free.
    """

    def __init__(self, reserve: float) -> None:
        self._reserve = reserve

    def candidates(
        self, preempted: Iterable[Running], head: Waiting | None, key: Callable[[Ordered], Key]
    ) -> Iterator[tuple[Running, int]]:
        """Yield each preempted request that may be moved, and a number of KV blocks.

        The request can resume at its present worker once this many blocks are free there. The
        number includes the blocks of the requests that resume there first. Requests are sorted by
        ``key``, the smallest first. Requests after ``head``, the next queued request, are not
        yielded.
        """
        needed: dict[str, int] = {}
        for running in sorted(preempted, key=key):
            if head is not None and key(running) > key(head):
                return
            blocks = needed[running.worker_id] = needed.get(running.worker_id, 0) + _blocks(running)
            if running.moves_left > 0:
                yield running, blocks

    def choose(
        self,
        running: Running,
        needed: int,
        workers: Mapping[str, WorkerView],
        reserved: Mapping[str, int],
    ) -> Move | None:
        """Return the move to the worker where the request resumes soonest.

        Return None if the request would resume no sooner at any other worker with capacity for it,
        or if its present worker is unknown. ``needed`` KV blocks must be free at the present worker
        before the request resumes there. ``reserved`` maps worker ids to the numbers of blocks that
        are reserved for the output of requests that were moved before.
        """
        home = workers.get(running.worker_id)
        if home is None:
            return None
        sooner = [
            (seconds, worker_id)
            for worker_id, worker in workers.items()
            if worker is not home
            and self._has_capacity(worker, running, reserved.get(worker_id, 0))
            if (seconds := _resume_s_after_move(running, worker, home))
            < _resume_s_at_home(needed, home)
        ]
        return Move(running, min(sooner)[1]) if sooner else None

    def _has_capacity(self, worker: WorkerView, running: Running, reserved: int) -> bool:
        """Return whether the worker can take a request that is to be moved.

        The worker must accept requests, serve the request's adapter, not be slow, and have a free
        slot for each choice. The free KV blocks, less ``reserved`` and the share that must stay
        free, must be at least MOVE_HEADROOM times those that the request needs now. The excess is
        for future output, to avoid a second preemption.
        """
        spare = worker.free_blocks - reserved - MOVE_HEADROOM * _blocks(running)
        return (
            worker.is_open
            and worker.capacity.serves(running.adapter)
            and not worker.is_slow
            and worker.free_slots >= running.choices
            and spare >= self._reserve * worker.capacity.num_blocks
        )


def _blocks(running: Running) -> int:
    return blocks_for(running.known_tokens + 1) + running.choices - 1


def _resume_s_at_home(needed: int, home: WorkerView) -> float:
    # A worker keeps at least one block free.
    rate, lacking = home.throughput.free_rate, needed + 1 - home.unused_blocks
    if lacking <= 0 or rate is None:
        return 0.0
    return lacking / rate if rate > 0 else inf


def _resume_s_after_move(running: Running, worker: WorkerView, home: WorkerView) -> float:
    tokens = worker.pending_prefill + running.known_tokens
    return worker.prefill_s(tokens) or home.prefill_s(tokens) or tokens / _UNKNOWN_RATE
