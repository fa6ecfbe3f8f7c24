"""The engine: continuous batching, one step at a time. It has no thread, no clock, and no torch.

    step = schedule -> execute -> commit

Where a device computes by itself, a step is launched before the last one is committed, and the host
plans while the device computes:

    step n = schedule(n) -> forward(n) -> commit(n - 1) -> sample(n)

Every rank of a worker runs one; with the same policies, adds and aborts between the same steps they
all do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

from everlift import logs
from everlift.engine_policy import EnginePolicy
from everlift.errors import EngineFailed
from worker.engine.accounts import TimeBreakdowns
from worker.engine.digest import plan_digest
from worker.engine.in_flight import InFlightStep
from worker.engine.limits import Limits
from worker.engine.load import Load, Occupant
from worker.engine.outcome import Abort, Outcome
from worker.engine.plan import (
    NO_ROWS,
    DeviceLost,
    Launch,
    Launched,
    Plan,
    RowResult,
    Runner,
    TooLittleMemory,
)
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.step_times import STOPPED, Part, StepTimes, Stopwatch

log = logs.get(__name__)

#: What all ranks raise for the same step, if one does.
OF_ALL_RANKS: tuple[type[Exception], ...] = (EngineFailed, TooLittleMemory)

_AFTER_A_FAILED_STEP = EngineFailed("the step before failed")


class EngineBroken(Exception):
    """The runner does not work any more: this rank must end."""


class Engine:
    """A step that raises a ``survivable`` exception ends the sequences that it was to compute; any
    other, a second such step in a row, or the loss of the device, is the engine's end. Where memory
    was too short it ends nobody: the steps become smaller.

    Each step is executed ``within`` a context made of its plan. ``stopwatch`` is told of its parts.
    With ``launch``, the runner's, steps are launched ahead; ``limits`` have to allow it.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        survivable: tuple[type[Exception], ...] = (Exception,),
        within: Callable[[Plan], AbstractContextManager[object]] = nullcontext,
        stopwatch: Stopwatch = STOPPED,
        launch: Launch | None = None,
    ) -> None:
        assert launch is None or limits.plans_ahead, "no step can be planned ahead"
        self.limits = limits
        self._launch = launch
        #: the step that was launched and is not committed
        self._in_flight: tuple[InFlightStep, Launched] | None = None
        self._within = within
        self._stopwatch = stopwatch
        self._runner = runner
        self._scheduler = Scheduler(limits)
        self._survivable = survivable
        self._last_failed = False
        self._plan = Plan(0, NO_ROWS)
        #: what was drawn by the steps that landed in the last one
        self._landed: list[RowResult] = []
        #: on rank 0, where there is a clock; no plan depends on them
        self.accounts: TimeBreakdowns | None = None
        #: on rank 0: called with the sequences that the planned step admits, before that step runs
        self.before_admission: Callable[[list[Sequence]], None] | None = None

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0 or self._in_flight is not None

    @property
    def is_in_flight(self) -> bool:
        """A step was launched and is not committed."""
        return self._in_flight is not None

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence that was checked against this engine's limits, is not at its end, and
        whose key no other one here has."""
        self._scheduler.add(sequence)

    def abort(self, abort: Abort) -> None:
        """Ends those of its choices that are here; their blocks are free at once."""
        for sequence in self._scheduler.of_epoch(abort.epoch):
            if sequence.key in abort:
                self._scheduler.remove(sequence)
        self._release()

    def set_policy(self, name: EnginePolicy) -> None:
        """Another one says whom the steps are for; everybody who is here goes on under it."""
        self._scheduler.set_policy(name)

    def preempt(self, sequence: Sequence) -> None:
        """Takes the blocks of a running sequence between two steps; it goes on when there are
        some. No step may be in flight."""
        assert self._in_flight is None, "a step is in flight"
        self._scheduler.preempt(sequence)
        self._release()

    def sequences(self) -> list[Sequence]:
        """All that is here, running or waiting."""
        return list(self._scheduler)

    def unready_slots(self) -> frozenset[int]:
        """What the next step had better hold. Only rank 0 knows."""
        return self._runner.unready_slots()

    def step(self, held: Collection[int] = (), now: float = 0.0) -> list[Outcome]:
        """One forward pass over some of what is known; the sequences in the slots ``held`` draw
        nothing, but for one of them where nobody else has anything to do. ``now`` is when it
        begins, in seconds on rank 0's clock. Raises EngineBroken."""
        self._stopwatch.start()
        self._landed = []
        landed = self.settle() if self._in_flight and self._scheduler.must_land() else []
        self._plan = self._scheduler.schedule(held, now)
        self._stopwatch.end(Part.SCHEDULE)
        if not self._plan.rows:
            return [*landed, *self.settle()]
        if self.before_admission is not None and (admitted := self._scheduler.newcomers):
            self.before_admission(admitted)
        launch = self._launch
        outcomes = self._execute(now) if launch is None else self._run_ahead(launch, now)
        self._release()
        return [*landed, *outcomes]

    def settle(self) -> list[Outcome]:
        """Waits for the step that is in flight, if one is, and commits it."""
        if self._in_flight is None:
            return []
        with self._within(self._in_flight[0].plan):
            outcomes = self._land()
        self._release()
        return outcomes

    def _run_ahead(self, launch: Launch, now: float) -> list[Outcome]:
        """forward(n), commit(n - 1), sample(n)"""
        plan, flight = self._plan, self._scheduler.flight(self._plan)
        with self._within(plan):
            try:
                launched = launch(plan)
            except Exception as error:
                landed = self._land()
                self._begin_account(now)
                return [*landed, *self._failed(flight.left(), error)]
            self._scheduler.launched()
            self._stopwatch.end(Part.MODEL)
            follows, outcomes = self._in_flight is not None, self._scheduler.notices()
            outcomes += self._land()
            self._begin_account(now)
            if follows and self._last_failed:
                # What this step reads, that one was to write.
                return [*outcomes, *self._scheduler.crash(flight, _AFTER_A_FAILED_STEP)]
            try:
                launched.sample()
                # What is told of a prompt comes before its next chunk is planned.
                results = launched.results() if plan.rows.scores_prompt.any() else None
            except Exception as error:
                return [*outcomes, *self._failed(flight.left(), error)]
            flight.take_off()
            if results is None:
                self._in_flight = flight, launched
            else:
                outcomes += self._commit(flight, results)
        return outcomes

    def _land(self) -> list[Outcome]:
        if self._in_flight is None:
            return []
        (flight, launched), self._in_flight = self._in_flight, None
        try:
            results = launched.results()
        except Exception as error:
            flight.land()
            outcomes = self._scheduler.crash(flight, self._survived(flight.plan, error))
            self._end_account()
            return outcomes
        return self._commit(flight, results)

    def _commit(self, flight: InFlightStep, results: list[RowResult]) -> list[Outcome]:
        self._stopwatch.end(Part.SAMPLE)
        self._landed += results
        self._last_failed = False
        outcomes = self._scheduler.land(flight, results)
        self._stopwatch.end(Part.COMMIT)
        self._end_account()
        return outcomes

    def _execute(self, now: float) -> list[Outcome]:
        self._begin_account(now)
        try:
            with self._within(self._plan):
                results = self._runner.execute(self._plan)
        except Exception as error:
            return self._failed(self._plan, error)
        self._stopwatch.end(Part.MODEL)
        self._last_failed = False
        outcomes = self._scheduler.commit(self._plan, results)
        self._stopwatch.end(Part.COMMIT)
        return outcomes

    def _failed(self, plan: Plan, error: Exception) -> list[Outcome]:
        """``plan`` was not executed, and nothing was planned on top of it."""
        if isinstance(error, MemoryError) and isinstance(error, self._survivable):
            log.warning("out of memory", step=plan.step, tokens=plan.num_tokens)
            if self.accounts is not None:
                self.accounts.in_vain()
            return self._scheduler.shed(plan, EngineFailed("out of memory"))
        return self._scheduler.fail(plan, self._survived(plan, error))

    def _survived(self, plan: Plan, error: Exception) -> EngineFailed:
        """What the plan's sequences are told. Raises EngineBroken where the engine ends by it."""
        log.exception("step failed", step=plan.step)
        is_survivable = isinstance(error, self._survivable) and not isinstance(error, DeviceLost)
        if self._last_failed or not is_survivable:
            raise EngineBroken(f"step {plan.step}: {error!r}") from error
        self._last_failed = True
        cause = str(error) if isinstance(error, EngineFailed) else type(error).__name__
        return EngineFailed(f"the step failed: {cause}")

    def _begin_account(self, now: float) -> None:
        """The time of the planned step begins, when nothing is in flight any more."""
        if self.accounts is not None:
            scheduler = self._scheduler
            self.accounts.begin(self._plan.rows, scheduler.vacated, scheduler.newcomers, now)

    def _end_account(self) -> None:
        """The time of the step that was in flight ends."""
        if self.accounts is not None:
            self.accounts.left(self._scheduler.vacated)
            self.accounts.end()

    def _release(self) -> None:
        if slots := self._scheduler.take_vacated():
            self._runner.release(slots)
            if self.accounts is not None:
                self.accounts.left(slots)

    def digest(self) -> bytes:
        """Of the last step's plan, and of what has landed in that step: where tokens are UNKNOWN to
        plans, they tell nothing of what was drawn."""
        return plan_digest(self._plan, self._landed)

    def step_times(self) -> StepTimes:
        return self._stopwatch.times

    def load(self) -> Load:
        return self._scheduler.load()

    def occupants(self) -> tuple[Occupant, ...]:
        return self._scheduler.occupants()

    def prefilling(self) -> list[Sequence]:
        return self._scheduler.prefilling()

    def check_integrity(self) -> None:
        """Raises AssertionError where the engine's books do not agree."""
        self._scheduler.check_integrity()
