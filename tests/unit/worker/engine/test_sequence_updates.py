"""Reports of a worker on a sequence besides its tokens: preemptions and recomputed tokens."""

from __future__ import annotations

from tests.support.worker.scheduler_bench import TOKEN, Bench
from tests.support.worker.worker_support import limits
from worker.engine.outcome import NO_UPDATE, Outcome, Residence, SequenceKey, SequenceUpdate
from worker.engine.sequence import NO_SLOT, Sequence


def preempted() -> tuple[Bench, Sequence, Sequence, list[Outcome]]:
    """Return a running and a preempted sequence, and the outcomes of the preempting step."""
    bench = Bench(limits(num_blocks=4, watermark_blocks=0, max_num_batched_tokens=200))
    long, short = bench.add(1, 60, first=100), bench.add(2, 40, first=500)
    bench.step()
    while short.slot != NO_SLOT:
        outcomes = bench.commit(bench.plan())
    return bench, long, short, outcomes


def test_decode_outcome_has_only_computed_count() -> None:
    bench = Bench(limits(max_num_batched_tokens=40))
    bench.add(1, 70)
    assert bench.commit(bench.plan()) == [], "a chunk is nothing to report"
    bench.commit(bench.plan())
    for computed in (71, 72):
        (outcome,) = bench.commit(bench.plan())
        assert (outcome.num_computed, outcome.update) == (computed, NO_UPDATE)


def test_outcome_of_first_token_reports_wait_and_cache_hits() -> None:
    bench = Bench(limits(max_num_batched_tokens=40, max_num_seqs=1))
    bench.add(1, 70, max_tokens=1)
    this = bench.add(2, 70)
    this.arrived_at = 10.0
    for now in (11.0, 12.0):
        bench.commit(bench.scheduler.schedule(now=now))
    (outcome,) = bench.commit(bench.scheduler.schedule(now=12.5))
    assert outcome.update == SequenceUpdate(waited_s=2.5, cached_tokens=64)
    (outcome,) = bench.commit(bench.scheduler.schedule(now=13.0))
    assert outcome.update == NO_UPDATE, "it is reported once"


def test_preemption_is_reported_in_step_that_causes_it() -> None:
    _, _, short, outcomes = preempted()
    expected = Outcome(
        SequenceKey(2, 0),
        short.num_output,
        num_computed=short.num_known - 1,
        update=SequenceUpdate(Residence.PREEMPTED, preemptions=1),
    )
    assert outcomes[0] == expected
    assert outcomes[1].tokens == (TOKEN,), "the other one's"


def test_resumed_sequence_reports_recomputed_tokens() -> None:
    bench, long, short, _ = preempted()
    bench.scheduler.remove(long)
    known = short.num_known
    (outcome,) = bench.commit(bench.plan())
    # The first block of 32 tokens was a prefix-cache hit.
    again = known - 1 - 32
    assert outcome.update == SequenceUpdate(
        Residence.RESUMED, preemptions=0, recomputed_tokens=again
    )
    assert (outcome.tokens, outcome.num_computed) == ((TOKEN,), known)
    assert bench.scheduler.load().counters.recomputed_tokens == again
    assert bench.commit(bench.plan())[0].update == NO_UPDATE


def test_recomputation_is_reported_with_the_next_token() -> None:
    bench = Bench(limits(max_num_batched_tokens=30))
    this = bench.add(1, 100, num_computed=80)
    for _ in range(3):
        assert bench.commit(bench.plan()) == []
    (outcome,) = bench.commit(bench.plan())
    assert outcome.update == SequenceUpdate(None, 0, recomputed_tokens=80, waited_s=0.0)
    assert (outcome.num_computed, this.num_computed) == (100, 100)


def test_earlier_attempt_blocks_in_the_cache_are_not_recomputed() -> None:
    bench = Bench(limits(max_num_batched_tokens=200))
    bench.add(1, 100)
    bench.step()
    bench.add(2, 100, num_computed=90)
    outcomes = bench.commit(bench.plan())
    assert outcomes[1].update.recomputed_tokens == 0, "of 96 tokens"


def test_returned_sequence_reports_computed_tokens() -> None:
    _, _, short, _ = preempted()
    assert short.outcome().num_computed == short.num_known - 1
    assert short.to_start().num_computed == short.num_known - 1


def test_lower_priority_is_preempted_first() -> None:
    bench = Bench(limits(num_blocks=4, watermark_blocks=0, max_num_batched_tokens=200))
    long = bench.add(1, 60, first=100, priority=-1)
    short = bench.add(2, 40, first=500)
    while not bench.scheduler.load().preemptions:
        bench.step()
    assert long.slot == NO_SLOT != short.slot
    assert long.num_computed_before > short.num_computed


def test_higher_priority_is_admitted_first() -> None:
    bench = Bench(limits(max_num_seqs=1))
    for epoch, priority in ((1, 0), (2, -1), (3, 5), (4, 0)):
        bench.add(epoch, 3, max_tokens=1, priority=priority)
    order = []
    while len(bench.scheduler):
        order += [outcome.key.epoch for outcome in bench.commit(bench.plan())]
    assert order == [3, 1, 4, 2]
