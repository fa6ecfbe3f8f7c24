"""Log probabilities of prompts: rows that score, and reported outcomes."""

from __future__ import annotations

from everlift.sampling import SamplingParams
from tests.support.worker.scheduler_bench import TOKEN, Bench, result
from tests.support.worker.worker_support import limits
from worker.engine.outcome import Outcome, SequenceKey
from worker.engine.plan import RowResult

SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


def reported(outcomes: list[Outcome]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (first position, number of positions, tokens) of each outcome."""
    for outcome in outcomes:
        for position, score in enumerate(outcome.prompt_logprobs, outcome.prompt_offset):
            assert score.logprob == -position
    return [(o.prompt_offset, len(o.prompt_logprobs), o.tokens) for o in outcomes]


def test_scored_prompt_is_reported_chunk_by_chunk() -> None:
    bench = Bench(limits(max_num_batched_tokens=40))
    bench.add(1, 90, max_tokens=2, sampling=SCORED)
    plans = [bench.plan()]
    assert reported(bench.commit(plans[0])) == [(1, 40, ())]
    plans.append(bench.plan())
    assert reported(bench.commit(plans[1])) == [(41, 40, ())]
    plans.append(bench.plan())
    assert [row.scores_prompt for plan in plans for row in plan.rows] == [True] * 3
    key = SequenceKey(1, 0)
    row = plans[2].rows[0]
    scores = result(row).prompt_logprobs[: 89 - 80]
    outcomes = bench.scheduler.commit(plans[2], [RowResult((TOKEN,), prompt_logprobs=scores)])
    assert outcomes == [
        Outcome(key, 0, (TOKEN,), prompt_offset=81, prompt_logprobs=scores, num_computed=90)
    ]
    (row,) = bench.plan().rows
    assert not row.scores_prompt


def test_scored_prompt_takes_no_hits_but_provides_them() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=200))
    bench.add(1, 70)
    bench.step()
    bench.add(2, 70, sampling=SCORED)
    bench.add(3, 70, first=500, sampling=SCORED)
    bench.add(4, 70, first=500)
    assert bench.step() == [(0, 70, 1), (1, 0, 70), (2, 0, 70), (3, 64, 6)]


def test_prompt_scores_are_reported_once_despite_recompute() -> None:
    bench = Bench(limits(num_blocks=4, watermark_blocks=0, max_num_batched_tokens=45))
    this = bench.add(1, 100, sampling=SCORED)
    assert reported(bench.commit(bench.plan())) == [(1, 45, ())]
    bench.scheduler.preempt(this)
    bench.scheduler._batch._pool.unpublish(0)
    plan = bench.plan()
    assert (plan.rows[0].start, plan.rows[0].scores_prompt) == (0, False), "all of it was reported"
    assert reported(bench.commit(plan)) == [(0, 0, ())], "that it goes on"
    assert reported(bench.commit(bench.plan())) == [(46, 45, ())]
    bench.scheduler.preempt(this)
    plan = bench.plan()
    assert plan.rows[0].start == 64, "what was reported may be found in the cache"
    assert reported(bench.commit(plan))[0][0] == 91


def test_single_token_prompt_has_no_scores() -> None:
    bench = Bench(limits())
    bench.add(1, 1, sampling=SCORED)
    (row,) = bench.plan().rows
    assert not row.scores_prompt
