"""Simulation of overload: requests, gateways, a leader and engines in virtual time.

It uses the product's decisions and schedulers, and step times of a roofline, without transport and
ledger.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from zlib import crc32

from everlift.errors import EverliftError
from everlift.request_id import unnamed_request_id
from everlift.step_time import Roofline, StepSize
from everlift.v1 import session_pb2 as pb
from router.admission.handover import TICK_S
from router.admission.load_shedding import EarlyRejection, Refusal
from router.admission.throughput import measured_tpot_ratio
from router.admission.workers import Capacity, Load
from router.config import RouterConfig
from router.prediction.predictor import OutputLengths
from tests.support.router.admission_support import Cluster
from tests.support.worker.scheduler_bench import TOKEN, Bench
from tests.support.worker.worker_support import limits
from worker.engine.outcome import Outcome
from worker.engine.plan import Plan, RowResult

#: Some model and GPU: 20 ms per step, and 20,000 prompt tokens per second.
ROOFLINE = Roofline(overhead_s=0.002, weights_s=0.018, token_s=5e-5, kv_token_s=3e-7)
#: Clients' targets of TTFT and TPOT.
TTFT_S, TPOT_S = 1.0, 0.05
#: Results of a row that samples no token, and of one that samples one.
_RESULTS = (RowResult(), RowResult((TOKEN,)))
_NETWORK_S = 0.001


@dataclass(slots=True)
class Asked:
    """Request and its outcome; times are in seconds."""

    name: str
    arrived: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    ttft_target_s: float = TTFT_S
    #: of the whole output, after arrival
    deadline_s: float = inf
    #: output tokens that it has at least, as known on arrival
    least_tokens: int = 1
    #: as predicted when it was queued
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    first_token: float | None = None
    ended: float | None = None
    #: whether its deadline passed while it ran on a worker
    is_cut_off: bool = False
    refusals: list[tuple[float, EverliftError]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Return whether TTFT and TPOT meet their targets."""
        if self.ended is None or self.first_token is None:
            return False
        return self.first_token - self.arrived <= TTFT_S and self.tpot_s <= TPOT_S

    @property
    def tpot_s(self) -> float:
        assert self.ended is not None and self.first_token is not None
        return (self.ended - self.first_token) / max(1, self.output_tokens - 1)


