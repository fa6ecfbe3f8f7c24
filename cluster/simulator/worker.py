"""Simulated worker: the product's scheduler and block pool with a step time instead of a model.

Pure.

    start, abort  -->  inbox  --next step-->  schedule, commit  --end of the step-->  frame

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
from cluster.simulator.timeline import Timeline
from cluster.simulator.uniform_run import NO_DELTA, UniformRun
from everlift.hashes import BLOCK_SIZE
from everlift.step_time import StepSize
from router.admission.throughput import Work, spared_tokens
from router.admission.workers import Capacity, Load
from worker.engine.outcome import Outcome, SequenceKey, Stop
from worker.engine.plan import Plan, Rows
from worker.engine.sequence import NO_SLOT
from worker.serving.pending import Pending

#: Maximum number of steps that are computed at once. In this many steps a sequence fills at most
#: one block and allocates at most one.
_MAX_UNIFORM_STEPS = BLOCK_SIZE


class SimulatedWorker:
    """Worker in virtual time that reports to the router by calling ``send`` with a frame.

    The worker sends a frame when it receives a request, after each step, and when it has sent none
    for ``config.heartbeat`` seconds. Consecutive steps that only decode the same sequences are
    scheduled together, unless ``one_by_one`` is true. Each of them still takes its own time and
    sends its own frame.
    """

    def __init__(
        self,
        worker_id: str,
        spec: WorkerSpec,
        timeline: Timeline,
        send: Callable[[Frame], None],
        one_by_one: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.limits = spec.limits
        #: number of steps, and how many of them were not scheduled separately
        self.num_steps = self.num_jumped = 0
        self.is_draining = self.is_lost = False
        self._spec = spec
        self._timeline = timeline
        self._send = send
        self._aborts: list[int] = []
        #: aborted epochs that the next frame reports
        self._aborted: list[int] = []
        #: epochs that the next frame acknowledges
        self._accepted: list[int] = []
        self._frames = 0
        self._sent_at = timeline.now
        self._busy_s = 0.0
        self._max_uniform_steps = 0 if one_by_one else _MAX_UNIFORM_STEPS
        self._scheduler = MultiStepScheduler(self.limits)
        self._starts: list[NamedSequence] = []
        self._pending = Pending()
        self._load = self._scheduler.load()
        # State of the step in progress.
        self._step_s = 0.0
        self._started: list[SequenceKey] = []
        self._outcomes: list[Outcome] = []
        self._plan: Plan | None = None
        self._run: UniformRun | None = None
        self._send_frame()
        timeline.after(spec.config.heartbeat, self._heartbeat)

    @property
    def capacity(self) -> Capacity:
        limits = self.limits
        return Capacity(
            limits.max_num_seqs,
            limits.num_blocks,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )

    def occupants(self) -> set[str]:
        """Return the ids of the requests that have a slot."""
        return {it.request_id for it in self._scheduler if it.slot != NO_SLOT}

    # messages from the router

    def start(self, sequence: NamedSequence) -> None:
        if self.is_lost:
            return
        self._accepted.append(sequence.key.epoch)
        end = sequence.end_at_start(self.limits, self.is_draining)
        if end is None:
            sequence.arrived_at = self._timeline.now
            self._pending.add(sequence.key, sequence.num_known, sequence.num_uncached)
            self._starts.append(sequence)
        self._send_frame([end] if end else [])
        self._wake()

    def abort(self, epoch: int) -> None:
        if not self.is_lost:
            self._aborts.append(epoch)
            self._aborted.append(epoch)
            self._wake()

    def drain(self) -> None:
        """Accept no more requests, and return all unfinished ones to the router after this step."""
        if not self.is_lost:
            self.is_draining = True
            self._wake()

    def lose(self) -> None:
        self.is_lost = True

    # step loop

    @property
    def _is_stepping(self) -> bool:
        return self._step_s > 0

    def _wake(self) -> None:
        if not self._is_stepping:
            self._next_step()

    def _next_step(self) -> None:
        has_changed = bool(self._starts or self._aborts or self.is_draining)
        self._outcomes = self._apply_messages() if has_changed else []
        steps = (
            self._scheduler.num_uniform_steps(self._max_uniform_steps)
            if self._max_uniform_steps
            else 0
        )
        if steps:
            before = self._scheduler.load() if has_changed else self._load
            self._run = UniformRun(before, self._scheduler.blocks_allocated(steps))
            self._step_s = self._seconds(self._run.begin_step(self._timeline.now))
        else:
            self._step_s = self._start_step()
        if self._is_stepping:
            self._timeline.after(self._step_s, self._on_step_end)
        elif has_changed:
            self._report()

    def _apply_messages(self) -> list[Outcome]:
        self._started = [sequence.key for sequence in self._starts]
        for sequence in self._starts:
            self._scheduler.add(sequence)
        returned = []
        if self.is_draining:
            returned = [sequence.outcome(Stop.RETURNED) for sequence in self._scheduler]
        for epoch in (*self._aborts, *(outcome.key.epoch for outcome in returned)):
            for removed in self._scheduler.of_epoch(epoch):
                self._scheduler.remove(removed)
        self._starts, self._aborts = [], []
        return returned

    def _start_step(self) -> float:
        plan = self._scheduler.schedule(now=self._timeline.now)
        if not plan.rows:
            return 0.0
        self._plan = plan
        return self._seconds(step_size(plan.rows))

    def _seconds(self, size: StepSize) -> float:
        return self._spec.step_time.seconds(size) * self._spec.slowness

    def _on_step_end(self) -> None:
        if self.is_lost:
            return
        self._busy_s += self._step_s
        self.num_steps += 1
        if (run := self._run) is not None:
            run.num_done += 1
            if not (self._starts or self._aborts or self.is_draining or run.is_over):
                self._continue_run(run)
                return
            self._outcomes += self._scheduler.decode(TOKEN, run.starts)
            self.num_jumped += run.num_done - 1
            self._run = None
        elif self._plan is not None:
            self._outcomes += self._scheduler.commit_sampled(self._plan, TOKEN)
            self._plan = None
        self._report()
        self._next_step()

    def _continue_run(self, run: UniformRun) -> None:
        self._load = run.before
        self._count_started()
        self._send_frame(self._outcomes)
        self._outcomes = []
        self._step_s = self._seconds(run.begin_step(self._timeline.now))
        self._timeline.after(self._step_s, self._on_step_end)

    # messages to the router

    def _send_frame(self, outcomes: Sequence[Outcome] = ()) -> None:
        self._sent_at = self._timeline.now
        accepted, self._accepted = tuple(self._accepted), []
        self._frames += 1
        chunks = self._scheduler.take_chunk_changes().device
        aborted, self._aborted = tuple(self._aborted), []
        may_defer = self._scheduler.may_defer
        self._send(
            Frame(self.worker_id, self._state(), accepted, outcomes, chunks, aborted, may_defer)
        )

    def _heartbeat(self) -> None:
        heartbeat_s = self._spec.config.heartbeat
        if self.is_lost or (self.is_draining and not self._is_stepping):
            return
        if self._timeline.now >= self._sent_at + heartbeat_s:
            self._send_frame()
        self._timeline.at(self._sent_at + heartbeat_s, self._heartbeat)

    def _report(self) -> None:
        self._load = self._scheduler.load()
        self._count_started()
        outcomes, self._outcomes = self._outcomes, []
        self._send_frame(outcomes)

    def _count_started(self) -> None:
        for key in self._started:
            self._pending.discard(key)
        self._started = []

    def _state(self) -> Load:
        load, pending = self._load, self._pending
        delta, retained = NO_DELTA, load.blocks_retained
        if self._run is not None and self._run.num_done:
            delta = self._run.added_load()
            retained = self._scheduler.blocks_retained(self._run.last_start, delta.blocks)
        work = Work(
            load.step + delta.steps,
            load.computed_tokens + delta.tokens,
            load.output_tokens + delta.tokens,
            load.released_blocks,
            self._busy_s,
            load.counters.slot_steps + delta.tokens,
            load.kv_tokens + delta.kv_tokens,
            load.num_pairs + delta.kv_tokens,
            spared_tokens(load.counters),
        )
        return Load(
            self._frames,
            load.num_running,
            load.num_waiting + len(pending),
            load.blocks_used + delta.blocks,
            load.pending_prefill_tokens + pending.num_uncached,
            load.committed_tokens + delta.tokens + pending.num_tokens,
            self.is_draining,
            work,
            load.waiting_cached_tokens + pending.num_tokens - pending.num_uncached,
            retained,
            load.long_prefill_tokens,
        )


def step_size(rows: Rows) -> StepSize:
    counts, ends = rows.counts, rows.known_ends
    # Each token of a row attends to itself and to all tokens before it.
    pairs = (counts * (2 * ends - counts + 1)).sum() / 2
    return StepSize(len(rows), rows.num_tokens, float(ends.sum()), float(pairs))
