"""Simulation of a workload on a cluster in virtual time. Pure.

arrivals --> Gateway --waiting--> GlobalQueue --placed--> Gateway --start--> SimulatedWorker
                ^                     ^                                           |
                +---------------------+------------------frame--------------------+
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from cluster.autoscale.policy import Autoscaler
from cluster.simulator.fleet import Fleet
from cluster.simulator.forecast import Forecast, Sample
from cluster.simulator.frame import Frame
from cluster.simulator.gateway import Gateway
from cluster.simulator.global_queue import GlobalQueue
from cluster.simulator.length_predictor import LengthPredictor
from cluster.simulator.scenario import Scenario
from cluster.simulator.summary import Record
from cluster.simulator.timeline import Timeline
from cluster.simulator.worker import SimulatedWorker
from cluster.simulator.workloads.arrivals import Arrival
from router.admission.handover import TICK_S

#: Request that a client sends after the end of another one, given the latter's record; None if it
#: sends none.
FollowUp: TypeAlias = Callable[[Record], Arrival | None]


def _no_follow_up(record: Record) -> None:
    return None


def simulate(
    arrivals: Iterable[Arrival],
    scenario: Scenario,
    *,
    one_by_one: bool = False,
    dispatcher: GlobalQueue | None = None,
    follow_up: FollowUp = _no_follow_up,
) -> Forecast:
    """Simulate ``arrivals``, sorted by time, until all requests have ended; return the forecast.

    With ``one_by_one`` every step of every engine is scheduled separately, which changes only how
    long the simulation takes and the forecast's ``num_jumped``. ``dispatcher`` is used instead of
    the product's queue. ``follow_up`` adds arrivals that depend on the end of an earlier request (a
    closed loop); they must not be before that end. Raises ValueError if the arrivals are not sorted
    by time, or if both a dispatcher and an autoscaler are set, because the autoscaler needs the
    product's queue.
    """
    simulation = _Simulation(scenario, one_by_one, dispatcher, follow_up)
    simulation.run(iter(arrivals))
    return simulation.forecast()


class _Simulation:
    def __init__(
        self,
        scenario: Scenario,
        one_by_one: bool,
        dispatcher: GlobalQueue | None,
        follow_up: FollowUp,
    ) -> None:
        self._scenario = scenario
        self._timeline = Timeline()
        self._fleet = Fleet(scenario, self, self._timeline, one_by_one)
        self._dispatcher, self._scaler = self._parts(dispatcher)
        self._gateway = Gateway(
            scenario.router,
            self._dispatcher,
            self._fleet,
            self._timeline,
            LengthPredictor(scenario.foresight_sigma, scenario.seed),
            self._on_end,
        )
        self._follow_up = follow_up
        #: follow-ups that have not arrived yet
        self._num_coming = 0
        self._loads: dict[str, Frame] = {}
        self._samples: list[Sample] = []
        self._has_more = True

    def _parts(self, dispatcher: GlobalQueue | None) -> tuple[GlobalQueue, _Scaler | None]:
        scenario = self._scenario
        if dispatcher is not None:
            if scenario.autoscale.is_on:
                raise ValueError("autoscale needs Everlift's own queue: do not set a dispatcher")
            return dispatcher, None
        queue = GlobalQueue(scenario.router, self._fleet.occupants, scenario.weights)
        return queue, _Scaler(scenario, queue, self._fleet) if scenario.autoscale.is_on else None

    def run(self, arrivals: Iterator[Arrival]) -> None:
        for spec in self._scenario.workers:
            self._fleet.add_worker(spec)
        for event in self._scenario.events:
            self._timeline.at(event.at, self._fleet.apply_event, event)
        self._schedule_next(arrivals)
        self._tick()
        self._sample(0)
        while self._has_more or self._num_coming or not self._gateway.is_idle:
            self._timeline.step()

    def forecast(self) -> Forecast:
        return Forecast(
            records=tuple(self._gateway.records),
            samples=tuple(self._samples),
            num_steps=self._fleet.num_steps,
            num_jumped=self._fleet.num_jumped,
            worker_s=self._fleet.worker_s,
        )

    # events

    def _schedule_next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            self._has_more = False
        elif arrival.at < self._timeline.now:
            raise ValueError(
                f"arrivals must be sorted by time: one at {arrival.at:g} s follows a later one"
            )
        else:
            self._timeline.at(arrival.at, self._arrive, arrival, arrivals)

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        self._gateway.arrive(arrival)
        self._gateway.decide()
        self._schedule_next(arrivals)

    def _on_end(self, record: Record) -> None:
        if (arrival := self._follow_up(record)) is not None:
            self._num_coming += 1
            self._timeline.at(arrival.at, self._arrive_after, arrival)

    def _arrive_after(self, arrival: Arrival) -> None:
        self._num_coming -= 1
        self._gateway.arrive(arrival)
        self._gateway.decide()

    def worker_up(self, worker: SimulatedWorker) -> None:
        self._dispatcher.worker_up(worker.worker_id, worker.capacity)
        self._gateway.worker_up()

    def worker_lost(self, worker_id: str, occupants: Collection[str]) -> None:
        self._loads.pop(worker_id, None)
        self._dispatcher.worker_lost(worker_id)
        self._gateway.worker_lost(worker_id, occupants)
        if not len(self._fleet):
            self._gateway.last_worker_lost()
        self._gateway.decide()

    def on_message(self, frame: Frame) -> None:
        self._loads[frame.worker_id] = frame
        self._gateway.on_message(frame)
        self._dispatcher.on_message(frame, self._timeline.now)
        load = frame.load
        if load.draining and not load.num_running and not load.num_waiting:
            self._fleet.on_drained(frame.worker_id)
        if self._dispatcher.has_work:
            self._gateway.decide()

    def _tick(self) -> None:
        now = self._timeline.now
        self._gateway.report_served()
        self._dispatcher.tick(now)
        if self._scaler is not None:
            self._scaler.adjust(now)
        self._gateway.decide()
        self._timeline.after(TICK_S, self._tick)

    def _sample(self, number: int) -> None:
        available = self._fleet.available
        names = (worker.worker_id for worker in available)
        loads = [self._loads[name].load for name in names if name in self._loads]
        self._samples.append(
            Sample(
                at=self._timeline.now,
                queued=self._dispatcher.queued,
                running=sum(load.num_running for load in loads),
                waiting=sum(load.num_waiting for load in loads),
                workers=len(available),
                slots=sum(worker.limits.max_num_seqs for worker in available),
                blocks_used=sum(load.blocks_used for load in loads),
                blocks=sum(worker.limits.num_blocks for worker in available),
            )
        )
        later = (number + 1) * self._scenario.sample_s
        self._timeline.at(later, self._sample, number + 1)


class _Scaler:
    def __init__(self, scenario: Scenario, queue: GlobalQueue, fleet: Fleet) -> None:
        # Slowness belongs to the first worker's machine; added workers have the normal speed.
        self._spec = replace(scenario.workers[0], slowness=1.0)
        self._start_s = scenario.start_s
        self._queue = queue
        self._fleet = fleet
        self._policy = Autoscaler(scenario.autoscale)

    def adjust(self, now: float) -> None:
        available = self._fleet.available
        workers = len(available) + self._fleet.num_starting
        target = self._policy.decide(self._queue.load(now), 0.0, workers, now).workers
        for _ in range(target - workers):
            self._fleet.start_worker(self._spec, self._start_s)
        for worker in available[len(available) - max(0, workers - target) :]:
            worker.drain()