class Clock:
    """Virtual clock that runs events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, moment: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(moment, self.now), next(self._numbers), event))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until


class VirtualEngine(Bench):
    """Scheduler with virtual step times; ``on_outcomes`` receives the outcomes of each step."""

    def __init__(self, clock: Clock, on_outcomes: Callable[[list[Outcome]], None]) -> None:
        super().__init__(
            limits(num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096)
        )
        self._clock = clock
        self._on_outcomes = on_outcomes
        self._is_stepping = False
        self._aborted: set[int] = set()
        self.busy_s = 0.0
        self._said = 0

    def commit(self, plan: Plan) -> list[Outcome]:
        """Commit a step without checking the integrity of the scheduler."""
        return self.scheduler.commit(plan, [_RESULTS[row.samples] for row in plan.rows])

    def begin(self, epoch: int, asked: Asked) -> None:
        salt = epoch.to_bytes(4, "big")
        self.add(epoch, asked.prompt_tokens, asked.output_tokens, salt=salt)
        self._step_on()

    def abort(self, epoch: int) -> None:
        self._aborted.add(epoch)
        self._step_on()

    def _step_on(self) -> None:
        if self._is_stepping:
            return
        for epoch in self._aborted:
            for each in self.scheduler.of_epoch(epoch):
                self.scheduler.remove(each)
        self._aborted.clear()
        if not len(self.scheduler):
            return
        plan = self.plan()
        rows = plan.rows
        seconds = ROOFLINE.seconds(
            StepSize(len(rows), rows.num_tokens, rows.kv_tokens, rows.num_pairs)
        )
        self._is_stepping = True
        self._clock.at(self._clock.now + seconds, lambda: self._stepped(plan, seconds))

    def _stepped(self, plan: Plan, seconds: float) -> None:
        self._is_stepping = False
        self.busy_s += seconds
        self._on_outcomes(self.commit(plan))
        self._step_on()

    def load(self) -> Load:
        self._said += 1
        load = self.scheduler.load()
        return Load.from_proto(
            pb.WorkerState(
                sequence_number=self._said,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                blocks_used=load.blocks_used,
                pending_prefill_tokens=load.pending_prefill_tokens,
                committed_tokens=load.committed_tokens,
                step=load.step,
                output_tokens=load.output_tokens,
                counters=load.counters.to_proto(),
                computed_tokens=load.computed_tokens,
                released_blocks=load.released_blocks,
                busy_s=self.busy_s,
                kv_tokens=load.kv_tokens,
                num_pairs=load.num_pairs,
            )
        )


class VirtualCluster:
    """Cluster in virtual time.

    With ``comes_back``, a refused request retries after its Retry-After. Its name selects one of
    the ``num_gateways`` gateways. Without ``has_names``, each try has a new name.
    """

    def __init__(
        self,
        config: RouterConfig,
        num_workers: int = 2,
        *,
        num_gateways: int = 1,
        comes_back: bool = False,
        has_names: bool = True,
    ) -> None:
        self.clock = Clock()
        self._comes_back, self._has_names = comes_back, has_names
        self._unnamed = count()
        self._leader = Cluster(config)
        self._leader.connect()
        self.leader_state = self._leader.leader_state
        self._early_rejections = [
            EarlyRejection(config, random.Random(n)) for n in range(num_gateways)
        ]
        self._lengths = OutputLengths()
        self._epochs = count(1)
        self._asked: dict[str, Asked] = {}
        self._running: dict[int, Asked] = {}
        self._workers: dict[int, str] = {}
        self._engines: dict[str, VirtualEngine] = {}
        for number in range(num_workers):
            self._add_worker(f"w{number}")
        self.clock.at(TICK_S, self._tick)

    def _add_worker(self, name: str) -> None:
        engine = VirtualEngine(self.clock, lambda outcomes: self._stepped(name, outcomes))
        self._engines[name] = engine
        bounds = engine.limits
        capacity = Capacity(bounds.max_num_seqs, bounds.num_blocks, bounds.max_num_batched_tokens)
        self._leader.placement.join(name, capacity)
        self._report(name)

    def _report(self, name: str) -> None:
        self._leader.placement.report(name, self._engines[name].load(), self.clock.now)

    def _tick(self) -> None:
        now = self.clock.now
        for name in self._engines:
            self._report(name)
        self._leader.placement.expire(now)
        self.leader_state.update_estimates(now)
        self.leader_state.prune(now)
        [queue_estimate] = self.leader_state.queue_estimates()
        for early_rejection in self._early_rejections:
            early_rejection.queue_estimates[""] = queue_estimate
        self._place()
        self.clock.at(now + TICK_S, self._tick)

    def come(self, asked: Asked) -> None:
        now = self.clock.now
        if not self._has_names:
            asked.name = unnamed_request_id(str(next(self._unnamed)))
        self._asked[asked.name] = asked
        try:
            early_rejection = self._early_rejection(asked.name)
            early_rejection.admit(asked.name, "", asked.priority, now)
            early_rejection.check_in_time(
                asked.name,
                "",
                asked.priority,
                asked.ttft_target_s,
                asked.deadline_s,
                asked.least_tokens,
                now,
            )
        except EverliftError as error:
            self._refused(asked, error)
            return
        predicted = round(self._lengths.mean)
        entry = pb.Waiting(
            request_id=asked.name,
            arrived=now,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=1000,
            choices=1,
            priority=asked.priority,
            deadline=now + asked.deadline_s,
            ttft_deadline=now + asked.ttft_target_s,
            least_tokens=asked.least_tokens,
            predicted_tokens=predicted,
            predicted_total=asked.prompt_tokens + predicted,
        )
        effects = self.leader_state.on_message("g", pb.GatewayMessage(enqueue=[entry]), now)
        if asked.deadline_s < inf:
            self.clock.at(now + asked.deadline_s, lambda: self._cut_off(asked))
        for refusal in effects.refused:
            self._refuse(refusal)
        self._place()

    def _cut_off(self, asked: Asked) -> None:
        self.leader_state.on_message("g", pb.GatewayMessage(withdraw=[asked.name]), self.clock.now)
        for epoch, running in list(self._running.items()):
            if running is asked:
                asked.is_cut_off = True
                del self._running[epoch]
                self._engines[self._workers[epoch]].abort(epoch)

    def _refuse(self, refusal: Refusal) -> None:
        name = refusal.waiting.request_id
        error = self._early_rejection(name).refuse(
            name,
            "",
            refusal.slug,
            refusal.retry_after_s,
            self.clock.now,
            refusal.least_tokens,
        )
        self._refused(self._asked[name], error)

    def _early_rejection(self, name: str) -> EarlyRejection:
        return self._early_rejections[crc32(name.encode()) % len(self._early_rejections)]

    def _refused(self, asked: Asked, error: EverliftError) -> None:
        asked.refusals.append((self.clock.now, error))
        if self._comes_back:
            assert error.retry_after_s is not None
            self.clock.at(self.clock.now + error.retry_after_s, lambda: self.come(asked))

    def _place(self) -> None:
        now = self.clock.now
        for refusal in self.leader_state.expire(now):
            self._refuse(refusal)
        for placed in self.leader_state.place(now, now, 64, lambda: next(self._epochs)):
            self.leader_state.on_dispatched(placed, "g")
            asked = self._asked[placed.waiting.request_id]
            asked.predicted_ttft_s = placed.waiting.predicted_ttft_s
            asked.predicted_tpot_s = placed.waiting.predicted_tpot_s
            begin = (placed.worker_id, placed.epoch, asked)
            self.clock.at(now + _NETWORK_S, lambda it=begin: self._begin(*it))

    def _begin(self, worker_id: str, epoch: int, asked: Asked) -> None:
        self._running[epoch] = asked
        self._workers[epoch] = worker_id
        self._engines[worker_id].begin(epoch, asked)
        self._leader.placement.acknowledge(worker_id, epoch)
        self._report(worker_id)

    def _stepped(self, name: str, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            asked = self._running.get(outcome.key.epoch)
            if asked is not None:
                self._progress(asked, outcome)
        self._report(name)
        self._place()

    def _progress(self, asked: Asked, outcome: Outcome) -> None:
        now = self.clock.now
        if asked.first_token is None and outcome.tokens:
            asked.first_token = now
        if outcome.stop is None or asked.first_token is None:
            return
        asked.ended = now
        self._lengths.note(asked.output_tokens)
        del self._running[outcome.key.epoch]
        decode_s = now - asked.first_token
        ratio = measured_tpot_ratio(asked.predicted_tpot_s, decode_s, asked.output_tokens)
        message = pb.GatewayMessage(
            withdraw=[asked.name],
            tpot_ratios=[] if ratio is None else [pb.TpotRatio(ratio=ratio)],
        )
        self.leader_state.on_message("g", message, now)

    def play(self, load: Iterable[Asked], seconds: float) -> list[Asked]:
        """Simulate ``load`` for ``seconds``; return its requests."""
        load = list(load)
        for asked in load:
            self.clock.at(asked.arrived, lambda it=asked: self.come(it))
        self.clock.run(seconds)
        return load


def chats(rate: float, seconds: float, seed: int = 1) -> list[Asked]:
    """Return Poisson arrivals of ``rate`` requests per second, with log-normal lengths."""
    dice, load, now = random.Random(seed), [], 0.0
    while (now := now + dice.expovariate(rate)) < seconds:
        prompt = min(2000, max(8, round(dice.lognormvariate(5.0, 0.8))))
        output = min(500, max(4, round(dice.lognormvariate(3.8, 0.7))))
        load.append(Asked(f"r{len(load)}", now, prompt, output))
    return load
