"""Preempted requests, and their moves to workers with capacity."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.policy import Fifo
from router.ledger.entry import State, Tally
from tests.support.router.gateway_support import CONFIG, Gateway, started_gateway, texts, until

EOS = session_pb2.STOP_CAUSE_EOS
PREEMPTED, RESUMED = session_pb2.RESIDENCE_PREEMPTED, session_pb2.RESIDENCE_RESUMED


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with started_gateway(config=replace(CONFIG, max_moves=2)) as gateway:
        yield gateway


def residences(gateway: Gateway) -> list[bool]:
    return [running.preempted for running in gateway.line.residences]


async def test_moved_request_resumes_elsewhere_with_its_tokens(gateway: Gateway) -> None:
    live = await gateway.submit()
    first = await gateway.dispatch()
    gateway.make(first, 0, "abc")
    gateway.requests.move(first)
    await until(lambda: len(gateway.line.enqueued) == 2)
    assert gateway.workers.aborted == [(first, ())]
    before, again = gateway.line.enqueued
    assert again.arrived == before.arrived
    assert [waiting.moves_left for waiting in (before, again)] == [2, 1]
    gateway.make(first, 3, "LATE")
    second = await gateway.dispatch(worker_id="other")
    assert bytes(gateway.workers.started[-1].output_ids) == b"abc"
    gateway.make(second, 3, "d", EOS)
    assert texts(await gateway.read(live)) == "abcd"
    entry = await gateway.ledger.get("r")
    assert (entry.losses, entry.attempts, entry.tally.migrations) == (0, 2, 1)
    assert gateway.requests.counters.moved == 1


async def test_move_ignores_requests_without_a_worker(gateway: Gateway) -> None:
    await gateway.submit()
    gateway.requests.move(0)
    gateway.requests.move(1)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "a", EOS)
    gateway.requests.move(epoch)
    await until(lambda: not len(gateway.requests))
    assert (await gateway.stored())[0] is State.FINISHED
    assert gateway.requests.counters.moved == 0


async def test_stale_move_or_eviction_spares_the_next_attempt(gateway: Gateway) -> None:
    await gateway.submit()
    first = await gateway.dispatch()
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    second = await gateway.dispatch()
    gateway.requests.move(first)
    gateway.requests.evict(session_pb2.Eviction(epoch=first))
    assert not gateway.workers.aborted
    assert [running.epoch for running in gateway.requests.running()] == [second]


async def test_eviction_does_not_count_against_moves_left(gateway: Gateway) -> None:
    await gateway.submit()
    for number in range(3):
        gateway.requests.evict(session_pb2.Eviction(epoch=await gateway.dispatch()))
        await until(lambda n=number: len(gateway.line.enqueued) == n + 2)
    assert [waiting.moves_left for waiting in gateway.line.enqueued] == [2, 2, 2, 2]
    assert gateway.requests.counters.moved == 0


@pytest.mark.parametrize(
    "whom, expected",
    [("acme/high", "preempted for high"), ("other/high", "preempted for a higher class")],
)
async def test_eviction_names_the_preemptor_only_within_its_tenant(
    gateway: Gateway, whom: str, expected: str
) -> None:
    live = await gateway.submit(request_id="acme/r")
    epoch = await gateway.dispatch("acme/r")
    gateway.requests.evict(session_pb2.Eviction(epoch=epoch, request_id=whom))
    await until(lambda: len(gateway.line.enqueued) == 2)
    explanation = await gateway.requests.explain("acme/r")
    assert [attempt.end for attempt in explanation.attempts] == [expected]
    assert explanation.spans[-1].kind == pb.SPAN_KIND_QUEUE
    assert not live.is_over


async def test_moves_left_never_falls_below_zero(gateway: Gateway) -> None:
    await gateway.submit()
    for number in range(3):
        gateway.requests.move(await gateway.dispatch())
        await until(lambda n=number: len(gateway.line.enqueued) == n + 2)
    assert [waiting.moves_left for waiting in gateway.line.enqueued] == [2, 1, 0, 0]


async def test_preemption_and_resume_are_reported_to_leader_once(gateway: Gateway) -> None:
    await gateway.submit(priority=-2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abc")
    gateway.make(epoch, 3, "", residence=PREEMPTED, preemptions=1)
    [running] = gateway.line.residences
    assert running == session_pb2.Running(
        request_id="r",
        model="fake",
        worker_id="w",
        epoch=epoch,
        priority=-2,
        known_tokens=5,
        moves_left=2,
        preempted=True,
        arrived=gateway.line.enqueued[0].arrived,
        choices=1,
        predicted_total=10,
        predicted_work_rank=0.5,
    )
    gateway.make(epoch, 3, "", residence=RESUMED)
    gateway.make(epoch, 3, "d")
    gateway.make(epoch, 4, "e", residence=RESUMED)
    assert residences(gateway) == [True, False]


async def test_worker_gets_the_predicted_lengths(
    gateway: Gateway,
) -> None:
    await gateway.submit(n=3)
    await gateway.dispatch()
    starts, [running] = gateway.workers.started, gateway.requests.running()
    outputs = [start.predicted_tokens for start in starts]
    assert outputs == [outputs[0]] * 3 and outputs[0] > 0
    assert len(starts[0].prompt_ids) + sum(outputs) == running.queue_key.predicted_total


async def test_running_report_counts_unfinished_choices(gateway: Gateway) -> None:
    await gateway.submit(n=3)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "x", EOS, choice=1)
    assert [running.choices for running in gateway.requests.running()] == [2]


async def test_request_is_preempted_only_if_all_its_choices_are(gateway: Gateway) -> None:
    await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "", residence=PREEMPTED, choice=0)
    assert residences(gateway) == []
    gateway.make(epoch, 0, "x", EOS, choice=1)
    assert residences(gateway) == [True]
    gateway.make(epoch, 0, "", residence=RESUMED, choice=0)
    assert residences(gateway) == [True, False]


async def test_preempted_flag_is_reset_for_the_next_worker(gateway: Gateway) -> None:
    await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "", residence=PREEMPTED)
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    await gateway.dispatch()
    assert [running.is_preempted for running in gateway.requests.running()] == [False]


async def test_new_leader_learns_running_and_queued_requests(
    gateway: Gateway,
) -> None:
    for request_id, priority in (("a", 0), ("b", 1), ("c", 0), ("d", -1), ("e", 1)):
        await gateway.submit(request_id=request_id, priority=priority)
    await gateway.dispatch("c")
    waiting = gateway.requests.waiting(Fifo())
    assert next(waiting).request_id == "b"
    # The report is generated lazily: requests that left meanwhile are omitted.
    await gateway.dispatch("e")
    assert [it.request_id for it in waiting] == ["a", "d"]
    assert [it.request_id for it in gateway.requests.running()] == ["c", "e"]


async def test_waiting_request_carries_deadlines_and_priority(gateway: Gateway) -> None:
    await gateway.submit(timeout_s=60.0, ttft_target_ms=500, priority=4)
    [waiting] = gateway.line.enqueued
    assert waiting.deadline == waiting.arrived + 60.0
    assert waiting.ttft_deadline == waiting.arrived + 0.5
    assert waiting.priority == 4
    epoch = await gateway.dispatch()
    assert gateway.workers.started[-1].priority == 4
    gateway.make(epoch, 0, "a", session_pb2.STOP_CAUSE_RETURNED)
    await until(lambda: len(gateway.line.enqueued) == 2)
    assert gateway.line.enqueued[-1].deadline == waiting.deadline
    assert gateway.line.enqueued[-1].ttft_deadline == 0


async def test_request_is_withdrawn_when_its_last_choice_ends(gateway: Gateway) -> None:
    await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "a", EOS, choice=0)
    assert not gateway.line.withdrawn
    gateway.make(epoch, 0, "b", EOS, choice=1)
    assert gateway.line.withdrawn == ["r"]


async def test_tally_keeps_arithmetic_of_each_attempt(gateway: Gateway) -> None:
    live = await gateway.submit()
    gateway.make(await gateway.dispatch(), 0, "a")
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    exact = (await gateway.ledger.get("r")).tally.arithmetic
    gateway.workers.arithmetic = "other"
    second = await gateway.dispatch()
    gateway.make(second, 1, "b")
    # A router that takes over must know the arithmetic before the end.
    await until(lambda: live.choices[0].stored == 2)
    assert (await gateway.ledger.get("r")).tally.arithmetic not in (0, exact)
    gateway.make(second, 2, "c", EOS)
    timing = (await gateway.read(live))[-1].timing
    assert timing.continued == pb.CONTINUATION_SAME_DISTRIBUTION


async def test_tally_is_summed_over_all_attempts(gateway: Gateway) -> None:
    live = await gateway.submit()
    first = await gateway.dispatch(bypassed=4)
    gateway.make(first, 0, "a", preemptions=2, recomputed_tokens=5, num_computed=2)
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    stored = (await gateway.ledger.get("r")).tally
    assert stored == Tally(2, 0, 5, arithmetic=live.arithmetic)
    second = await gateway.dispatch(bypassed=1)
    gateway.make(second, 1, "b", EOS, recomputed_tokens=3)
    timing = (await gateway.read(live))[-1].timing
    assert timing.bypassed == 5
    counts = (timing.preemptions, timing.migrations, timing.recomputed_tokens)
    assert counts == (2, 1, 8)
    assert (await gateway.ledger.get("r")).tally == replace(
        stored, migrations=1, recomputed_tokens=8
    )
    assert timing.continued == pb.CONTINUATION_EXACT
    again = await gateway.read(await gateway.requests.attach("r"))
    timing = again[-1].timing
    assert (timing.preemptions, timing.migrations, timing.recomputed_tokens) == counts
    counters = gateway.requests.counters
    assert (counters.preempted, counters.recomputed_tokens) == (2, 8)


async def test_declined_dispatch_keeps_tally_and_losses(gateway: Gateway) -> None:
    """The request has just been released, because its client attached at another router."""
    live = await gateway.submit()
    gateway.make(await gateway.dispatch(), 0, "a", preemptions=2)
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    gateway.requests._registry.release(live)
    before = await gateway.ledger.get("r")
    await gateway.dispatch()
    await until(lambda: len(gateway.line.enqueued) == 3)
    entry = await gateway.ledger.get("r")
    assert (entry.state, entry.tally, entry.losses) == (State.QUEUED, before.tally, before.losses)
    await gateway.requests.cancel("r")


@pytest.mark.parametrize(
    ("output", "num_computed", "expected"), [("", 0, 0), ("", 2, 2), ("abc", 0, 4), ("abc", 5, 5)]
)
async def test_start_carries_num_computed_of_earlier_attempts(
    gateway: Gateway, output: str, num_computed: int, expected: int
) -> None:
    """The prompt has two tokens; the last of three output tokens was sampled after four."""
    await gateway.submit()
    epoch = await gateway.dispatch()
    assert gateway.workers.started[-1].num_computed == 0
    gateway.make(epoch, 0, output, num_computed=num_computed)
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    await gateway.dispatch()
    assert gateway.workers.started[-1].num_computed == expected


async def test_failed_sequence_is_retried_on_another_worker(
    gateway: Gateway,
) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "", session_pb2.STOP_CAUSE_FAILED, error="no room for a grammar")
    await until(lambda: len(gateway.line.enqueued) == 2)
    assert gateway.line.enqueued[-1].avoid == "w"
    epoch = await gateway.dispatch(worker_id="other")
    gateway.make(epoch, 0, "a", EOS)
    assert (await gateway.read(live))[-1].finish_reason == pb.FINISH_REASON_STOP
    assert (await gateway.ledger.get("r")).losses == 1
