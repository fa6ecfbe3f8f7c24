"""Sequences have exactly the tokens that they would have alone, whatever happens around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from everlift.engine_policy import EnginePolicy
from everlift.errors import EngineFailed
from everlift.sampling import SamplingParams
from tests.support.example_counts import examples
from tests.support.worker.worker_support import POLICIES, Collected, limits, prompt, run, start
from worker.config import FakeModel, Speculation
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, SequenceKey, Stop
from worker.engine.plan import NO_ROWS, LaunchedStep, Plan, RowResult
from worker.engine.sequence import Sequence
from worker.runner.fake_runner import FakeRunner, expected_logprobs, expected_tokens

#: Model whose text repeats itself enough for some drafts to be accepted.
MODEL = FakeModel(eos_token_id=7, eos_one_in=150, surprise_one_in=4)
#: Common prefixes of prompts, for hits in the prefix cache.
STEMS = [[], *(prompt(length, first) for length, first in ((31, 1), (33, 3), (64, 3), (64, 7)))]


@dataclass(frozen=True)
class Job:
    """Choice of a request that has ``done`` tokens already."""

    prompt: list[int]
    done: int
    max_tokens: int
    sampling: SamplingParams
    choice: int
    salt: bytes
    priority: int
    session: int = 0

    def tokens(self) -> list[int]:
        return expected_tokens(
            self.prompt, self.max_tokens, MODEL, self.sampling, self.choice, [MODEL.eos_token_id]
        )

    def sequence(self, epoch: int, bounds: Limits) -> Sequence:
        message = start(
            epoch,
            self.prompt,
            self.max_tokens,
            output=self.tokens()[: self.done],
            choice=self.choice,
            sampling=self.sampling,
            stop_token_ids=[MODEL.eos_token_id],
            salt=self.salt,
            num_computed=self.done and len(self.prompt) + self.done - 1,
            priority=self.priority,
            predicted_tokens=self.max_tokens // 3,
            session=self.session,
            expected_cached_tokens=len(self.prompt) // (1 + self.session),
        )
        return Sequence.from_start(message, bounds)

    def check(self, key: SequenceKey, collected: Collected, is_whole: bool) -> None:
        """Check that the reported tokens are right, and with ``is_whole`` complete."""
        tokens = self.tokens()
        reported = collected.tokens.get(key, [])
        expected = {"tokens": tokens[self.done :], "logprobs": [], "prompt_logprobs": []}
        if (most := self.sampling.logprobs) is not None:
            whole = [*self.prompt, *tokens]
            first = len(self.prompt) + self.done
            expected["logprobs"] = expected_logprobs(whole, first, most, MODEL)
        if (most := self.sampling.prompt_logprobs) is not None:
            expected["prompt_logprobs"] = expected_logprobs(self.prompt, 1, most, MODEL)
        assert len(collected.logprobs.get(key, [])) in (0, len(reported))
        for name, right in expected.items():
            said = getattr(collected, name).get(key, [])
            assert said == right[: len(said)], name
            assert len(said) == len(right) or not is_whole, name


counts = st.none() | st.integers(0, 2)
greedy = st.builds(SamplingParams, st.just(0.0), logprobs=counts, prompt_logprobs=counts)
sampled = st.builds(
    SamplingParams,
    st.just(0.8),
    seed=st.integers(0, 3),
    min_tokens=st.integers(0, 40),
    logprobs=counts,
)


@st.composite
def requests(draw: st.DrawFn) -> list[Job]:
    """Draw one to three choices of one prompt."""
    stem = draw(st.sampled_from(STEMS))
    tail = draw(st.lists(st.integers(10, 30), min_size=1, max_size=20))
    max_tokens = draw(st.sampled_from([1, 20, 70, 120]))
    sampling = draw(greedy | sampled)
    salt = draw(st.sampled_from([b"", b"tenant"]))
    priority = draw(st.sampled_from([0, 0, 1, -1]))
    session = draw(st.integers(0, 3))
    jobs = []
    for choice in draw(st.sampled_from([(0,), (1,), (0, 1, 2)])):
        job = Job([*stem, *tail], 0, max_tokens, sampling, choice, salt, priority, session)
        jobs.append(replace(job, done=draw(st.just(0) | st.integers(0, len(job.tokens()) - 1))))
    return jobs


@dataclass(frozen=True)
class Event:
    """Event before a step.

    ``policy`` takes effect, and ``requests`` arrive. The ``abort``-th arrival so far is aborted:
    all choices, or one. All but ``preempt`` sequences of the batch are preempted.

    ``fault`` concerns the next step: it lacks memory (-2), it fails (-1), or the row of this number
    fails.
    """

    requests: list[list[Job]]
    abort: tuple[int, int | None] | None = None
    preempt: int | None = None
    fault: int | None = None
    policy: EnginePolicy | None = None


policies: list[EnginePolicy] = [*get_args(EnginePolicy)]
events = st.lists(
    st.builds(
        Event,
        st.lists(requests(), max_size=2),
        st.sampled_from([None] * 7 + [(at, choice) for at in (0, 2, 5) for choice in (None, 1)]),
        st.sampled_from([None, None, 0, 1]),
        st.sampled_from([None] * 14 + [-2] * 4 + [-1, 0, 3]),
        st.sampled_from([None] * 6 + policies),
    ),
    max_size=12,
)
#: More simultaneous requests than the KV cache holds.
crowds = st.builds(Event, st.lists(requests(), min_size=3, max_size=6))
bounds = st.builds(
    limits,
    num_blocks=st.integers(7, 9),
    max_num_seqs=st.sampled_from([1, 3, 4, 5]),
    max_num_batched_tokens=st.sampled_from([5, 40, 200]),
    watermark_blocks=st.integers(0, 1),
    num_host_blocks=st.sampled_from([0, 1, 2, 3, 20]),
    speculation=st.builds(Speculation, st.sampled_from([0, 1, 4]), st.just(1), st.integers(1, 3)),
    scheduling=st.sampled_from([*POLICIES.values()]),
    session_retention_s=st.sampled_from([2.0, 20.0]),
    max_retained_blocks=st.sampled_from([0, 3, 9]),
)


class Faulty(FakeRunner):
    """Runner whose next step has the ``fault`` of an event."""

    fault: int | None = None
    was_short = False
    has_failed = False
    num_good = 2

    def execute(self, plan: Plan) -> list[RowResult]:
        fault, self.fault = self.fault, None
        self.was_short = fault == -2
        if self.was_short:
            self._spoil(plan)
            raise MemoryError
        # Two consecutive failed steps end the engine.
        self.has_failed = fault == -1 and not self.has_failed
        if self.has_failed:
            self._spoil(plan)
            raise RuntimeError
        results = super().execute(plan)
        if fault is not None and fault >= 0:
            results[fault % len(results)] = RowResult(error=EngineFailed("in this row"))
        return results

    def _launch(self, plan: Plan) -> LaunchedStep:
        """Launch a step; a failure is raised at the launch of odd steps, else with the results."""
        fault, self.fault = self.fault, None
        self.was_short = fault == -2
        if self.was_short:
            self._spoil(plan)
            raise MemoryError
        # A step that follows a failed one is discarded, so it does not separate two failures.
        fails = fault == -1 and self.num_good >= 2
        self.num_good = 0 if fails else self.num_good + 1
        if fails and plan.step % 2:
            self._spoil(plan)
            raise RuntimeError
        return Step(super()._launch(plan), lambda: self._spoil_copies(plan), fails, fault)

    def _spoil_copies(self, plan: Plan) -> None:
        self._spoil(replace(plan, rows=NO_ROWS))


class Step:
    """Launched step, perhaps with a fault, after which its copies are wrong too."""

    def __init__(
        self, launched: LaunchedStep, spoil: Callable[[], None], fails: bool, fault: int | None
    ) -> None:
        self.launched = launched
        self.spoil = spoil
        self.fails = fails
        self.fault = fault

    def sample(self) -> None:
        self.launched.sample()

    def results(self) -> list[RowResult]:
        if self.fails:
            self.spoil()
            raise RuntimeError
        results = self.launched.results()
        if self.fault is not None and self.fault >= 0:
            results[self.fault % len(results)] = RowResult(error=EngineFailed("in this row"))
        return results


class Run:
    """Engine under a list of events."""

    def __init__(self, bounds: Limits, ahead: bool = False) -> None:
        model = replace(MODEL, runs_ahead=ahead)
        self.runner = Faulty(bounds.num_blocks, model, bounds.num_host_blocks)
        self.engine = Engine(self.runner, bounds, launch=self.runner.launch)
        self.collected = Collected()
        self.arrived: list[list[SequenceKey]] = []
        self.jobs: dict[SequenceKey, Job] = {}
        self.aborted: set[SequenceKey] = set()
        self.digests: list[bytes] = []

    def happen(self, event: Event) -> None:
        if event.policy is not None:
            self.engine.set_policy(event.policy)
        for request in event.requests:
            epoch = len(self.arrived) + 1
            self.arrived.append([SequenceKey(epoch, job.choice) for job in request])
            for key, job in zip(self.arrived[-1], request, strict=True):
                self.jobs[key] = job
                self.engine.add(job.sequence(epoch, self.engine.limits))
        if event.abort is not None and event.abort[0] < len(self.arrived):
            self.abort(*event.abort)
        if event.preempt is not None:
            self.preempt(event.preempt)
        self.runner.fault = event.fault

    def abort(self, arrival: int, choice: int | None) -> None:
        abort = Abort(arrival + 1, () if choice is None else (choice,))
        self.engine.abort(abort)
        self.aborted.update(
            key for key in self.arrived[arrival] if key in abort and key not in self.collected.stops
        )

    def preempt(self, queue_wait: int) -> None:
        self.collected.take(self.engine.commit_in_flight())
        scheduler = self.engine._scheduler
        for sequence in list(scheduler._batch)[queue_wait:]:
            scheduler.preempt(sequence)

    def step(self) -> None:
        before, had_work = self.engine.load(), self.engine.has_work
        num_ended = len(self.collected.stops)
        self.collected.take(self.engine.step(now=float(before.step)))
        self.engine.check_integrity()
        self.digests.append(self.engine.digest())
        load = self.engine.load()
        moves = load.num_running or len(self.collected.stops) > num_ended or self.runner.was_short
        assert moves or not had_work, "stands still"
        assert load.counters.accepted_tokens <= load.counters.draft_tokens
        assert load.output_tokens >= before.output_tokens

    def live(self, events: list[Event]) -> None:
        for event in events:
            self.happen(event)
            self.step()
        self.runner.fault = None

    def unaborted(self) -> Iterator[tuple[SequenceKey, Job]]:
        return ((key, job) for key, job in self.jobs.items() if key not in self.aborted)


@settings(max_examples=examples(120))
@given(bounds, crowds, events)
def test_engine_gives_each_sequence_exactly_its_tokens(
    bounds: Limits, crowd: Event, events: list[Event]
) -> None:
    check_all(Run(bounds), [crowd, *events])


@settings(max_examples=examples(60))
@given(bounds, crowds, events)
def test_engine_gives_exact_tokens_when_launching_ahead(
    bounds: Limits, crowd: Event, events: list[Event]
) -> None:
    bounds = replace(bounds, speculation=Speculation())
    check_all(Run(bounds, ahead=True), [crowd, *events])


def check_all(this: Run, events: list[Event]) -> None:
    this.live(events)
    run(this.engine, this.collected)

    for key in this.aborted:
        assert key not in this.collected.stops
        this.jobs[key].check(key, this.collected, is_whole=False)
    for key, job in this.unaborted():
        stop = this.collected.stops[key]
        job.check(key, this.collected, is_whole=stop is not Stop.FAILED)
        ended = job.tokens()[-1] == MODEL.eos_token_id
        assert stop in (Stop.EOS if ended else Stop.LENGTH, Stop.FAILED)
        assert stop is not Stop.FAILED or any(event.fault is not None for event in events)
    load = this.engine.load()
    assert load.blocks_used == 0
    if not this.aborted:
        assert this.collected.preemptions.total() == load.preemptions
        assert this.collected.recomputed_tokens.total() == load.counters.recomputed_tokens


@settings(max_examples=examples(30))
@given(bounds, crowds, events)
def test_engine_makes_same_plans_from_same_log(
    bounds: Limits, crowd: Event, events: list[Event]
) -> None:
    one, other = Run(bounds), Run(bounds)
    for this in (one, other):
        this.live([crowd, *events])
        while this.engine.has_work:
            this.step()
    assert one.digests == other.digests
    assert one.collected.tokens == other.collected.tokens
    assert one.engine.load() == other.engine.load()
