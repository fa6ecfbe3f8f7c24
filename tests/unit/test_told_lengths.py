"""What the leader is told of outputs' lengths, as a model predicts them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache

import pytest

from cluster.prediction.examples import from_lines
from cluster.prediction.training import trained
from everlift.v1 import session_pb2
from router.clock import now
from router.gateway.model import ServedModel
from router.prediction.model import Model
from tests.gateway_support import Gateway, started_gateway
from tests.prediction_support import lines, mixed


@cache
def model() -> Model:
    made = trained("fake", from_lines(lines(mixed(1, 400)), ServedModel.load("fake")))
    return Model.parse(made[0])


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with started_gateway() as started:
        yield started


async def test_a_request_is_predicted_once_and_told_so_each_time(gateway: Gateway) -> None:
    gateway.requests.predictor.load(model())
    for number in range(20):
        text = "Write an essay about tea, thorough and complete." if number % 2 else "Yes or no?"
        await gateway.submit(text=text, request_id=str(number), stop=["\x00"], max_tokens=3000)
    told = gateway.line.enqueued
    assert told[-1].predicted_rank > 0.5 > told[-2].predicted_rank > 0
    assert told[-1].predicted_tokens > told[-2].predicted_tokens
    for reserved, queued in zip(gateway.line.arriving, told, strict=True):
        assert reserved.predicted_rank == queued.predicted_rank
        assert reserved.predicted_total == queued.predicted_total
        assert queued.predicted_total == queued.prompt_tokens + queued.predicted_tokens


async def test_what_nothing_predicts_gives_way_by_its_prompt_alone(gateway: Gateway) -> None:
    for text in ("Yes or no?", "Write an essay about tea, thorough and complete."):
        await gateway.submit(text=text, request_id=text[:3], stop=["\x00"])
    short, long = gateway.line.enqueued
    assert (short.predicted_rank, long.predicted_rank) == (0.0, 0.0)
    assert 1.0 > long.predicted_work_rank > short.predicted_work_rank > 0.0


async def test_what_a_model_that_is_not_trusted_predicts_has_a_length_and_no_order(
    gateway: Gateway,
) -> None:
    gateway.requests.predictor.load(model())
    trust = gateway.requests.predictor.trust
    assert trust is not None
    trust.is_trusted = False
    gateway.requests.foresee(session_pb2.Outlook(tokens_per_s=10.0))
    for name in "ab":
        live = await gateway.submit(request_id=name, stop=["\x00"], max_tokens=3000)
    told = gateway.line.enqueued[-1]
    assert (told.predicted_total, told.predicted_rank, told.predicted_work_rank) == (0, 0.0, 0.0)
    assert told.predicted_tokens == 128, "as long as outputs are by and large"
    assert told.foreseen_wait_s == (told.prompt_tokens + 128) / 10.0, "another one came before it"
    await gateway.dispatch("b")
    assert gateway.workers.started[-1].predicted_tokens == 128
    explanation = live.explanation(now())
    assert (explanation.predicted_output_tokens, explanation.prediction_distrusted) == (128, True)


async def test_a_wait_is_foreseen_by_the_leaders_word(gateway: Gateway) -> None:
    waits = [session_pb2.ClassWait(priority=0, work_tokens=40)]
    gateway.requests.foresee(session_pb2.Outlook(waits=waits, tokens_per_s=10.0))
    for number in range(2):
        await gateway.submit(request_id=str(number))
    first, second = gateway.line.enqueued
    assert first.foreseen_wait_s == 4.0
    assert second.foreseen_wait_s == 4.0 + first.predicted_total / 10.0
    assert gateway.line.arriving[1].foreseen_wait_s == second.foreseen_wait_s


async def test_an_output_that_ended_is_learnt_from_and_one_that_was_cancelled_is_not(
    gateway: Gateway,
) -> None:
    gateway.requests.predictor.load(model())
    trust = gateway.requests.predictor.trust
    assert trust is not None
    await gateway.submit(request_id="cancelled", stop=["\x00"])
    await gateway.requests.cancel("cancelled")
    assert trust.coverage == []
    live = await gateway.submit(stop=["\x00"], max_tokens=8)
    gateway.make(await gateway.dispatch(), 0, "12345678", session_pb2.STOP_CAUSE_LENGTH)
    await gateway.read(live)
    assert len(trust.coverage) == 2
