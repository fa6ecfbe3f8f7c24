"""Whatever happens around it, a sequence gets exactly the tokens that it would get alone."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from everlift.sampling import SamplingParams
from tests.worker_support import GREEDY, Collected, limits, run, start
from worker.config import FakeModel
from worker.engine import Engine
from worker.fake_runner import FakeRunner, expected_tokens
from worker.limits import Limits
from worker.outcome import SequenceKey, Stop
from worker.sequence import Sequence

MODEL = FakeModel(eos_token_id=7, eos_one_in=60)
#: Prompts share these beginnings, so that prefixes are hit.
STEMS = [[3 + i % 50 for i in range(length)] for length in (0, 31, 32, 64, 96)]


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    done: int
    max_tokens: int
    sampling: SamplingParams
    choice: int
    salt: bytes

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
        )
        return Sequence.from_start(message, bounds)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    stem = draw(st.sampled_from(STEMS))
    tail = draw(st.lists(st.integers(10, 30), min_size=1, max_size=40))
    max_tokens = draw(st.integers(1, 70))
    seed = draw(st.none() | st.integers(0, 3))
    job = Job(
        prompt=stem + tail,
        done=0,
        max_tokens=max_tokens,
        sampling=GREEDY if seed is None else SamplingParams(temperature=0.8, seed=seed),
        choice=draw(st.integers(0, 1)),
        salt=draw(st.sampled_from([b"", b"tenant"])),
    )
    done = draw(st.integers(0, len(job.tokens()) - 1))
    return Job(job.prompt, done, max_tokens, job.sampling, job.choice, job.salt)


@dataclass(frozen=True)
class Event:
    """Before each step: jobs arrive, and perhaps the abort of the ``abort``-th arrival so far."""

    jobs: list[Job]
    abort: int | None


events = st.lists(
    st.builds(Event, st.lists(jobs(), max_size=3), st.none() | st.integers(0, 20)), max_size=12
)
bounds = st.builds(
    limits,
    num_blocks=st.integers(8, 14),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.sampled_from([5, 16, 40, 200]),
    watermark_blocks=st.integers(1, 3),
)


class Run:
    """One engine under a list of events."""

    def __init__(self, bounds: Limits) -> None:
        self.engine = Engine(FakeRunner(bounds.num_blocks, MODEL), bounds)
        self.collected = Collected()
        self.arrived: dict[SequenceKey, Job] = {}
        self.aborted: set[SequenceKey] = set()
        self.digests: list[bytes] = []

    def happen(self, event: Event) -> None:
        for job in event.jobs:
            key = SequenceKey(len(self.arrived) + 1, job.choice)
            self.arrived[key] = job
            self.engine.add(job.sequence(key.epoch, self.engine.limits))
        if event.abort is not None and event.abort < len(self.arrived):
            self.abort(list(self.arrived)[event.abort])

    def abort(self, key: SequenceKey) -> None:
        self.engine.abort(key.epoch)
        if key not in self.collected.stops:
            self.aborted.add(key)

    def step(self) -> None:
        had_work = self.engine.has_work
        tokens_before = self.engine.load().output_tokens
        self.collected.take(self.engine.step())
        self.engine.check_integrity()
        self.digests.append(self.engine.digest())
        load = self.engine.load()
        stands_still = had_work and not load.num_running and load.output_tokens == tokens_before
        assert not stands_still


@settings(max_examples=150, deadline=None)
@given(bounds, events)
def test_every_sequence_gets_exactly_its_tokens(bounds: Limits, events: list[Event]) -> None:
    this = Run(bounds)
    for event in events:
        this.happen(event)
        this.step()
    run(this.engine, this.collected)

    for key, job in this.arrived.items():
        if key in this.aborted:
            assert key not in this.collected.stops
            continue
        assert job.tokens()[: job.done] + this.collected.tokens[key] == job.tokens()
        ended = job.tokens()[-1] == MODEL.eos_token_id
        assert this.collected.stops[key] is (Stop.EOS if ended else Stop.LENGTH)
    assert this.engine.load().blocks_used == 0


@settings(max_examples=50, deadline=None)
@given(bounds, events)
def test_the_same_log_makes_the_same_plans(bounds: Limits, events: list[Event]) -> None:
    one, other = Run(bounds), Run(bounds)
    for this in (one, other):
        for event in events:
            this.happen(event)
            this.step()
        while this.engine.has_work:
            this.step()
    assert one.digests == other.digests
    assert one.collected.tokens == other.collected.tokens
