"""Engine of a worker on top of vLLM: keeps account of the sequences, and reports them. Pure.

vLLM plans the steps, holds the KV cache and samples. The class tracks the state of each sequence as
Everlift's own engine does, so that routers receive the same reports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from heapq import heappop, heappush

import numpy as np

from everlift import logs
from everlift.engine_policy import EnginePolicy
from everlift.errors import InvalidRequest
from worker.engine.adapter import EngineBroken
from worker.engine.blocks import ChunkChanges
from worker.engine.images import ImageProcessor
from worker.engine.limits import Limits, blocks_for
from worker.engine.load import Counters, Load, Occupant
from worker.engine.outcome import Abort, Outcome, SequenceKey, Stop
from worker.engine.plan import Rows
from worker.engine.sequence import NO_SLOT, Sequence
from worker.engine.step_times import STOPPED, Part, StepTimes, Stopwatch
from worker.engine.time_breakdowns import TimeBreakdowns
from worker.engine.waiting import WaitingQueue
from worker.vllm_engine.core import Core, SampledTokens, ScheduledRow, ScheduledStep

log = logs.get_logger(__name__)

#: Seconds to sleep after a step in which nothing could be computed, while grammars are compiled.
_EMPTY_STEP_S = 0.001
_NO_TABLES = np.zeros((0, 0), np.int32)


class VllmEngine:
    """Engine over a core of vLLM.

    Each step that computes something runs in the context manager that ``within`` returns. The
    arguments of ``within`` are the number of the step, from 0, and its number of tokens.
    ``stopwatch`` times the parts of steps. ``sleep`` is called with seconds after a step that could
    compute nothing.
    """

    def __init__(
        self,
        core: Core,
        limits: Limits,
        within: Callable[[int, int], AbstractContextManager[object]] = lambda *_: nullcontext(),
        stopwatch: Stopwatch = STOPPED,
        sleep: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._core = core
        self._limits = limits
        self._within = within
        self._stopwatch = stopwatch
        self._sleep = sleep
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._running: dict[SequenceKey, Sequence] = {}
        #: sequences that vLLM has not admitted, or has preempted; it has an order of its own
        self._waiting = WaitingQueue()
        self._free_slots = list(range(limits.max_num_seqs))
        #: outcomes of sequences that vLLM refused, for the next step
        self._refused: list[Outcome] = []
        self._victims: list[Sequence] = []
        self._now = 0.0
        self._is_empty_step = False
        self._order = 0
        self._step = 0
        self._output_tokens = 0
        self._preemptions = 0
        self._computed_tokens = 0
        self._kv_tokens = 0
        self._num_pairs = 0
        self._released_blocks = 0
        self._counters = Counters()
        self.breakdowns: TimeBreakdowns | None = None
        self.before_admission: Callable[[list[Sequence]], None] | None = None

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def image_processor(self) -> ImageProcessor | None:
        return self._core.image_processor

    @property
    def adapter_slots(self) -> None:
        return None

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._refused)

    @property
    def is_in_flight(self) -> bool:
        return False

    def set_policy(self, name: EnginePolicy) -> None:
        """Do nothing, because vLLM has a policy of its own."""
        log.info("engine policy has no effect on vLLM", policy=name)

    def add(self, sequence: Sequence) -> None:
        sequence.order, self._order = self._order, self._order + 1
        try:
            self._core.add(sequence)
        except InvalidRequest as error:
            self._refused.append(sequence.outcome(Stop.REFUSED, error))
            return
        self._sequences[sequence.key] = sequence
        self._waiting.push(sequence)

    def abort(self, abort: Abort) -> None:
        keys = [key for key in self._sequences if key in abort]
        self._core.remove(keys)
        for key in keys:
            self._remove(self._sequences[key])

    def sequences(self) -> list[Sequence]:
        return [*self._sequences.values()]

    def unready_slots(self) -> frozenset[int]:
        """Return no slots, because vLLM itself waits for grammars."""
        return frozenset()

    def commit_in_flight(self) -> list[Outcome]:
        return []

    def digest(self) -> bytes:
        """Return empty bytes, because vLLM keeps its own ranks in step."""
        return b""

    def step(self, held_slots: Collection[int] = (), now: float = 0.0) -> list[Outcome]:
        self._stopwatch.start()
        refused, self._refused = self._refused, []
        if not self._sequences:
            return refused
        self._now, self._is_empty_step = now, True
        try:
            with ExitStack() as watch:
                sampled = self._core.step(lambda step: self._begin_step(step, watch))
        except Exception as error:
            log.exception("step failed", step=self._step)
            raise EngineBroken(f"step {self._step}: {error!r}") from error
        if self._is_empty_step:
            self._sleep(_EMPTY_STEP_S)
        else:
            self._stopwatch.lap(Part.MODEL)
        outcomes = [self._commit(each) for each in sampled if each.key in self._sequences]
        victims, self._victims = self._victims, []
        outcomes += [victim.outcome() for victim in victims if victim.is_preempted]
        self._stopwatch.lap(Part.COMMIT)
        return [*refused, *outcomes]

    def _begin_step(self, step: ScheduledStep, watch: ExitStack) -> None:
        """Record what a step computes, before it runs, and enter the step's context manager."""
        self._stopwatch.lap(Part.SCHEDULE)
        self._is_empty_step = False
        number, self._step = self._step, self._step + 1
        vacated = [self._preempt(self._running[key]) for key in step.preempted]
        starts = {row.key: row.start for row in step.rows}
        newcomers = [self._sequences[key] for key in step.admitted]
        for sequence in newcomers:
            self._admit(sequence, sequence.position_of(starts[sequence.key]))
        rows = self._rows(step.rows)
        self._count(rows, step.rows)
        if self.before_admission is not None and newcomers:
            self.before_admission(newcomers)
        if self.breakdowns is not None:
            self.breakdowns.begin_step(rows, vacated, newcomers, self._now)
        for row in step.rows:
            sequence = self._running[row.key]
            sequence.num_computed = sequence.position_of(row.start + row.count)
        watch.enter_context(self._within(number, rows.num_tokens))

    def _admit(self, sequence: Sequence, num_cached: int) -> None:
        self._waiting.remove(sequence)
        sequence.slot = heappop(self._free_slots)
        sequence.num_computed = num_cached
        self._counters.prompt_tokens += 0 if sequence.is_preempted else sequence.num_known
        self._counters.prefix_hit_tokens += 0 if sequence.is_preempted else num_cached
        sequence.mark_admitted(self._now)
        self._running[sequence.key] = sequence

    def _preempt(self, sequence: Sequence) -> int:
        """Take a sequence out of the batch, and return the slot that it had."""
        slot = self._vacate(sequence)
        sequence.num_computed_before = sequence.most_computed
        self._released_blocks += _num_blocks(sequence)
        sequence.num_computed = 0
        sequence.mark_preempted()
        self._waiting.push(sequence)
        self._preemptions += 1
        self._victims.append(sequence)
        return slot

    def _vacate(self, sequence: Sequence) -> int:
        slot, sequence.slot = sequence.slot, NO_SLOT
        del self._running[sequence.key]
        heappush(self._free_slots, slot)
        return slot

    def _rows(self, rows: Collection[ScheduledRow]) -> Rows:
        running = [self._running[row.key] for row in rows]
        counts = np.array([row.count for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        known = [sequence.num_known + sequence.num_image_tokens for sequence in running]
        ends = np.array(known, np.int64)
        return Rows(
            slots=np.array([sequence.slot for sequence in running], np.int64),
            starts=starts,
            counts=counts,
            num_drafts=np.zeros_like(counts),
            samples=starts + counts >= ends,
            scores_prompt=np.zeros(len(counts), np.bool_),
            tokens=np.zeros(int(counts.sum()), np.int64),
            tables=_NO_TABLES,
        )

    def _count(self, rows: Rows, scheduled: Iterable[ScheduledRow]) -> None:
        self._computed_tokens += rows.num_tokens
        self._kv_tokens += rows.kv_tokens
        self._num_pairs += rows.num_pairs
        self._counters.slot_steps += len(rows)
        for row in scheduled:
            sequence = self._running[row.key]
            start = sequence.position_of(row.start)
            end = min(sequence.position_of(row.start + row.count), sequence.num_computed_before)
            if end > start:
                self._counters.recomputed_tokens += end - start
                sequence.count_recomputed(end - start)

    def _commit(self, sampled: SampledTokens) -> Outcome:
        """Append sampled tokens to their sequence, and return the outcome that reports them."""
        sequence = self._sequences[sampled.key]
        offset = sequence.num_output
        sequence.tokens.extend(sampled.tokens)
        self._output_tokens += len(sampled.tokens)
        stop = sampled.stop
        if stop is None and sampled.tokens and sequence.stop(self._limits) is not None:
            # vLLM and Everlift agree on ends; this is a fault of one of them.
            self._core.remove([sampled.key])
            stop = sequence.stop(self._limits)
        outcome = Outcome(
            sequence.key,
            offset,
            sampled.tokens,
            stop,
            sampled.error,
            sampled.logprobs,
            1 if sampled.prompt_logprobs else 0,
            sampled.prompt_logprobs,
            sequence.most_computed,
            sequence.take_update(),
        )
        if stop is not None:
            self._remove(sequence)
        return outcome

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._released_blocks += _num_blocks(sequence)
            slot = self._vacate(sequence)
            if self.breakdowns is not None:
                self.breakdowns.drop_slots([slot])

    def take_chunk_changes(self) -> ChunkChanges:
        return self._core.take_chunk_changes()

    def step_times(self) -> StepTimes:
        return self._stopwatch.times

    def load(self) -> Load:
        running, waiting = self._running.values(), self._waiting
        num_blocks = self._limits.num_blocks
        return Load(
            num_running=len(running),
            num_waiting=len(waiting),
            blocks_used=num_blocks - self._core.num_free_blocks,
            blocks_total=num_blocks,
            pending_prefill_tokens=waiting.num_uncached
            + sum(max(0, it.remaining - 1) for it in running),
            committed_tokens=waiting.num_tokens + sum(it.num_known for it in running),
            step=self._step,
            output_tokens=self._output_tokens,
            preemptions=self._preemptions,
            counters=self._counters,
            computed_tokens=self._computed_tokens,
            released_blocks=self._released_blocks,
            kv_tokens=self._kv_tokens,
            num_pairs=self._num_pairs,
            waiting_cached_tokens=waiting.num_tokens - waiting.num_uncached,
        )

    def occupants(self) -> tuple[Occupant, ...]:
        running = sorted(self._running.values(), key=lambda it: it.slot)
        return tuple(Occupant(it.slot, it.request_id, it.remaining > 1) for it in running)

    def prefilling(self) -> list[Sequence]:
        return [sequence for sequence in self._running.values() if sequence.remaining > 1]

    def check_integrity(self) -> None:
        slots = [sequence.slot for sequence in self._running.values()]
        assert sorted([*slots, *self._free_slots]) == [*range(self._limits.max_num_seqs)]
        assert self._running.keys() <= self._sequences.keys()
        assert len(self._running) + len(self._waiting) == len(self._sequences)
        if not self._sequences:
            assert self._core.num_free_blocks == self._limits.num_blocks, "blocks leak"

    def close(self) -> None:
        self._core.close()


def _num_blocks(sequence: Sequence) -> int:
    """Return the number of blocks that the computed tokens of a sequence take."""
    return blocks_for(sequence.num_computed + sequence.num_image_tokens)
