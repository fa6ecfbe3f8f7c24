"""Sequences whose grammars are not ready skip steps, and do not delay others."""

from __future__ import annotations

from dataclasses import replace

from everlift.sampling import Grammar, GrammarKind
from tests.support.worker.scheduler_bench import Bench
from tests.support.worker.worker_support import GREEDY, limits, under_each_policy
from worker.config import Scheduling
from worker.engine.plan import Row

CONSTRAINED = replace(GREEDY, grammar=Grammar(GrammarKind.REGEX, ("a*",)))


def bench(scheduling: Scheduling | None = None) -> Bench:
    bounds = limits(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=64, scheduling=scheduling)
    return Bench(bounds)


def rows(this: Bench, *held: int) -> tuple[Row, ...]:
    """Run a step in which the slots ``held`` are held, and return its rows."""
    plan = this.scheduler.schedule(frozenset(held))
    this.commit(plan)
    return plan.rows


def slots(this: Bench, *held: int) -> list[int]:
    return [row.slot for row in rows(this, *held)]


@under_each_policy
def test_held_sequence_skips_step_and_resumes(
    scheduling: Scheduling,
) -> None:
    this = bench(scheduling)
    first, second = this.add(1, 5), this.add(2, 5)
    this.step()
    assert slots(this, first.slot) == [second.slot]
    assert (first.num_output, second.num_output) == (1, 2)
    assert slots(this) == [first.slot, second.slot]


@under_each_policy
def test_step_waits_for_held_sequences_in_turn(
    scheduling: Scheduling,
) -> None:
    this = bench(scheduling)
    everybody = [this.add(epoch, 5) for epoch in (1, 2, 3)]
    this.step()
    taken = [slots(this, 0, 1, 2) for _ in range(6)]
    assert sorted(taken[:3]) == [[0], [1], [2]] and taken[3:] == taken[:3]
    assert [sequence.num_output for sequence in everybody] == [3, 3, 3]


def test_step_waits_for_longest_held_sequence() -> None:
    this = bench()
    for epoch in (1, 2, 3):
        this.add(epoch, 5)
    this.step()
    assert slots(this, 2) == [0, 1]
    assert slots(this, 1, 2) == [0]
    assert [slots(this, 0, 1, 2) for _ in range(4)] == [[2], [1], [0], [2]]


def test_step_waits_for_held_last_chunk() -> None:
    this = bench()
    this.add(1, 100)
    this.step()
    assert [(len(row.tokens), row.samples) for row in rows(this, 0)] == [(36, True)]


def test_new_sequence_is_admitted_while_others_are_held() -> None:
    this = bench()
    first = this.add(1, 5)
    this.step()
    newcomer = this.add(2, 5)
    assert slots(this, first.slot) == [newcomer.slot]


def test_held_prompt_is_computed_up_to_last_chunk() -> None:
    this = bench()
    this.add(1, 5)
    this.step()
    long = this.add(2, 150)
    this.step()
    assert long.slot == 1
    counts = [[len(row.tokens) for row in rows(this, long.slot)] for _ in range(3)]
    assert counts == [[1, 63], [1], [1]]
    assert [row.samples for row in rows(this)] == [True, True]


def test_grammar_sequence_draws_in_step_after_admission() -> None:
    this = bench()
    this.add(1, 5, sampling=CONSTRAINED)
    steps = [[(len(row.tokens), row.samples) for row in rows(this)] for _ in range(2)]
    assert steps == [[(4, False)], [(1, True)]]


def test_single_token_grammar_prompt_draws_at_once() -> None:
    this = bench()
    this.add(1, 1, sampling=CONSTRAINED)
    assert [row.samples for row in rows(this)] == [True]
