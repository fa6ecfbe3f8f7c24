"""Tensor-parallel ranks under random histories, with steps launched ahead and without.

Rank 0's log is all that the other ranks need to run the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlift.errors import EngineFailed
from everlift.sampling import Grammar, GrammarKind, SamplingParams
from everlift.v1 import session_pb2
from tests.property.test_worker_engine import MODEL, Event, Job, bounds, crowds, events
from tests.support.example_counts import examples
from tests.support.worker.worker_support import Collected, limits, prompt
from worker.config import Speculation
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, SequenceKey, Stop
from worker.engine.plan import LaunchedStep, Plan, RowResult
from worker.engine.sequence import Sequence as EngineSequence
from worker.runner.fake_runner import FakeRunner, expected_tokens
from worker.serving.inbox import Inbox, Orders
from worker.serving.loop import LeadingLoop, RanksDisagree, Report, follow

GRAMMAR = Grammar(GrammarKind.REGEX, ("as Form says",))


class Form:
    """FakeGrammar whose permitted tokens depend on the length of the output."""

    def allowed(self, output: Sequence[int]) -> Sequence[int]:
        return range(10 + len(output) % 5, 200, 7)


@dataclass(frozen=True)
class StructuredJob(Job):
    def tokens(self) -> list[int]:
        stops = [MODEL.eos_token_id]
        asked = self.max_tokens, MODEL, self.sampling, self.choice, stops
        return expected_tokens(self.prompt, *asked, grammar=Form())

    @classmethod
    def of(cls, job: Job) -> StructuredJob:
        sampling = replace(job.sampling, grammar=GRAMMAR, min_tokens=0)
        return cls(**(vars(job) | {"done": 0, "sampling": sampling}))


class Ask(NamedTuple):
    """Operation of a runner; in a real runner, a collective of all ranks."""

    what: str
    step: int


class AskedRunner(FakeRunner):
    """Runner of one rank that records the operations."""

    def __init__(self, bounds: Limits, ahead: bool) -> None:
        model = replace(MODEL, runs_ahead=ahead)
        super().__init__(bounds.num_blocks, model, bounds.num_host_blocks)
        self.asked: list[Ask] = []

    def ask(self, what: str, step: int) -> None:
        """Record an operation; raise EngineFailed if the step fails there."""
        self.asked.append(Ask(what, step))

    def agreed(self, step: int, results: list[RowResult]) -> list[RowResult]:
        """Return ``results`` as rank 0 has decided them."""
        raise NotImplementedError

    def execute(self, plan: Plan) -> list[RowResult]:
        self.ask("execute", plan.step)
        return self.agreed(plan.step, super().execute(plan))

    def _launch(self, plan: Plan) -> LaunchedStep:
        self.ask("forward", plan.step)
        return AskedStep(self, plan.step, super()._launch(plan))


class AskedStep:
    def __init__(self, runner: AskedRunner, step: int, launched: LaunchedStep) -> None:
        self._runner, self._step, self._launched = runner, step, launched

    def sample(self) -> None:
        self._runner.ask("sample", self._step)
        self._launched.sample()

    def results(self) -> list[RowResult]:
        self._runner.ask("results", self._step)
        return self._runner.agreed(self._step, self._launched.results())


class Rank0Runner(AskedRunner):
    """Runner of rank 0; the next step has the ``fault`` of an event, on all ranks."""

    def __init__(self, bounds: Limits, dice: Random, ahead: bool) -> None:
        super().__init__(bounds, ahead)
        self._dice = dice
        self._kinds = ["forward", "results"] if ahead else ["execute"]
        self.fault: int | None = None
        #: rank 0's results, by step
        self.word: dict[int, list[RowResult]] = {}
        self.failed: dict[int, str] = {}
        self._failed_rows: dict[int, int] = {}

    def unready_slots(self) -> frozenset[int]:
        return frozenset(slot for slot in range(5) if self._dice.random() < 0.2)

    def ask(self, what: str, step: int) -> None:
        super().ask(what, step)
        if what in ("execute", "forward"):
            self._prepare(step)
        if self.failed.get(step) == what:
            raise EngineFailed("on all ranks")

    def agreed(self, step: int, results: list[RowResult]) -> list[RowResult]:
        if (row := self._failed_rows.get(step)) is not None:
            results[row % len(results)] = RowResult(error=EngineFailed("in this row"))
        self.word[step] = results
        return results

    def _prepare(self, step: int) -> None:
        fault, self.fault = self.fault, None
        # Two consecutive failed steps end the engine, and a step between them may be discarded.
        if fault == -1 and step > max(self.failed, default=-9) + 2:
            self.failed[step] = self._dice.choice(self._kinds)
        if fault is not None and fault >= 0:
            self._failed_rows[step] = fault


class FollowerRunner(AskedRunner):
    """Runner of another rank, which has no grammars and takes over rank 0's results."""

    def __init__(self, bounds: Limits, rank_0: Rank0Runner, ahead: bool) -> None:
        super().__init__(bounds, ahead)
        self._rank_0 = rank_0

    def ask(self, what: str, step: int) -> None:
        super().ask(what, step)
        if self._rank_0.failed.get(step) == what:
            raise EngineFailed("on all ranks")

    def agreed(self, step: int, results: list[RowResult]) -> list[RowResult]:
        failed = RowResult(error=EngineFailed("there"))
        word = self._rank_0.word[step]
        return [RowResult(each.tokens) if each.error is None else failed for each in word]


