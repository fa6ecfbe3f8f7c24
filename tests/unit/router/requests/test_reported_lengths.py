"""Predicted output lengths that are reported to the leader."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache

import pytest

from cluster.prediction.examples import from_lines
from cluster.prediction.training import trained
from everlift.errors import DeadlineUnmeetable
from everlift.hashes import session_key
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.event_loop import now
from router.ledger.memory.memory import MemoryLedger
from router.prediction.model import Model
from router.requests.tokenizer import ServedModel
from tests.support.router.gateway_support import (
    CONFIG,
    Gateway,
    gateway_ledger,
    started_gateway,
    until,
)
from tests.support.router.prediction_support import lines, mixed


@cache
def model() -> Model:
    made = trained("fake", from_lines(lines(mixed(1, 400)), ServedModel.load("fake")))
    return Model.parse(made[0])


@pytest.fixture
async def ledger() -> MemoryLedger:
    return await gateway_ledger(MemoryLedger(time.monotonic))


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with started_gateway() as started:
        yield started


async def test_prediction_is_made_once_and_reported_consistently(gateway: Gateway) -> None:
    gateway.requests.predictors["fake"].load(model())
    for number in range(20):
        text = "Write an essay about tea, thorough and complete." if number % 2 else "Yes or no?"
        await gateway.submit(text=text, request_id=str(number), stop=["\x00"], max_tokens=3000)
    enqueued = gateway.line.enqueued
    assert enqueued[-1].predicted_rank > 0.5 > enqueued[-2].predicted_rank > 0
    assert enqueued[-1].predicted_tokens > enqueued[-2].predicted_tokens
    for reserved, queued in zip(gateway.line.arriving, enqueued, strict=True):
        assert reserved.predicted_rank == queued.predicted_rank
        assert reserved.predicted_total == queued.predicted_total
        assert queued.predicted_total == queued.prompt_tokens + queued.predicted_tokens


async def test_work_rank_without_a_model_depends_on_the_prompt(gateway: Gateway) -> None:
    for text in ("Yes or no?", "Write an essay about tea, thorough and complete."):
        await gateway.submit(text=text, request_id=text[:3], stop=["\x00"])
    short, long = gateway.line.enqueued
    assert (short.predicted_rank, long.predicted_rank) == (0.0, 0.0)
    assert 1.0 > long.predicted_work_rank > short.predicted_work_rank > 0.0


async def test_distrusted_prediction_has_length_but_no_order(
    gateway: Gateway,
) -> None:
    gateway.requests.predictors["fake"].load(model())
    trust = gateway.requests.predictors["fake"].trust
    assert trust is not None
    trust.is_trusted = False
    gateway.requests.on_queue_estimates(
        [session_pb2.QueueEstimate(model="fake", tokens_per_s=10.0)]
    )
    for name in "ab":
        live = await gateway.submit(request_id=name, stop=["\x00"], max_tokens=3000)
    entry = gateway.line.enqueued[-1]
    assert (entry.predicted_total, entry.predicted_rank, entry.predicted_work_rank) == (0, 0.0, 0.0)
    assert entry.predicted_tokens == 128, "as long as outputs are by and large"
    assert entry.estimated_wait_s == (entry.prompt_tokens + 128) / 10.0, "another came before it"
    await gateway.dispatch("b")
    assert gateway.workers.started[-1].predicted_tokens == 128
    explanation = live.explanation(now())
    assert (explanation.predicted_output_tokens, explanation.prediction_distrusted) == (128, True)


async def test_submit_rejects_output_that_cannot_meet_its_deadline(ledger: MemoryLedger) -> None:
    gateway = Gateway(ledger, config=replace(CONFIG, refuse_late=True))
    gateway.requests.on_queue_estimates(
        [session_pb2.QueueEstimate(model="fake", least_tpot_s=0.02)]
    )
    with pytest.raises(DeadlineUnmeetable, match="output \\(101 tokens at least\\)") as error:
        await gateway.submit(max_tokens=101, timeout_s=1.9)
    assert 0.5 <= (error.value.retry_after_s or 0.0) <= 2.5
    assert gateway.line.arriving == []
    live = await gateway.submit(request_id="in-time", max_tokens=101, timeout_s=2.1)
    sampling = pb.Sampling(min_tokens=7)
    for name, fields in (("known", {"sampling": sampling}), ("unknown", {})):
        await gateway.submit(1.9, request_id=name, max_tokens=101, stop=["\x00"], **fields)
    assert [it.least_tokens for it in gateway.line.enqueued] == [101, 7, 1]
    gateway.requests.refused(
        session_pb2.Refusal(request_id="in-time", slug="deadline_unmeetable", least_tokens=101)
    )
    with pytest.raises(DeadlineUnmeetable, match="101 tokens at least"):
        await gateway.read(live)
    await gateway.requests.stop(0.0)


async def test_token_times_reach_the_leader_if_predicted(
    gateway: Gateway,
) -> None:
    for name, count, predicted_s in (("a", 17, 0.001), ("b", 17, None), ("c", 15, 0.001)):
        live = await gateway.submit(request_id=name, max_tokens=count)
        epoch = await gateway.dispatch(name, predicted_tpot_s=predicted_s)
        gateway.make(epoch, 0, "x")
        await until(lambda live=live: live.choices[0].readable)
        gateway.make(epoch, 1, "x" * (count - 1), session_pb2.STOP_CAUSE_LENGTH)
        await gateway.read(live)
    (ratio,) = gateway.line.tpot_ratios
    assert 0 < ratio < 1000


async def test_session_reaches_the_leader(gateway: Gateway) -> None:
    await gateway.submit(request_id="acme/r", session_id="talk")
    await gateway.submit(request_id="acme/s")
    for entries in (gateway.line.arriving, gateway.line.enqueued):
        assert [it.session for it in entries] == [session_key("acme", "talk"), 0]


async def test_session_output_is_reported_when_a_request_ends(gateway: Gateway) -> None:
    """The whole output is reported once, and not at the end of an attempt."""
    session, outputs = session_key("", "talk"), gateway.line.session_outputs
    live = await gateway.submit(request_id="moved", session_id="talk", n=2)
    epoch = await gateway.dispatch("moved")
    gateway.make(epoch, 0, "abc")
    gateway.requests.move(epoch)
    await until(lambda: len(gateway.line.enqueued) == 2)
    epoch = await gateway.dispatch("moved")
    gateway.make(epoch, 3, "de", session_pb2.STOP_CAUSE_LENGTH)
    assert outputs == []
    gateway.make(epoch, 0, "f", session_pb2.STOP_CAUSE_LENGTH, choice=1)
    await gateway.read(live)
    assert outputs == [(session, 6)]

    await gateway.submit(request_id="cancelled", session_id="talk")
    gateway.make(await gateway.dispatch("cancelled"), 0, "abcd")
    for _ in range(2):
        await gateway.requests.cancel("cancelled")
    assert outputs == [(session, 6), (session, 4)]

    await gateway.submit(request_id="no-output", session_id="talk")
    await gateway.requests.cancel("no-output")
    await gateway.submit(request_id="no-session")
    gateway.make(await gateway.dispatch("no-session"), 0, "ab")
    await gateway.requests.cancel("no-session")
    assert len(outputs) == 2


async def test_estimated_wait_follows_the_leaders_estimate(gateway: Gateway) -> None:
    waits = [session_pb2.ClassWait(priority=0, work_tokens=40)]
    gateway.requests.on_queue_estimates(
        [session_pb2.QueueEstimate(model="fake", waits=waits, tokens_per_s=10.0)]
    )
    for number in range(2):
        await gateway.submit(request_id=str(number))
    first, second = gateway.line.enqueued
    assert first.estimated_wait_s == 4.0
    assert second.estimated_wait_s == 4.0 + first.predicted_total / 10.0
    assert gateway.line.arriving[1].estimated_wait_s == second.estimated_wait_s


async def test_predictor_learns_only_finished_outputs(
    gateway: Gateway,
) -> None:
    gateway.requests.predictors["fake"].load(model())
    trust = gateway.requests.predictors["fake"].trust
    assert trust is not None
    await gateway.submit(request_id="cancelled", stop=["\x00"])
    await gateway.requests.cancel("cancelled")
    assert trust.coverage == []
    live = await gateway.submit(stop=["\x00"], max_tokens=8)
    gateway.make(await gateway.dispatch(), 0, "12345678", session_pb2.STOP_CAUSE_LENGTH)
    await gateway.read(live)
    assert len(trust.coverage) == 2


async def test_deadline_cutoff_is_learned_as_a_lower_bound(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    predictor = gateway.requests.predictors["fake"]
    monkeypatch.setattr(predictor, "note_cut_off", lambda _, num_tokens: noted.append(num_tokens))
    live = await gateway.submit(0.05, stop=["\x00"], max_tokens=99)
    gateway.make(await gateway.dispatch(), 0, "12345")
    await until(lambda: live.is_over)
    assert noted == [5]
