"""Simulated worker: the product's scheduler and block pool with a step time instead of a model.

Pure.

    start, abort  -->  inbox  --turn-->  schedule, commit  --end of the step-->  frame

As in ``worker.serving.loop`` and ``worker.serving.sessions``, messages that arrive during a step
are applied before the next step, and the results of a step are reported when its time has passed.
Consecutive steps that only decode the same sequences are not scheduled one by one. Each of them
still takes its time and sends its frame, but the scheduler computes them together when the run of
steps ends or another message has to be applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.simulator.frame import Frame
from cluster.simulator.multi_step import MultiStepScheduler
from cluster.simulator.scenario import WorkerSpec
from cluster.simulator.sequence import TOKEN, NamedSequence
from cluster.simulator.stretch import NOTHING, Stretch
from cluster.simulator.timeline import Timeline
from everlift.hashes import BLOCK_SIZE
from everlift.step_time import StepSize
from router.admission.throughput import Work, spared_tokens
from router.admission.workers import Capacity, Load
from worker.engine.outcome import Outcome, SequenceKey, Stop
from worker.engine.plan import Plan, Rows
from worker.engine.sequence import NO_SLOT
from worker.serving.pending import Pending

#: Most steps that are computed at once. In this many steps a sequence fills at most one block and
#: allocates at most one.
_MOST_AT_ONCE = BLOCK_SIZE


class SimulatedWorker:
    """Worker in virtual time that reports to the router by calling ``tell`` with a frame.

    It sends a frame when it receives a request, after each step, and when it has sent none for
    ``config.heartbeat`` seconds. With ``one_by_one`` every step is scheduled separately.
    """

    def __init__(
        self,
        worker_id: str,
        spec: WorkerSpec,
        timeline: Timeline,
        tell: Callable[[Frame], None],
        one_by_one: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.limits = spec.limits
        #: number of steps, and how many of them were not scheduled separately
        self.num_steps = self.num_jumped = 0
        self.is_draining = self.is_gone = False
        self._spec = spec
        self._timeline = timeline
        self._tell_router = tell
        self._aborts: list[int] = []
        #: epochs that the next frame acknowledges
        self._accepted: list[int] = []
        self._frames = 0
        self._told_at = timeline.now
        self._busy_s = 0.0
        self._most_at_once = 0 if one_by_one else _MOST_AT_ONCE
        self._scheduler = MultiStepScheduler(self.limits)
        self._starts: list[NamedSequence] = []
        self._pending = Pending()
        self._load = self._scheduler.load()
        # State of the step in progress.
        self._step_s = 0.0
        self._started: list[SequenceKey] = []
        self._outcomes: list[Outcome] = []
        self._plan: Plan | None = None
        self._stretch: Stretch | None = None
        self._tell()
        timeline.after(spec.config.heartbeat, self._beat)

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.limits.max_num_seqs, self.limits.num_blocks)

    def occupants(self) -> set[str]:
        """Return the ids of the requests that have a slot."""
        return {it.request_id for it in self._scheduler if it.slot != NO_SLOT}

    # messages from the router

    def start(self, sequence: NamedSequence) -> None:
        if self.is_gone:
            return
        self._accepted.append(sequence.key.epoch)
        end = sequence.end_at_start(self.limits, self.is_draining)
        if end is None:
            sequence.came = self._timeline.now
            self._pending.add(sequence.key, sequence.num_known)
            self._starts.append(sequence)
        self._tell([end] if end else [])
        self._wake()

    def abort(self, epoch: int) -> None:
        if not self.is_gone:
            self._aborts.append(epoch)
            self._wake()

    def drain(self) -> None:
        """Accept no more requests, and return all unfinished ones to the router after this step."""
        if not self.is_gone:
            self.is_draining = True
            self._wake()

    def lose(self) -> None:
        self.is_gone = True

    # step loop

    @property
    def _is_stepping(self) -> bool:
        return self._step_s > 0

    def _wake(self) -> None:
        if not self._is_stepping:
            self._turn()

    def _turn(self) -> None:
        has_changed = bool(self._starts or self._aborts or self.is_draining)
        self._outcomes = self._take_orders() if has_changed else []
        steps = self._scheduler.num_uniform_steps(self._most_at_once) if self._most_at_once else 0
        if steps:
            before = self._scheduler.load() if has_changed else self._load
            self._stretch = Stretch(before, self._scheduler.blocks_allocated(steps))
            self._step_s = self._seconds(self._stretch.step_size())
        else:
            self._step_s = self._begin_step()
        if self._is_stepping:
            self._timeline.after(self._step_s, self._step_is_over)
        elif has_changed:
            self._report()

    def _take_orders(self) -> list[Outcome]:
        self._started = [sequence.key for sequence in self._starts]
        for sequence in self._starts:
            self._scheduler.add(sequence)
        returned = []
        if self.is_draining:
            returned = [sequence.outcome(Stop.RETURNED) for sequence in self._scheduler]
        for epoch in (*self._aborts, *(outcome.key.epoch for outcome in returned)):
            for leaving in self._scheduler.of_epoch(epoch):
                self._scheduler.remove(leaving)
        self._starts, self._aborts = [], []
        return returned

    def _begin_step(self) -> float:
        plan = self._scheduler.schedule(now=self._timeline.now)
        if not plan.rows:
            return 0.0
        self._plan = plan
        return self._seconds(step_size(plan.rows))

    def _seconds(self, size: StepSize) -> float:
        return self._spec.step_time.seconds(size) * self._spec.slowness

    def _step_is_over(self) -> None:
        if self.is_gone:
            return
        self._busy_s += self._step_s
        self.num_steps += 1
        if (stretch := self._stretch) is not None:
            stretch.num_done += 1
            if not (self._starts or self._aborts or self.is_draining or stretch.is_over):
                self._go_on(stretch)
                return
            self._outcomes += self._scheduler.decode(TOKEN, stretch.num_done)
            self.num_jumped += stretch.num_done - 1
            self._stretch = None
        elif self._plan is not None:
            self._outcomes += self._scheduler.commit_drawn(self._plan, TOKEN)
            self._plan = None
        self._report()
        self._turn()

    def _go_on(self, stretch: Stretch) -> None:
        self._load = stretch.before
        self._count_started()
        self._tell(self._outcomes)
        self._outcomes = []
        self._step_s = self._seconds(stretch.step_size())
        self._timeline.after(self._step_s, self._step_is_over)

    # messages to the router

    def _tell(self, outcomes: Sequence[Outcome] = ()) -> None:
        self._told_at = self._timeline.now
        accepted, self._accepted = tuple(self._accepted), []
        self._frames += 1
        self._tell_router(Frame(self.worker_id, self._state(), accepted, outcomes))

    def _beat(self) -> None:
        beat_s = self._spec.config.heartbeat
        if self.is_gone or (self.is_draining and not self._is_stepping):
            return
        if self._timeline.now >= self._told_at + beat_s:
            self._tell()
        self._timeline.at(self._told_at + beat_s, self._beat)

    def _report(self) -> None:
        self._load = self._scheduler.load()
        self._count_started()
        outcomes, self._outcomes = self._outcomes, []
        self._tell(outcomes)

    def _count_started(self) -> None:
        for key in self._started:
            self._pending.discard(key)
        self._started = []

    def _state(self) -> Load:
        load, pending = self._load, self._pending.num_tokens
        more = self._stretch.more() if self._stretch else NOTHING
        work = Work(
            load.step + more.steps,
            load.computed_tokens + more.tokens,
            load.output_tokens + more.tokens,
            load.released_blocks,
            self._busy_s,
            load.counters.slot_steps + more.tokens,
            load.kv_tokens + more.kv_tokens,
            load.num_pairs + more.kv_tokens,
            spared_tokens(load.counters),
        )
        return Load(
            self._frames,
            load.num_running,
            load.num_waiting + len(self._pending),
            load.blocks_used + more.blocks,
            load.pending_prefill_tokens + pending,
            load.committed_tokens + more.tokens + pending,
            self.is_draining,
            work,
        )


def step_size(rows: Rows) -> StepSize:
    counts, ends = rows.counts, rows.known_ends
    # Each token of a row attends to itself and to all tokens before it.
    pairs = (counts * (2 * ends - counts + 1)).sum() / 2
    return StepSize(len(rows), rows.num_tokens, float(ends.sum()), float(pairs))
