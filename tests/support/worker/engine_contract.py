"""Contract of ``EngineAdapter``, which every engine of a worker fulfils.

A subclass has a fixture ``engine`` and a fixture ``small``, an engine whose KV cache is too small
for four sequences of 100 tokens at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from everlift.hashes import BLOCK_SIZE
from everlift.sampling import SamplingParams, TokenLogprobs
from worker.engine.adapter import EngineAdapter
from worker.engine.outcome import Abort, Outcome, Residence, SequenceKey, Stop
from worker.engine.sequence import Sequence
from worker.engine.time_breakdowns import TimeBreakdowns

GREEDY = SamplingParams(temperature=0.0)
_epochs = count(1)


@dataclass
class Collected:
    """Outcomes of an engine, by sequence."""

    tokens: dict[SequenceKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[SequenceKey, list[TokenLogprobs]] = field(
        default_factory=lambda: defaultdict(list)
    )
    stops: dict[SequenceKey, Stop] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.key not in self.stops, "an outcome after the end"
            self.outcomes.append(outcome)
            self.tokens[outcome.key] += outcome.tokens
            self.logprobs[outcome.key] += outcome.logprobs
            if outcome.stop is not None:
                self.stops[outcome.key] = outcome.stop

    def of(self, sequence: Sequence) -> tuple[list[int], Stop | None]:
        return self.tokens[sequence.key], self.stops.get(sequence.key)


def sequence(prompt: list[int], output: Iterable[int] = (), **fields: Any) -> Sequence:
    """Return a sequence of an epoch of its own, greedy and without stop tokens by default."""
    epoch = fields.pop("epoch", None) or next(_epochs)
    given = {
        "max_tokens": 8,
        "sampling": GREEDY,
        "stop_token_ids": frozenset(),
        "salt": b"",
        **fields,
    }
    choice = given.pop("choice", 0)
    key, tokens = SequenceKey(epoch, choice), [*prompt, *output]
    return Sequence(key, f"request-{epoch}", tokens, len(prompt), **given)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * index) % 200 + 5 for index in range(length)]


def without_watch(step: int, num_tokens: int) -> AbstractContextManager[object]:
    """Return the context of a step without a watchdog."""
    return nullcontext()


def run(engine: EngineAdapter, *sequences: Sequence, steps: int = 5000) -> Collected:
    """Add the sequences, and run the engine until it has no work."""
    collected = Collected()
    for each in sequences:
        engine.add(each)
    for step in range(steps):
        if not engine.has_work:
            engine.check_integrity()
            return collected
        collected.add(engine.step((), float(step)))
    raise AssertionError("the engine still has work")


class EngineContract:
    def test_outcomes_are_contiguous_up_to_the_length(self, engine: EngineAdapter) -> None:
        given = [sequence(prompt(5 + 9 * index, index), max_tokens=4 + index) for index in range(3)]
        collected = run(engine, *given)
        seen: dict[SequenceKey, int] = defaultdict(int)
        for outcome in collected.outcomes:
            if outcome.tokens:
                assert outcome.offset == seen[outcome.key]
                seen[outcome.key] += len(outcome.tokens)
        for index, each in enumerate(given):
            tokens, stop = collected.of(each)
            assert (len(tokens), stop) == (4 + index, Stop.LENGTH)

    @pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.9, seed=5)])
    def test_continuation_is_exact_at_every_token(
        self, engine: EngineAdapter, sampling: SamplingParams
    ) -> None:
        whole, _ = run(engine, it := sequence(prompt(9), max_tokens=20, sampling=sampling)).of(it)
        for done in range(1, 20):
            rest = sequence(prompt(9), whole[:done], max_tokens=20, sampling=sampling)
            assert run(engine, rest).of(rest) == (whole[done:], Stop.LENGTH)

    def test_stop_token_ends_the_sequence(self, engine: EngineAdapter) -> None:
        whole, _ = run(engine, it := sequence(prompt(9), max_tokens=12)).of(it)
        end = whole.index(whole[6])
        each = sequence(prompt(9), max_tokens=12, stop_token_ids=frozenset({whole[6]}))
        assert run(engine, each).of(each) == (whole[: end + 1], Stop.EOS)

    def test_choices_differ_and_are_reproducible(self, engine: EngineAdapter) -> None:
        sampling = SamplingParams(temperature=2.0, seed=3)
        texts = []
        for _ in range(2):
            epoch = next(_epochs)
            choices = [
                sequence(prompt(9), epoch=epoch, choice=choice, max_tokens=16, sampling=sampling)
                for choice in range(3)
            ]
            collected = run(engine, *choices)
            texts.append([collected.of(choice)[0] for choice in choices])
        assert texts[0] == texts[1]
        assert len({tuple(text) for text in texts[0]}) == 3

    def test_logprobs_come_with_every_token(self, engine: EngineAdapter) -> None:
        sampling = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
        collected = run(engine, it := sequence(prompt(9), max_tokens=5, sampling=sampling))
        found = collected.logprobs[it.key]
        assert [len(each.top) for each in found] == [2] * 5
        assert all(each.rank >= 1 and each.logprob <= 0.0 for each in found)
        scored = [it for it in collected.outcomes if it.prompt_logprobs]
        assert scored[0].prompt_offset == 1
        assert sum(len(it.prompt_logprobs) for it in scored) == 8

    def test_abort_frees_blocks_at_once(self, engine: EngineAdapter) -> None:
        kept, gone = sequence(prompt(40), max_tokens=9), sequence(prompt(70, 3), max_tokens=900)
        for each in (kept, gone):
            engine.add(each)
        engine.step((), 0.0)
        used = engine.load().blocks_used
        engine.commit_in_flight()
        engine.abort(Abort(gone.key.epoch))
        assert engine.load().blocks_used < used
        assert [it.key for it in engine.sequences()] == [kept.key]
        assert run(engine).stops == {kept.key: Stop.LENGTH}
        assert engine.load().blocks_used == 0

    def test_load_counts_waiting_and_running(self, engine: EngineAdapter) -> None:
        many = engine.limits.max_num_seqs + 2
        given = [sequence(prompt(10, index), max_tokens=6) for index in range(many)]
        for each in given:
            engine.add(each)
        before = engine.load()
        assert (before.num_running, before.num_waiting) == (0, many)
        assert before.pending_prefill_tokens == before.committed_tokens == 10 * many
        collected = Collected()
        while not collected.tokens:
            collected.add(engine.step((), 0.0))
        during = engine.load()
        assert during.num_running == engine.limits.max_num_seqs == len(engine.occupants())
        assert during.blocks_used >= during.num_running
        collected.add(run(engine).outcomes)
        after = engine.load()
        assert (after.num_running, after.num_waiting, after.blocks_used) == (0, 0, 0)
        assert after.output_tokens == 6 * many
        assert after.computed_tokens >= 10 * many

    def test_admission_is_announced_before_the_first_step(self, engine: EngineAdapter) -> None:
        announced: list[SequenceKey] = []

        def before_admission(admitted: list[Sequence]) -> None:
            for each in admitted:
                assert each.num_output == 0 and each.pending_update.waited_s is not None
                announced.append(each.key)

        engine.before_admission = before_admission
        given = [sequence(prompt(9, index)) for index in range(3)]
        collected = run(engine, *given)
        assert sorted(announced) == [each.key for each in given]
        waits = [it.update.waited_s for it in collected.outcomes if it.update.waited_s is not None]
        assert len(waits) == 3

    def test_cached_prefix_is_reported(self, engine: EngineAdapter) -> None:
        long = prompt(4 * BLOCK_SIZE)
        run(engine, sequence(long))
        each = sequence(long)
        outcomes = run(engine, each).outcomes
        cached = sum(it.update.cached_tokens for it in outcomes)
        assert cached == 3 * BLOCK_SIZE
        salted = sequence(long, salt=b"other")
        assert sum(it.update.cached_tokens for it in run(engine, salted).outcomes) == 0
        assert engine.load().counters.prefix_hit_tokens >= 3 * BLOCK_SIZE

    def test_preemption_changes_no_token_and_is_reported(
        self, engine: EngineAdapter, small: EngineAdapter
    ) -> None:
        texts = []
        for this in (engine, small):
            given = [sequence(prompt(30, index), max_tokens=70) for index in range(4)]
            collected = run(this, *given)
            texts.append([collected.of(each) for each in given])
        assert texts[0] == texts[1]
        assert small.load().preemptions > 0
        residences = [it.update.residence for it in collected.outcomes if it.update.residence]
        assert {Residence.PREEMPTED, Residence.RESUMED} >= set(residences) > set()
        assert sum(it.update.preemptions for it in collected.outcomes) == small.load().preemptions

    def test_breakdowns_cover_the_whole_time(self, engine: EngineAdapter) -> None:
        times = count()
        engine.breakdowns = TimeBreakdowns(engine.limits.max_num_seqs, lambda: float(next(times)))
        each = sequence(prompt(9), max_tokens=5)
        engine.add(each)
        reports = []
        while engine.has_work:
            engine.step((), float(next(times)))
            if not engine.is_in_flight:
                engine.breakdowns.end_step()
            reports += engine.breakdowns.report()
        last = [it for it in reports if it.key == each.key][-1]
        assert last.breakdown.seconds == last.breakdown.until
        assert last.breakdown.steps >= 5
