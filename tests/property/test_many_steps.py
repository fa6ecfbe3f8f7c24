"""Several decode steps at once equal the same number of single steps, in every trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.simulator.multi_step import MultiStepScheduler
from tests.support.worker.worker_support import POLICIES, limits, sequence
from worker.config import Scheduling
from worker.engine.limits import Limits
from worker.engine.outcome import NO_UPDATE, Outcome
from worker.engine.plan import NOTHING_SAMPLED, Plan, RowResult
from worker.engine.sequence import Sequence

#: Token that is always sampled, so that an output fills the same blocks as other outputs and
#: prompts.
DRAWN = 5


@dataclass(frozen=True)
class Come:
    """Sequence that arrives: ``stem`` common tokens and ``own`` tokens of its own.

    ``done`` of its output tokens are known already.
    """

    stem: int
    own: int
    done: int
    max_tokens: int
    priority: int
    session: int

    @property
    def most_known(self) -> int:
        return self.stem + self.own + 1 + self.done + self.max_tokens

    def sequence(self, bounds: Limits, epoch: int) -> Sequence:
        own = [100 + epoch] * self.own
        prompt, output = [*[DRAWN] * self.stem, *own, DRAWN], [DRAWN] * self.done
        computed = self.done and len(prompt) + self.done - 1
        fields: dict[str, Any] = {"output": output, "num_computed": computed}
        return sequence(
            bounds,
            epoch,
            prompt,
            max_tokens=self.done + self.max_tokens,
            priority=self.priority,
            session=self.session,
            **fields,
        )


@dataclass(frozen=True)
class Turn:
    """Arrivals, then a removal and a preemption by index, then up to ``most`` steps."""

    come: list[Come]
    leave: int | None
    preempt: int | None
    most: int


comes = st.builds(
    Come,
    stem=st.sampled_from([0, 0, 31, 32, 64, 230, 256]),
    own=st.integers(0, 40),
    done=st.sampled_from([0, 0, 0, 1, 40]),
    max_tokens=st.integers(1, 150),
    priority=st.integers(0, 1),
    session=st.integers(0, 2),
)
turns = st.builds(
    Turn,
    come=st.lists(comes, max_size=2),
    leave=st.none() | st.integers(0, 3),
    preempt=st.none() | st.integers(0, 3),
    most=st.integers(1, 120),
)
bounds = st.builds(
    limits,
    num_blocks=st.integers(8, 24),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.sampled_from([8, 64]),
    max_model_len=st.sampled_from([400, 4096]),
    scheduling=st.sampled_from([*POLICIES.values()]),
    session_retention_s=st.sampled_from([1.0, 20.0]),
    max_retained_blocks=st.sampled_from([0, 4, 24]),
)
#: Steps per second.
RATE = 4


def results(plan: Plan) -> list[RowResult]:
    drawn = RowResult((DRAWN,))
    return [drawn if samples else NOTHING_SAMPLED for samples in plan.rows.samples.tolist()]


def now(scheduler: MultiStepScheduler) -> float:
    """Return the time at which the next step begins."""
    return scheduler.load().step / RATE


def step(scheduler: MultiStepScheduler) -> list[Outcome]:
    """Run one step like a worker that does not know the sampled tokens."""
    plan = scheduler.schedule(now=now(scheduler))
    return scheduler.commit(plan, results(plan)) if plan.rows else []


def steps_at_once(scheduler: MultiStepScheduler, count: int) -> list[Outcome]:
    first = scheduler.load().step
    return scheduler.decode(DRAWN, [(first + number) / RATE for number in range(count)])


def drawn_step(scheduler: MultiStepScheduler) -> list[Outcome]:
    plan = scheduler.schedule(now=now(scheduler))
    return scheduler.commit_sampled(plan, DRAWN) if plan.rows else []


def is_news(outcome: Outcome) -> bool:
    return outcome.update != NO_UPDATE or outcome.stop is not None


def state(scheduler: MultiStepScheduler) -> object:
    """Return the whole state of a scheduler, for comparison."""
    batch = scheduler._batch
    pool, slot_table = batch._pool, batch.slot_table
    sequences = [
        (
            it.key,
            it.tokens,
            it.num_computed,
            it.slot,
            it.block_table,
            it.pending_update,
            it.is_preempted,
        )
        for it in sorted(scheduler, key=lambda it: it.order)
    ]
    free = (list(pool._free), pool._free.num_retained, pool._free._owners)
    blocks = (pool._users, pool._hashes, pool._by_hash, free, pool.num_cached)
    return (
        sequences,
        blocks,
        slot_table._numbers.tolist(),
        scheduler.load(),
        scheduler._budget.tokens,
        sorted(batch._vacated),
    )


def disturb(scheduler: MultiStepScheduler, turn: Turn, come: list[Sequence]) -> None:
    for each in come:
        scheduler.add(each)
    present = sorted(scheduler, key=lambda it: it.order)
    if turn.leave is not None and turn.leave < len(present):
        scheduler.remove(present[turn.leave])
    running = [it for it in present if it.slot >= 0]
    if turn.preempt is not None and turn.preempt < len(running):
        scheduler.preempt(running[turn.preempt])


@given(bounds, st.lists(turns, min_size=1, max_size=12))
def test_multi_step_scheduler_matches_single_steps(bounds: Limits, history: list[Turn]) -> None:
    usual, one_by_one, at_once = schedulers = [MultiStepScheduler(bounds) for _ in range(3)]
    epoch = 0
    for turn in history:
        fitting = []
        for come in turn.come:
            epoch += 1
            small = replace(come, max_tokens=min(come.max_tokens, 100))
            if small.most_known <= 32 * bounds.num_blocks:
                fitting.append((small, epoch))
        for scheduler in schedulers:
            new = [come.sequence(bounds, number) for come, number in fitting]
            disturb(scheduler, turn, [it for it in new if it.stop(bounds) is None])
        steps = 0
        while steps < turn.most:
            count = at_once.num_uniform_steps(turn.most - steps)
            taken, used = at_once.blocks_allocated(count), at_once.load().blocks_used
            retained = [
                at_once.blocks_retained(now(at_once) + number / RATE, taken[number])
                for number in range(count)
            ]
            outcomes = steps_at_once(at_once, count) if count else drawn_step(at_once)
            for number in range(1, (count or 1) + 1):
                expected, drawn = step(usual), drawn_step(one_by_one)
                assert {*filter(is_news, expected)} <= {*drawn} <= {*expected}
                if number < count:
                    assert not drawn
                    assert one_by_one.load().blocks_used == used + taken[number - 1]
                    assert one_by_one.load().blocks_retained == retained[number - 1]
                changes = one_by_one.take_chunk_changes().device
                assert not (count and changes), "what a report in between would have said"
            assert drawn == outcomes
            assert changes == at_once.take_chunk_changes().device
            assert state(usual) == state(one_by_one) == state(at_once)
            steps += count or 1
        at_once.check_integrity()
    assert step(at_once) == step(one_by_one) == step(usual)


@given(bounds, st.lists(comes, min_size=1, max_size=4))
def test_multi_step_scheduler_counts_all_uniform_steps(bounds: Limits, come: list[Come]) -> None:
    """A sequence ends in the last counted step, or the next step is no uniform decode."""
    scheduler = MultiStepScheduler(replace(bounds, scheduling=Scheduling()))
    for epoch, each in enumerate(come, 1):
        if each.most_known <= 32 * bounds.num_blocks:
            # Without a session, no block is retained, so that the next eviction is known.
            new = replace(each, session=0).sequence(bounds, epoch)
            if new.stop(bounds) is None:
                scheduler.add(new)
    for _ in range(400):
        if count := scheduler.num_uniform_steps(1000):
            ended = steps_at_once(scheduler, count)
            assert ended or scheduler.num_uniform_steps(1000) == 0
        elif not (plan := scheduler.schedule()).rows:
            break
        else:
            scheduler.commit_sampled(plan, DRAWN)
    assert not len(scheduler)


def test_multi_step_scheduler_admits_on_newly_shared_block() -> None:
    bounds = limits(num_blocks=4)
    one_by_one, at_once = MultiStepScheduler(bounds), MultiStepScheduler(bounds)
    for scheduler in (one_by_one, at_once):
        scheduler.add(sequence(bounds, 1, [DRAWN] * 40, max_tokens=60))
        drawn_step(scheduler)
        scheduler.add(sequence(bounds, 2, [*[DRAWN] * 64, 7], max_tokens=5))
    steps = 0
    while steps < 40:
        count = at_once.num_uniform_steps(40 - steps)
        outcomes = steps_at_once(at_once, count) if count else drawn_step(at_once)
        drawn = [it for _ in range(count or 1) for it in drawn_step(one_by_one)]
        assert outcomes == drawn
        assert state(at_once) == state(one_by_one)
        steps += count or 1
    assert len(one_by_one) == 1, "the second one has not come in before blocks were free"
