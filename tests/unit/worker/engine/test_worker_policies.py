"""Admissions and decodes of the same sequences under each policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlift.engine_policy import EnginePolicy
from tests.support.example_counts import examples
from tests.support.worker.scheduler_bench import Bench, result
from tests.support.worker.worker_support import limits, prompt, sequence, under_each_policy
from worker.config import Scheduling
from worker.engine.limits import Limits
from worker.engine.policies.serving_time import BatchSize, ServingTime
from worker.engine.policies.similar_batches import band_begins
from worker.engine.sequence import NO_SLOT, Sequence
from worker.engine.waiting import WaitingQueue

STATIC = Scheduling("static")
MAGNUS = Scheduling("magnus")
#: Ageing is negligible: the order is by length alone.
SLAI = Scheduling("slai", tbt_target=4.0, ageing_tokens=1)
CONTINUOUS = Scheduling(ageing_tokens=1)
short_first = pytest.mark.parametrize("scheduling", [SLAI, CONTINUOUS], ids=lambda it: it.policy)


def present(bench: Bench) -> set[int]:
    """Return the epochs of the sequences in the batch."""
    return {s.key.epoch for s in bench.scheduler if s.slot != NO_SLOT}


def step_at(bench: Bench, now: float) -> list[tuple[int, int, int]]:
    """Run a step that begins ``now``; return (slot, start, tokens) of each row."""
    plan = bench.plan(now)
    bench.commit(plan)
    return [(row.slot, row.start, len(row.tokens)) for row in plan.rows]


# static


def test_static_batch_is_closed_until_complete() -> None:
    bench = Bench(limits(num_blocks=16, max_num_seqs=2, scheduling=STATIC))
    for epoch, max_tokens in ((1, 2), (2, 5), (3, 2), (4, 2)):
        bench.add(epoch, 3, max_tokens)
    batches = []
    while len(bench.scheduler):
        bench.step()
        batches.append(present(bench))
    assert batches == [{1, 2}, {2}, {2}, {2}, set(), {3, 4}, set()]


def test_static_batch_excludes_later_arrivals() -> None:
    bench = Bench(limits(scheduling=STATIC))
    bench.add(1, 3, max_tokens=3)
    bench.step()
    bench.add(2, 3)
    bench.steps(2)
    assert present(bench) == set()
    bench.step()
    assert present(bench) == {2}


def test_static_batch_enters_over_several_steps() -> None:
    bench = Bench(limits(max_num_batched_tokens=4, scheduling=STATIC))
    for epoch in (1, 2, 3):
        bench.add(epoch, 3, max_tokens=20, first=100 * epoch)
    bench.step()
    bench.add(4, 3)
    bench.steps(10)
    assert present(bench) == {1, 2, 3}


def test_preempted_member_precedes_the_next_batch() -> None:
    bench = Bench(limits(scheduling=STATIC))
    first, second = bench.add(1, 40, first=100), bench.add(2, 3)
    bench.step()
    bench.add(3, 3)
    bench.scheduler.preempt(first)
    bench.step()
    assert present(bench) == {1, 2}
    for member in (first, second):
        bench.scheduler.remove(member)
    bench.step()
    assert present(bench) == {3}


# magnus


def predicted(bench: Bench, epoch: int, tokens: int, length: int = 3) -> Sequence:
    """Add a sequence that generates as many tokens as predicted."""
    return bench.add(epoch, length, max_tokens=tokens, first=100 * epoch, predicted_tokens=tokens)


def batches(bench: Bench, seconds: float = 1.0) -> list[set[int]]:
    """Run all sequences, with steps of ``seconds``; return the epochs of each batch."""
    found: list[set[int]] = []
    now = 0.0
    while len(bench.scheduler):
        plan = bench.plan(now)
        now += seconds
        there = present(bench)
        bench.commit(plan)
        if not found or not there <= found[-1]:
            found.append(there)
    return found


@pytest.mark.parametrize("waste", [0.0, 0.1, 0.25, 0.7])
def test_band_begins_bound_waste_within_band(waste: float) -> None:
    begins = band_begins(waste, 1000)
    assert begins[0] == 1 and begins[-1] > 1000
    for begin, after in pairwise(begins):
        assert begin < after
        assert begin >= (1 - waste) * (after - 1)
        assert begin < (1 - waste) * after, "no more bands than it takes"


def test_magnus_batches_have_similar_predicted_lengths() -> None:
    bench = Bench(limits(num_blocks=16, max_num_seqs=3, scheduling=MAGNUS))
    for epoch, tokens in enumerate((8, 30, 9, 31, 32, 8, 9), 1):
        predicted(bench, epoch, tokens)
    assert batches(bench) == [{1, 3, 6}, {7}, {2, 4, 5}]


def test_magnus_batch_fits_the_predicted_cache() -> None:
    bench = Bench(limits(num_blocks=7, max_num_seqs=4, watermark_blocks=1, scheduling=MAGNUS))
    for epoch in (1, 2, 3, 4):
        predicted(bench, epoch, 50, length=10)
    assert batches(bench) == [{1, 2, 3}, {4}]
    assert bench.scheduler.load().preemptions == 0


def test_magnus_serves_sequence_with_oversized_prediction() -> None:
    bench = Bench(limits(num_blocks=2, scheduling=MAGNUS))
    bench.add(1, 3, max_tokens=9, predicted_tokens=90)
    assert batches(bench) == [{1}]


def test_magnus_long_batch_runs_after_proportional_wait() -> None:
    """A step takes 1 s for one token of a sequence: the long sequence takes 40 s."""
    bench = Bench(limits(num_blocks=32, max_num_seqs=1, scheduling=MAGNUS))
    predicted(bench, 1, 40)
    for epoch in range(2, 12):
        predicted(bench, epoch, 4)
    served = batches(bench)
    assert served[0] == {2}, "all came at once, and the shorter one does not wait for the longer"
    assert served == [*({epoch} for epoch in range(2, 12)), {1}]

    waiting = Bench(limits(num_blocks=32, max_num_seqs=1, scheduling=MAGNUS))
    predicted(waiting, 1, 10)
    waiting.commit(waiting.plan(0.0))
    predicted(waiting, 2, 40)
    waiting.commit(waiting.plan(1.0))
    now = 1000.0
    predicted(waiting, 3, 4)
    while waiting.scheduler.load().num_waiting == 2:
        waiting.commit(waiting.plan(now))
        now += 1.0
    assert present(waiting) == {2}, "1,000 s for 40 s are more than 10 s for 4 s"


def test_magnus_arrival_inherits_no_wait_of_departed_band() -> None:
    """Steps take 1 s; a short sequence arrives as soon as no other one of its band waits."""
    bench = Bench(limits(num_blocks=32, max_num_seqs=1, scheduling=MAGNUS))
    predicted(bench, 1, 4)
    bench.commit(bench.plan(0.0))
    long = predicted(bench, 2, 40)
    step = 0
    while long.slot == NO_SLOT and step < 1000:
        if bench.scheduler.load().num_waiting == 1:
            predicted(bench, 3 + step, 4)
        step += 1
        bench.commit(bench.plan(float(step)))
    assert step < 100


def test_magnus_serves_higher_priority_first() -> None:
    bench = Bench(limits(max_num_seqs=1, scheduling=MAGNUS))
    predicted(bench, 1, 2)
    bench.add(2, 3, max_tokens=40, priority=1)
    assert batches(bench) == [{2}, {1}]


def test_serving_time_is_estimated_from_similar_batches() -> None:
    estimator = ServingTime()
    assert estimator.estimate(BatchSize(8, 100, 50)) == 50.0, "nothing is known"
    for size, token_s in ((8, 0.01), (9, 0.02), (7, 0.03), (64, 0.5), (60, 0.5), (70, 0.5)):
        estimator.learn(BatchSize(size, 100, 200), 200 * token_s)
    assert estimator.estimate(BatchSize(8, 100, 50)) == pytest.approx(50 * 0.02)
    assert estimator.estimate(BatchSize(66, 100, 50)) == pytest.approx(50 * 0.5)


# continuous and slai


@short_first
def test_policy_admits_shortest_prompt_first(scheduling: Scheduling) -> None:
    bench = Bench(limits(max_num_seqs=1, scheduling=scheduling))
    for epoch, length in ((1, 40), (2, 20), (3, 30)):
        bench.add(epoch, length, max_tokens=1, first=100 * epoch)
    came = []
    while len(bench.scheduler):
        plan = bench.plan()
        came += [bench.scheduler._batch[row.slot].key.epoch for row in plan.rows]
        bench.commit(plan)
    assert came == [2, 3, 1]


@short_first
def test_short_prompt_is_not_delayed_by_long_prompt(scheduling: Scheduling) -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=40, scheduling=scheduling))
    bench.add(1, 200)
    bench.step()
    bench.add(2, 20, first=500)
    assert bench.step() == [(0, 40, 20), (1, 0, 20)]


@short_first
def test_cached_prompt_counts_as_the_tokens_that_it_lacks(scheduling: Scheduling) -> None:
    bench = Bench(limits(num_blocks=32, max_num_batched_tokens=40, scheduling=scheduling))
    bench.add(1, 320, max_tokens=1)
    bench.steps(9)
    bench.add(2, 200, first=500)
    bench.step()
    bench.add(3, 325, expected_cached_tokens=320)
    bench.add(4, 60, first=900)
    assert bench.step() == [(1, 320, 5), (2, 0, 35)]


@pytest.mark.parametrize("policy", ["continuous", "slai"])
def test_ageing_shortens_waiting_prompt(policy: EnginePolicy) -> None:
    ageing = Scheduling(policy, ageing_tokens=10)
    bench = Bench(limits(max_num_seqs=1, scheduling=ageing))
    long = bench.add(1, 60)
    for epoch in range(2, 9):
        bench.add(epoch, 10, max_tokens=1, first=100 * epoch)
    bench.steps(4)
    assert long.slot == NO_SLOT
    bench.step()
    assert long.slot == 0, "by the fifth that came after it, it counts as no longer than that"


def test_slai_decode_with_slack_yields_to_a_prefill() -> None:
    """Steps take 1 s, and a token is due 4 s after the previous one."""
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=20, scheduling=SLAI))
    bench.add(1, 5)
    step_at(bench, 0.0)
    bench.add(2, 90, first=500)
    assert [step_at(bench, float(now)) for now in range(1, 8)] == [
        [(1, 0, 20)],
        [(1, 20, 20)],
        [(0, 5, 1), (1, 40, 19)],  # due at 5, and the step after this one ends at 5
        [(1, 59, 20)],
        [(0, 6, 1), (1, 79, 11)],  # the budget suffices for all
        [(0, 7, 1), (1, 90, 1)],
        [(0, 8, 1), (1, 91, 1)],
    ]


def test_slai_longer_steps_advance_decode_deadlines() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=20, scheduling=SLAI))
    bench.add(1, 5)
    step_at(bench, 0.0)
    bench.add(2, 90, first=500)
    assert step_at(bench, 2.0) == [(0, 5, 1), (1, 0, 19)], "two more steps of 2 s end at 6"


def test_slai_idle_time_is_not_counted_as_step() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=20, scheduling=SLAI))
    bench.add(1, 5, max_tokens=1)
    step_at(bench, 0.0)
    bench.add(2, 5)
    step_at(bench, 100.0)
    bench.add(3, 90, first=500)
    assert step_at(bench, 101.0) == [(1, 0, 20)]


def test_slai_prefers_longest_waiting_decodes() -> None:
    """The budget is smaller than the batch, as after a step that ran out of memory."""
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=8, scheduling=SLAI))
    for epoch in (1, 2, 3, 4):
        bench.add(epoch, 2, first=100 * epoch)
    step_at(bench, 0.0)
    bench.scheduler._budget.shrink(4)
    assert [[row[0] for row in step_at(bench, now)] for now in (10.0, 20.0)] == [[0, 1], [2, 3, 0]]


# bounds of slai


@dataclass(frozen=True)
class Coming:
    """Sequence that arrives before the step in which it is listed."""

    length: int
    max_tokens: int
    priority: int


comings = st.builds(Coming, st.integers(1, 60), st.integers(1, 12), st.sampled_from([0, 0, 0, 1]))
#: (arrivals, seconds) of each step.
steps = st.lists(
    st.tuples(st.lists(comings, max_size=3), st.floats(0.2, 3.0)), min_size=1, max_size=25
)
configs = st.builds(
    Scheduling, st.just("slai"), tbt_target=st.floats(0.5, 12.0), ageing_tokens=st.integers(1, 20)
)


class Clocked:
    """Scheduler with the policy slai in virtual time, with its admissions and token times."""

    def __init__(self, config: Scheduling) -> None:
        self.limits = _roomy(config)
        self.bench = Bench(self.limits)
        self.config = config
        self.now = 0.0
        self.admitted: list[Sequence] = []
        #: Time of the newest token of each sequence.
        self.drawn: dict[Sequence, float] = {}
        self.lateness: list[float] = []

    def take_in(self, arrivals: Iterable[Coming]) -> None:
        for each in arrivals:
            epoch = self.bench.scheduler._arrivals + 1
            tokens = prompt(each.length, first=epoch * 61)
            fields = {"max_tokens": each.max_tokens, "priority": each.priority}
            self.bench.scheduler.add(sequence(self.limits, epoch, tokens, **fields))

    def step(self, seconds: float) -> None:
        """Run a step, in which each sequence whose deadline has passed must decode."""
        scheduler = self.bench.scheduler
        plan = self.bench.plan(self.now)
        self.admitted += [scheduler._batch[admission.slot] for admission in plan.admissions]
        served = {row.slot for row in plan.rows}
        for this, drawn in self.drawn.items():
            assert this.slot in served or drawn + self.config.tbt_target > self.now, "it waits"
        rows = [(scheduler._batch[row.slot], row.samples) for row in plan.rows]
        self.now += seconds
        self.bench.commit(plan)
        for this, samples in rows:
            if samples and this in self.drawn:
                due = self.drawn[this] + self.config.tbt_target
                self.lateness.append(self.now - due)
            if samples:
                self.drawn[this] = self.now
        self.drawn = {s: at for s, at in self.drawn.items() if s.slot != NO_SLOT}


def _roomy(config: Scheduling) -> Limits:
    """Return limits that suffice for all decodes, but not for all prompts at once."""
    return limits(
        num_blocks=200,
        max_num_seqs=16,
        max_num_batched_tokens=24,
        watermark_blocks=0,
        scheduling=config,
    )


@settings(max_examples=examples(100))
@given(configs, steps)
def test_slai_decode_misses_deadline_by_at_most_one_step(
    config: Scheduling, steps: list[tuple[list[Coming], float]]
) -> None:
    clocked = Clocked(config)
    for arrivals, seconds in steps:
        clocked.take_in(arrivals)
        clocked.step(seconds)
    while len(clocked.bench.scheduler):
        clocked.step(1.0)
    longest = max(1.0, *(seconds for _, seconds in steps))
    assert all(late < 2 * longest for late in clocked.lateness)


@settings(max_examples=examples(50))
@given(configs, steps, st.floats(0.1, 0.25))
def test_slai_misses_no_target_with_equal_steps(
    config: Scheduling, steps: list[tuple[list[Coming], float]], seconds: float
) -> None:
    clocked = Clocked(config)
    for arrivals, _ in steps:
        clocked.take_in(arrivals)
        clocked.step(seconds)
    assert all(late < 1e-6 for late in clocked.lateness)


@settings(max_examples=examples(50))
@given(
    st.sampled_from(("continuous", "slai")),
    st.integers(1, 20),
    st.lists(st.lists(comings, max_size=4), min_size=1, max_size=20),
)
def test_policy_bounds_overtaking_and_serves_all(
    policy: EnginePolicy, ageing_tokens: int, arrivals: list[list[Coming]]
) -> None:
    clocked = Clocked(Scheduling(policy, tbt_target=2.0, ageing_tokens=ageing_tokens))
    for each in arrivals:
        clocked.take_in(each)
        clocked.step(1.0)
    while len(clocked.bench.scheduler):
        clocked.step(1.0)
    assert len(clocked.admitted) == clocked.bench.scheduler._arrivals
    for place, this in enumerate(clocked.admitted):
        overtook = [
            other
            for other in clocked.admitted[:place]
            if other.priority == this.priority and other.order > this.order
        ]
        assert len(overtook) * ageing_tokens < this.num_prompt


# change of policy at run time


def presence(bench: Bench, steps: int) -> list[set[int]]:
    """Return the sequences in the batch after each step."""
    found = []
    for _ in range(steps):
        bench.step()
        found.append(present(bench))
    return found


@pytest.mark.parametrize("policy", ["static", "magnus"])
def test_policy_change_closes_batch_of_running_and_preempted(
    policy: EnginePolicy,
) -> None:
    bench = Bench(limits(max_num_seqs=4))
    for epoch, max_tokens in ((1, 2), (2, 5), (3, 4)):
        bench.add(epoch, 3, max_tokens, first=100 * epoch)
    bench.step()
    bench.scheduler.preempt(bench.scheduler.of_epoch(3)[0])
    bench.add(4, 3)
    bench.scheduler.set_policy(policy)
    assert presence(bench, 5) == [{2, 3}, {2, 3}, {2}, set(), {4}]


@pytest.mark.parametrize("before", [STATIC, MAGNUS], ids=["static", "magnus"])
def test_policy_change_to_continuous_admits_all_waiting(before: Scheduling) -> None:
    bench = Bench(limits(scheduling=before))
    bench.add(1, 3)
    bench.step()
    bench.add(2, 3)
    bench.add(3, 3)
    assert presence(bench, 1) == [{1}]
    bench.scheduler.set_policy("continuous")
    assert presence(bench, 1) == [{1, 2, 3}]


def test_policy_change_keeps_unadmitted_batch_members_waiting() -> None:
    scheduling = replace(STATIC, ageing_tokens=1)
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=5, scheduling=scheduling))
    for epoch, length in ((1, 5), (2, 30), (3, 10)):
        bench.add(epoch, length, first=100 * epoch)
    assert presence(bench, 1) == [{1}]
    bench.scheduler.set_policy("slai")
    assert presence(bench, 1) == [{1, 3}], "the shorter prompt"


def test_slai_deadlines_begin_at_policy_change() -> None:
    bench = Bench(replace(limits(num_blocks=16, max_num_batched_tokens=20), scheduling=SLAI))
    bench.scheduler.set_policy("continuous")
    bench.add(1, 5)
    step_at(bench, -9.0)
    bench.scheduler.set_policy("slai")
    bench.add(2, 90, first=500)
    assert [step_at(bench, float(now)) for now in range(1, 4)] == [
        [(1, 0, 20)],
        [(1, 20, 20)],
        [(0, 5, 1), (1, 40, 19)],  # due at 5, as if its last token had come at 1
    ]


def test_policy_change_keeps_order_of_arrival() -> None:
    bench = Bench(limits(num_blocks=64, max_num_seqs=1, scheduling=MAGNUS))
    for epoch, tokens in ((1, 9), (2, 40), (3, 8), (4, 41), (5, 9)):
        predicted(bench, epoch, tokens)
    bench.scheduler.set_policy("static")
    assert batches(bench) == [{1}, {2}, {3}, {4}, {5}]


@under_each_policy
def test_policy_step_does_not_iterate_waiting_line(
    scheduling: Scheduling, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(limits(max_num_seqs=2, scheduling=scheduling))
    for epoch in range(1, 200):
        bench.add(epoch, 3, max_tokens=1 + epoch % 3)
    bench.step()
    monkeypatch.setattr(WaitingQueue, "__iter__", None)
    for _ in range(20):
        plan = bench.plan()
        bench.scheduler.commit(plan, [result(row) for row in plan.rows])
        bench.scheduler.load()
    assert 100 < bench.scheduler.load().num_waiting < 190
