"""The engine: continuous batching, one step at a time. It has no thread, no clock, and no torch.

    step = schedule -> execute -> commit

On a GPU, a step is launched before the previous one is committed, so that the host plans while the
device computes:

    step n = schedule(n) -> forward(n) -> commit(n - 1) -> sample(n)

Every rank of a worker runs an engine. If all ranks call ``set_policy``, ``add`` and ``abort`` with
the same arguments between the same steps, their engines make the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

from everlift import logs
from everlift.engine_policy import EnginePolicy
from everlift.errors import EngineFailed
from worker.engine.adapter import EngineBroken
from worker.engine.blocks import ChunkChanges
from worker.engine.in_flight import InFlightStep
from worker.engine.limits import Limits
from worker.engine.load import Load, Occupant
from worker.engine.outcome import Abort, Outcome
from worker.engine.plan import (
    NO_ROWS,
    DeviceLost,
    Launch,
    LaunchedStep,
    OutOfMemory,
    Plan,
    RowResult,
    Runner,
    plan_digest,
)
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.step_times import STOPPED, Part, StepTimes, Stopwatch
from worker.engine.time_breakdowns import TimeBreakdowns

log = logs.get_logger(__name__)

#: Exceptions that every rank raises for the same step if one rank does.
COLLECTIVE_ERRORS: tuple[type[Exception], ...] = (EngineFailed, OutOfMemory)

_PREVIOUS_STEP_FAILED = EngineFailed("the previous step failed")


class Engine:
    """Engine of one rank, which plans steps with a scheduler and executes them with ``runner``.

    A step that raises an exception of a ``survivable`` type ends its sequences, and those of a step
    launched after it, with an error. EngineBroken is raised by ``step`` after any other exception,
    a second failed step in a row, or DeviceLost. A survivable MemoryError preempts sequences
    instead and makes the next steps smaller, unless the results of a step in flight raise it.
    Running out of memory in a step of one token ends its sequence with an error.

    Each step runs in the context manager that ``within`` returns for its plan. ``stopwatch`` times
    the parts of steps. ``launch`` is ``runner.launch`` or None; it lets each step be launched
    before the results of the previous one are committed, which ``limits.can_launch_ahead`` must
    allow.
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
        assert launch is None or limits.can_launch_ahead, "no step can be planned ahead"
        self.limits = limits
        self.image_processor = None
        self.adapter_slots = runner.adapter_slots
        self._launch = launch
        #: the launched step that is not committed yet
        self._in_flight: tuple[InFlightStep, LaunchedStep] | None = None
        self._within = within
        self._stopwatch = stopwatch
        self._runner = runner
        self._scheduler = Scheduler(limits)
        self._survivable = survivable
        self._last_step_failed = False
        self._plan = Plan(0, NO_ROWS)
        #: results of launched steps that the last call of ``step`` committed
        self._committed: list[RowResult] = []
        #: set on rank 0, which has the clock; plans do not depend on the breakdowns
        self.breakdowns: TimeBreakdowns | None = None
        #: set on rank 0: called with the sequences that a planned step admits, before it runs
        self.before_admission: Callable[[list[Sequence]], None] | None = None

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0 or self._in_flight is not None

    @property
    def is_in_flight(self) -> bool:
        """Return whether a step was launched and its results are not committed yet."""
        return self._in_flight is not None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        The sequence must be within the limits and must not have ended. No sequence of this engine
        may have the same key.
        """
        self._scheduler.add(sequence)

    def abort(self, abort: Abort) -> None:
        """Remove the sequences to which ``abort`` applies, if any; free their blocks at once."""
        for sequence in self._scheduler.of_epoch(abort.epoch):
            if sequence.key in abort:
                self._scheduler.remove(sequence, is_finished=abort.is_finished)
        self._release()

    def set_policy(self, name: EnginePolicy) -> None:
        """Change the batching policy; all sequences continue under it."""
        self._scheduler.set_policy(name)

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue and free its blocks.

        No step may be in flight.
        """
        assert self._in_flight is None, "a step is in flight"
        self._scheduler.preempt(sequence)
        self._release()

    def sequences(self) -> list[Sequence]:
        """Return all sequences, running or waiting."""
        return list(self._scheduler)

    def unready_slots(self) -> frozenset[int]:
        """Return the slots whose grammar masks are not ready; always empty on ranks above 0."""
        return self._runner.unready_slots()

    def step(self, held_slots: Collection[int] = (), now: float = 0.0) -> list[Outcome]:
        """Run one step, and return the new tokens and ends of sequences as outcomes.

        The outcomes are those of this step or, if steps are launched ahead, usually those of the
        previous one. No token is sampled in the batch slots ``held_slots``, except in one of them
        if no other sequence can run. ``now`` is the start of the step, in seconds on rank 0's
        clock. Raises EngineBroken if a step failed and no further one can run.
        """
        self._stopwatch.start()
        self._committed = []
        committed = (
            self.commit_in_flight()
            if self._in_flight and self._scheduler.must_commit_first()
            else []
        )
        self._plan = self._scheduler.schedule(held_slots, now)
        self._stopwatch.lap(Part.SCHEDULE)
        if not self._plan.rows:
            return [*committed, *self.commit_in_flight()]
        if self.before_admission is not None and (admitted := self._scheduler.newcomers):
            self.before_admission(admitted)
        launch = self._launch
        outcomes = self._execute(now) if launch is None else self._launch_ahead(launch, now)
        self._release()
        return [*committed, *outcomes]

    def commit_in_flight(self) -> list[Outcome]:
        """Wait for the step in flight; apply its results and return its outcomes.

        Return an empty list if no step is in flight. Raises EngineBroken if the step failed and no
        further one can run.
        """
        if self._in_flight is None:
            return []
        with self._within(self._in_flight[0].plan):
            outcomes = self._commit_last()
        self._release()
        return outcomes

    def _launch_ahead(self, launch: Launch, now: float) -> list[Outcome]:
        plan, step = self._plan, self._scheduler.in_flight_step(self._plan)
        with self._within(plan):
            try:
                launched = launch(plan)
            except Exception as error:
                committed = self._commit_last()
                self._begin_breakdown(now)
                return [*committed, *self._handle_failure(step.remaining_plan(), error)]
            self._scheduler.mark_launched()
            self._stopwatch.lap(Part.MODEL)
            follows, outcomes = (
                self._in_flight is not None,
                self._scheduler.take_preemption_outcomes(),
            )
            outcomes += self._commit_last()
            self._begin_breakdown(now)
            if follows and self._last_step_failed:
                # This step reads KV that the failed step was to write.
                return [*outcomes, *self._scheduler.fail_in_flight(step, _PREVIOUS_STEP_FAILED)]
            try:
                launched.sample()
                # The scores of a prompt's chunk must be reported before its next chunk is planned.
                results = launched.results() if plan.rows.scores_prompt.any() else None
            except Exception as error:
                return [*outcomes, *self._handle_failure(step.remaining_plan(), error)]
            self._stopwatch.lap(Part.SAMPLE)
            step.launch()
            self._stopwatch.lap(Part.COMMIT)
            if results is None:
                self._in_flight = step, launched
            else:
                outcomes += self._commit(step, results)
        return outcomes

    def _commit_last(self) -> list[Outcome]:
        if self._in_flight is None:
            return []
        (step, launched), self._in_flight = self._in_flight, None
        try:
            results = launched.results()
        except Exception as error:
            step.commit()
            outcomes = self._scheduler.fail_in_flight(
                step, self._check_survivable(step.plan, error)
            )
            self._end_breakdown()
            return outcomes
        return self._commit(step, results)

    def _commit(self, step: InFlightStep, results: list[RowResult]) -> list[Outcome]:
        self._stopwatch.lap(Part.SAMPLE)
        self._committed += results
        self._last_step_failed = False
        outcomes = self._scheduler.commit_in_flight(step, results)
        self._stopwatch.lap(Part.COMMIT)
        self._end_breakdown()
        return outcomes

    def _execute(self, now: float) -> list[Outcome]:
        self._begin_breakdown(now)
        try:
            with self._within(self._plan):
                results = self._runner.execute(self._plan)
        except Exception as error:
            return self._handle_failure(self._plan, error)
        self._stopwatch.lap(Part.MODEL)
        self._last_step_failed = False
        outcomes = self._scheduler.commit(self._plan, results)
        self._stopwatch.lap(Part.COMMIT)
        return outcomes

    def _handle_failure(self, plan: Plan, error: Exception) -> list[Outcome]:
        if isinstance(error, MemoryError) and isinstance(error, self._survivable):
            log.warning("out of memory", step=plan.step, tokens=plan.num_tokens)
            if self.breakdowns is not None:
                self.breakdowns.mark_step_failed()
            return self._scheduler.retract(plan, EngineFailed("out of memory"))
        return self._scheduler.fail(plan, self._check_survivable(plan, error))

    def _check_survivable(self, plan: Plan, error: Exception) -> EngineFailed:
        log.exception("step failed", step=plan.step)
        is_survivable = isinstance(error, self._survivable) and not isinstance(error, DeviceLost)
        if self._last_step_failed or not is_survivable:
            raise EngineBroken(f"step {plan.step}: {error!r}") from error
        self._last_step_failed = True
        cause = str(error) if isinstance(error, EngineFailed) else type(error).__name__
        return EngineFailed(f"the step failed: {cause}")

    def _begin_breakdown(self, now: float) -> None:
        if self.breakdowns is not None:
            scheduler = self._scheduler
            self.breakdowns.begin_step(self._plan.rows, scheduler.vacated, scheduler.newcomers, now)

    def _end_breakdown(self) -> None:
        if self.breakdowns is not None:
            self.breakdowns.drop_slots(self._scheduler.vacated)
            self.breakdowns.end_step()

    def _release(self) -> None:
        if slots := self._scheduler.take_vacated():
            self._runner.release(slots)
            if self.breakdowns is not None:
                self.breakdowns.drop_slots(slots)

    def digest(self) -> bytes:
        """Return a digest of the last plan and of the results that the last ``step`` committed.

        Other ranks compare it with their own digest to detect that plans or tokens differ. Results
        are included only if steps are launched ahead. A plan then has UNKNOWN in place of each
        token that was not sampled yet when the plan was made.
        """
        return plan_digest(self._plan, self._committed)

    def take_chunk_changes(self) -> ChunkChanges:
        """Return the changes of the prefix cache since the last call. Call between steps."""
        return self._scheduler.take_chunk_changes()

    def step_times(self) -> StepTimes:
        return self._stopwatch.times

    def load(self) -> Load:
        return self._scheduler.load()

    def occupants(self) -> tuple[Occupant, ...]:
        return self._scheduler.occupants()

    def prefilling(self) -> list[Sequence]:
        return self._scheduler.prefilling()

    def check_integrity(self) -> None:
        """Check invariants; raise AssertionError if one is violated. Call between steps."""
        self._scheduler.check_integrity()
