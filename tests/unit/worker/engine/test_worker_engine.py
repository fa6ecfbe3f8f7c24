"""The engine with the fake runner."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from everlift.errors import EngineFailed
from everlift.sampling import SamplingParams
from tests.support.worker.worker_support import Collected, engine, limits, prompt, run, sequence
from worker.config import FakeModel, Speculation
from worker.engine.engine import Engine, EngineBroken
from worker.engine.limits import Limits
from worker.engine.load import Load
from worker.engine.outcome import Abort, SequenceKey, Stop
from worker.engine.plan import DeviceLost, Plan, RowResult
from worker.runner.fake_runner import FakeRunner, expected_tokens

KEY = SequenceKey(1, 0)


@pytest.mark.parametrize("done", range(40))
def test_continuation_is_exact_at_every_offset(done: int) -> None:
    whole = expected_tokens(prompt(30), 40)
    this = engine()
    this.add(sequence(this.limits, 1, prompt(30), max_tokens=40, output=whole[:done]))
    collected = run(this)
    assert (collected.tokens[KEY], collected.stops[KEY]) == (whole[done:], Stop.LENGTH)


@pytest.mark.parametrize("done", range(0, 20, 3))
def test_sampled_continuation_draws_same_tokens(done: int) -> None:
    sampling = SamplingParams(temperature=0.7, seed=123)
    whole = expected_tokens(prompt(30), 20, sampling=sampling, choice=3)
    this = engine()
    this.add(
        sequence(
            this.limits,
            *(1, prompt(30)),
            max_tokens=20,
            output=whole[:done],
            sampling=sampling,
            choice=3,
        )
    )
    assert run(this).tokens[SequenceKey(1, 3)] == whole[done:]


def test_tiny_pool_changes_no_tokens() -> None:
    bounds = limits(num_blocks=6, max_num_seqs=4, max_num_batched_tokens=48)
    this = engine(bounds)
    for epoch in range(1, 9):
        this.add(sequence(bounds, epoch, prompt(30 + epoch, epoch), max_tokens=90))
    collected = run(this)
    for epoch in range(1, 9):
        tokens = collected.tokens[SequenceKey(epoch, 0)]
        assert tokens == expected_tokens(prompt(30 + epoch, epoch), 90)
    assert this.load().preemptions > 3


def repetitive(num_drafts: int, num_host_blocks: int = 0) -> Load:
    """Run six sequences with repetitive text, check their tokens, and return the load."""
    model = FakeModel(surprise_one_in=20)
    bounds = limits(
        num_blocks=12,
        max_num_batched_tokens=64,
        num_host_blocks=num_host_blocks,
        speculation=Speculation(num_drafts),
    )
    this = engine(bounds, model)
    for epoch in range(1, 7):
        this.add(sequence(bounds, epoch, prompt(70 + epoch, 100 * epoch), max_tokens=90))
    collected = run(this)
    for epoch in range(1, 7):
        tokens = collected.tokens[SequenceKey(epoch, 0)]
        assert tokens == expected_tokens(prompt(70 + epoch, 100 * epoch), 90, model)
    return this.load()


def test_drafts_change_no_token_and_save_steps() -> None:
    without, drafted = repetitive(num_drafts=0), repetitive(num_drafts=4)
    assert drafted.step < without.step / 2
    counters = drafted.counters
    assert counters.draft_tokens >= counters.accepted_tokens > counters.draft_tokens / 2
    assert counters.slot_steps < without.counters.slot_steps / 2


def test_host_memory_reduces_recomputation() -> None:
    without, swapped = repetitive(num_drafts=0), repetitive(num_drafts=0, num_host_blocks=12)
    assert without.preemptions and swapped.preemptions
    assert swapped.counters.recomputed_tokens < without.counters.recomputed_tokens / 2
    assert swapped.counters.blocks_swapped_out >= swapped.counters.blocks_swapped_in > 0


def test_engine_stops_sequence_at_context_end() -> None:
    bounds = limits(max_model_len=50)
    this = engine(bounds)
    this.add(sequence(bounds, 1, prompt(40), max_tokens=100))
    collected = run(this)
    assert collected.tokens[KEY] == expected_tokens(prompt(40), 10)
    assert collected.stops[KEY] is Stop.LENGTH


def test_abort_ends_every_choice_and_frees_blocks() -> None:
    this = engine()
    for choice in (0, 1):
        this.add(sequence(this.limits, 1, prompt(40), choice=choice))
    this.add(sequence(this.limits, 2, prompt(3), max_tokens=5))
    this.step()
    this.abort(Abort(1))
    this.abort(Abort(77))
    assert (this.load().num_running, this.load().blocks_used) == (1, 1)
    assert run(this).stops == {SequenceKey(2, 0): Stop.LENGTH}


def test_abort_of_a_choice_keeps_the_others() -> None:
    this = engine(limits(max_num_batched_tokens=200))
    for choice in range(3):
        this.add(sequence(this.limits, 1, prompt(70), max_tokens=5, choice=choice))
    this.step()
    assert this.load().blocks_used == 2 + 3
    this.abort(Abort(1, (0, 2)))
    assert this.load().blocks_used == 2 + 1
    collected = run(this)
    assert {*collected.stops} == {SequenceKey(1, 1)}
    assert collected.tokens[SequenceKey(1, 1)] == expected_tokens(prompt(70), 5)[1:]


def test_engine_executes_step_within_context_of_plan() -> None:
    said: list[tuple[int, str]] = []

    @contextmanager
    def noting(plan: Plan) -> Iterator[None]:
        said.append((plan.step, "begin"))
        try:
            yield
        finally:
            said.append((plan.step, "end"))

    bounds = limits()
    this = Engine(Failing(bounds, RuntimeError(), at=range(2, 3)), bounds, within=noting)
    this.step()
    this.add(sequence(bounds, 1, prompt(3)))
    this.step()
    assert said == [(2, "begin"), (2, "end")], "not where there is nothing to do"


def test_idle_engine_step_skips_runner() -> None:
    this = Engine(Failing(limits(), RuntimeError(), at=range(100)), limits())
    assert not this.has_work
    assert this.step() == []


class Failing(FakeRunner):
    """Runner that raises ``error`` in the steps ``at``."""

    def __init__(self, bounds: Limits, error: Exception, at: range) -> None:
        super().__init__(bounds.num_blocks, FakeModel())
        self._error = error
        self._at = at

    def execute(self, plan: Plan) -> list[RowResult]:
        if plan.step in self._at:
            raise self._error
        return super().execute(plan)


def failing(at: range, error: Exception | None = None) -> Engine:
    bounds = limits(max_num_seqs=1)
    this = Engine(Failing(bounds, error or RuntimeError("secret"), at), bounds)
    for epoch in (1, 2, 3):
        this.add(sequence(bounds, epoch, prompt(3), max_tokens=4))
    return this


def test_failed_step_ends_its_sequences_and_engine_continues() -> None:
    collected = run(failing(at=range(3, 4)))
    assert collected.tokens[KEY] == expected_tokens(prompt(3), 2)
    assert collected.stops[KEY] is Stop.FAILED
    assert collected.errors[KEY] == "the step failed: RuntimeError"
    for epoch in (2, 3):
        assert collected.tokens[SequenceKey(epoch, 0)] == expected_tokens(prompt(3), 4)


def test_engine_passes_on_runner_error() -> None:
    error = EngineFailed("the logits are not finite")
    (outcome,) = failing(at=range(1, 2), error=error).step()
    assert (outcome.key, outcome.offset, outcome.stop) == (KEY, 0, Stop.FAILED)
    assert isinstance(outcome.error, EngineFailed)
    assert str(outcome.error) == "the step failed: the logits are not finite"


def test_engine_breaks_after_two_consecutive_failures() -> None:
    this = failing(at=range(2, 4))
    collected = Collected()
    collected.take(this.step())
    collected.take(this.step())
    with pytest.raises(EngineBroken, match="step 3"):
        this.step()


def test_engine_breaks_at_once_if_device_is_lost() -> None:
    """Sequences of the step do not get FAILED, because they continue at another worker."""
    this = failing(at=range(2, 3), error=DeviceLost("an illegal memory access"))
    this.step()
    with pytest.raises(EngineBroken, match=r"step 2: DeviceLost\('an illegal memory access'\)"):
        this.step()


def test_engine_survives_nonconsecutive_failures() -> None:
    this = failing(at=range(1, 8, 2))
    assert {*run(this).stops.values()} == {Stop.FAILED}


def test_engine_breaks_on_rank_local_error() -> None:
    bounds = limits()
    this = Engine(Failing(bounds, RuntimeError(), range(1, 2)), bounds, survivable=(EngineFailed,))
    this.add(sequence(bounds, 1, prompt(3)))
    with pytest.raises(EngineBroken):
        this.step()


def test_engine_digest_differs_between_plans() -> None:
    one, other = engine(), engine()
    digests = []
    for this, first in ((one, 1), (other, 2)):
        this.add(sequence(this.limits, 1, prompt(3, first)))
        assert this.digest() == engine().digest(), "nothing planned yet"
        this.step()
        digests.append(this.digest())
    assert digests[0] != digests[1]
