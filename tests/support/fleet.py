"""Simulated worker fleet for tests of the autoscaler.

Requests arrive, queue, share the workers' throughput and end; the autoscaler sees the load and sets
the number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from cluster.autoscale.config import AutoscaleConfig
from cluster.autoscale.policy import Autoscaler, Decision
from everlift.v1.session_pb2 import ClusterLoad

TICK_S = 0.2
SLOTS = 16
BLOCKS = 1000


@dataclass
class Job:
    """Request with ``left`` tokens still to be computed."""

    came: float
    left: float
    blocks: int


@dataclass
class Fleet:
    """Fleet under an autoscaler.

    ``rate`` is the throughput of a full worker, and ``speed`` the most that a request gets of it,
    both in tokens per second. ``job_tokens`` is the mean length of a request.
    """

    config: AutoscaleConfig
    workers: int = 1
    rate: float = 1000.0
    speed: float = 100.0
    job_tokens: float = 300.0
    job_blocks: int = 10
    start_s: float = 5.0
    seed: int = 1
    now: float = 0.0
    term: int = 7
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    starting: list[float] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    #: whether requests were queued, at each decision
    queues: list[bool] = field(default_factory=list)
    worker_seconds: float = 0.0
    offered: float = 0.0

    def __post_init__(self) -> None:
        self._rng = Random(self.seed)
        self._autoscaler = Autoscaler(self.config)
        self._target = self.workers
        self._known_rate = 0.0

    def run(self, seconds: float, load: float | Callable[[float], float]) -> Fleet:
        """Simulate ``seconds`` under ``load``, the demand in multiples of a full worker."""
        until = self.now + seconds
        while self.now < until:
            self._come(load(self.now) if callable(load) else load)
            self._work()
            self._scale()
            self.now += TICK_S
        return self

    @property
    def target(self) -> int:
        return self._target

    @property
    def changes(self) -> list[tuple[float, int]]:
        """Times of changes of the target, and the change in workers."""
        before, changes = self.decisions[0][1].workers if self.decisions else 0, []
        for moment, decision in self.decisions:
            if decision.workers != before:
                changes.append((moment, decision.workers - before))
            before = decision.workers
        return changes

    @property
    def reversals(self) -> list[float]:
        """Times at which scaling changed its direction."""
        turns, direction = [], 0
        for moment, change in self.changes:
            if direction * change < 0:
                turns.append(moment)
            direction = change
        return turns

    def queued_since(self, moment: float) -> float:
        """Return the time since which requests have been queued continuously at ``moment``."""
        since = moment
        for (at, _), queued in reversed(list(zip(self.decisions, self.queues, strict=True))):
            if at <= moment:
                if not queued:
                    break
                since = at
        return since

    def report(self) -> ClusterLoad:
        held = sum(job.blocks for job in self.running)
        return ClusterLoad(
            term=self.term,
            workers=self.workers,
            queued=len(self.waiting),
            queued_tokens=round(sum(job.left for job in self.waiting)),
            waited_s=self.now - self.waiting[0].came if self.waiting else 0.0,
            running=len(self.running),
            slots=SLOTS * self.workers,
            blocks_used=held,
            blocks_total=BLOCKS * self.workers,
            offered_tokens=round(self.offered),
            worker_rate=self._known_rate,
        )

    def _come(self, load: float) -> None:
        mean_s = self.job_tokens / (load * self.rate) if load else float("inf")
        moment = self._rng.expovariate(1 / mean_s) if load else float("inf")
        while moment < TICK_S:
            tokens = self._rng.expovariate(1 / self.job_tokens) + 1
            self.waiting.append(Job(self.now + moment, tokens, self.job_blocks))
            self.offered += tokens
            moment += self._rng.expovariate(1 / mean_s)

    def _work(self) -> None:
        held = sum(job.blocks for job in self.running)
        while self.waiting and len(self.running) < SLOTS * self.workers:
            if held + self.waiting[0].blocks > BLOCKS * self.workers:
                break
            job = self.waiting.popleft()
            self.running.append(job)
            held += job.blocks
        if self.waiting and self.workers:
            self._known_rate = self.rate
        if self.running and self.workers:
            share = min(self.speed, self.rate * self.workers / len(self.running)) * TICK_S
            for job in self.running:
                job.left -= share
            self.running = [job for job in self.running if job.left > 0]

    def _scale(self) -> None:
        self.starting = [ready for ready in self.starting if ready > self.now]
        self.workers = self._target - len(self.starting)
        decision = self._autoscaler.decide(self.report(), 0.0, self._target, self.now)
        self.decisions.append((self.now, decision))
        self.queues.append(bool(self.waiting))
        for _ in range(decision.workers - self._target):
            self.starting.append(self.now + self.start_s)
        self._target = decision.workers
        self.workers = max(0, self._target - len(self.starting))
        del self.starting[self._target :]
        self.worker_seconds += self._target * TICK_S