def engine_of(runner: AskedRunner, bounds: Limits) -> Engine:
    return Engine(runner, bounds, EngineFailed, launch=runner.launch)


class Log:
    """Log that keeps the entries of rank 0 as serialised and parsed again."""

    def __init__(self) -> None:
        self.entries: list[session_pb2.StepLog] = []

    def write(self, entry: session_pb2.StepLog) -> None:
        self.entries.append(session_pb2.StepLog.FromString(entry.SerializeToString()))


class Rank0:
    """Loop of rank 0 under a list of events."""

    def __init__(self, bounds: Limits, dice: Random, ahead: bool) -> None:
        self.bounds, self.dice = bounds, dice
        self.runner = Rank0Runner(bounds, dice, ahead)
        self.engine = engine_of(self.runner, bounds)
        self.log, self.collected = Log(), Collected()
        times = count(step=0.25)
        self.loop = LeadingLoop(
            self.engine, Inbox(), self.take, self.log, lambda: float(next(times))
        )
        self.jobs: dict[SequenceKey, Job] = {}
        self.aborted: set[SequenceKey] = set()
        self.num_requests = 0

    def take(self, report: Report) -> None:
        self.collected.take(report.outcomes)
        self.engine.check_integrity()

    def happen(self, event: Event) -> None:
        orders = Orders(policy=event.policy)
        for request in event.requests:
            self.num_requests += 1
            is_structured = self.dice.random() < 0.3
            jobs = [StructuredJob.of(job) if is_structured else job for job in request]
            orders.starts += [self.start(job) for job in jobs]
        if event.abort is not None and event.abort[0] < self.num_requests:
            arrival, choice = event.abort
            abort = Abort(arrival + 1, () if choice is None else (choice,))
            orders.aborts.append(abort)
            self.aborted.update(key for key in self.jobs if key in abort)
        self.runner.fault = event.fault
        self.loop.run_iteration(orders)

    def start(self, job: Job) -> EngineSequence:
        sequence = job.sequence(self.num_requests, self.bounds)
        sequence.grammar = Form() if isinstance(job, StructuredJob) else None
        self.jobs[sequence.key] = job
        return sequence

    def finish(self) -> None:
        self.runner.fault = None
        for _ in range(10_000):
            if not self.engine.has_work:
                return
            self.loop.run_iteration(Orders())
        raise AssertionError("still at work")

    def check_tokens(self) -> None:
        for key, job in self.jobs.items():
            stop = self.collected.stops.get(key)
            assert stop is not None or key in self.aborted
            job.check(key, self.collected, is_whole=stop in (Stop.EOS, Stop.LENGTH))


@settings(max_examples=examples(60))
@given(bounds, crowds, events, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_ranks_follow_log_of_rank_0_exactly(
    bounds: Limits, crowd: Event, events: list[Event], ahead: bool, drains: bool, dice: Random
) -> None:
    if ahead:
        bounds = replace(bounds, speculation=Speculation())
    this = Rank0(bounds, dice, ahead)
    for event in (crowd, *events):
        this.happen(event)
    if drains:
        this.loop.run_iteration(Orders(drain=True))
    this.finish()
    this.check_tokens()

    other = FollowerRunner(bounds, this.runner, ahead)
    engine = engine_of(other, bounds)
    follow(engine, this.log.entries)
    engine.check_integrity()
    assert other.asked == this.runner.asked
    assert engine.digest() == this.engine.digest()
    assert engine.load() == this.engine.load()
    assert not engine.has_work


def test_diverged_rank_ends_after_the_step() -> None:
    bounds = limits()
    this = Rank0(bounds, Random(1), ahead=True)
    this.happen(Event([[Job(prompt(5), 0, 9, SamplingParams(temperature=0.0), 0, b"", 0)]]))
    this.finish()
    other = FollowerRunner(bounds, this.runner, ahead=True)
    this.runner.word[3] = [RowResult((1,))]
    with pytest.raises(RanksDisagree, match="step 4"):
        follow(engine_of(other, bounds), this.log.entries)
    assert other.asked[-1] == Ask("sample", 4)
