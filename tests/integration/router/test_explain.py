"""Explanations of requests: routers, workers and a ledger over real gRPC, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import Cancelled, DeadlineExceeded, UnknownRequest
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.auth.caller import ANYONE
from router.event_loop import now
from router.requests.timing import Journal
from router.router import Router
from tests.support.in_process import LONG_LEASE, ROUTER, WORKER, Cluster, cluster, receive, until
from tests.support.router.http_client import JSON, ask, get, streamed
from tests.support.router.keyring import Keyring
from tests.support.worker.grammar_support import DEMO_MODEL
from worker.config import FakeModel, WorkerConfig

PROMPT = [5, 6, 7]


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    async with cluster(workers=1) as parts:
        yield parts


def seconds(explanation: pb.Explanation) -> dict[pb.SpanKind.ValueType, float]:
    """Return the seconds of each kind of span."""
    by_kind: dict[pb.SpanKind.ValueType, float] = {}
    for span in explanation.spans:
        by_kind[span.kind] = by_kind.get(span.kind, 0.0) + span.seconds
    return by_kind


class Bounds(NamedTuple):
    """Bounds of the duration of a request, in seconds.

    A busy machine may stop the process at any moment. The bounds hold nevertheless, where a
    single duration would need a tolerance.
    """

    least_s: float  # until the caller asked for the last piece
    most_s: float  # until the stream ended


def check_sum(explanation: pb.Explanation, took: Bounds) -> None:
    """Check that the spans add up to the duration of the request, to 1 ms or 1 %."""
    sum_s = sum(seconds(explanation).values())
    assert sum_s == pytest.approx(explanation.total_s)
    assert sum_s >= took.least_s - max(1e-3, 0.01 * took.least_s)
    assert sum_s <= took.most_s + max(1e-3, 0.01 * took.most_s)


async def timed(router: Router, message: pb.GenerateRequest) -> Bounds:
    """Send a request in the router's own process, and measure its duration."""
    began = asked_at = now()
    opened = await router._inference.generate(ANYONE, message, {}, Journal(began))
    async with aclosing(opened.pieces) as pieces:  # type: ignore[type-var]
        last_asked_at = asked_at
        async for _ in pieces:
            last_asked_at, asked_at = asked_at, now()
        return Bounds(last_asked_at - began, now() - began)


def asked(request_id: str, max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id, tokens=pb.TokenIds(ids=PROMPT), max_tokens=max_tokens
    )


async def test_explain_accounts_for_all_time_of_real_engine() -> None:
    worker = WorkerConfig(model=str(DEMO_MODEL), device="cpu", num_blocks=64, num_threads=1)
    config = replace(ROUTER, model=str(DEMO_MODEL))
    async with cluster(1, 1, config, worker) as parts, AsyncClient(parts.address) as client:
        for number, more in enumerate(({}, {"n": 3}, {"stop": ["20"]})):
            message = pb.GenerateRequest(
                text="count from 17 to 30:",
                request_id=f"r{number}",
                max_tokens=24,
                sampling=pb.Sampling(temperature=0),
                **more,
            )
            took = await timed(parts.routers[0], message)
            explanation = await client.explain(f"r{number}")
            check_sum(explanation, took)
            spent = seconds(explanation)
            assert spent[pb.SPAN_KIND_RECEIVE] > 0 and spent[pb.SPAN_KIND_LEDGER] > 0
            # A request that a stop string ends may have had one frame, which reported no step.
            assert spent.keys() & {pb.SPAN_KIND_PREFILL, pb.SPAN_KIND_DECODE}
            (attempt,) = explanation.attempts
            assert attempt.worker_id == parts.workers[0].worker_id
            assert attempt.new_tokens == explanation.output_tokens > 0
            assert (attempt.end, explanation.state) == ("finished", pb.REQUEST_STATE_FINISHED)


async def until_prefilling(client: AsyncClient, request_id: str, tokens: int) -> pb.Explanation:
    async with asyncio.timeout(20.0):
        while True:
            with suppress(UnknownRequest):
                explanation = await client.explain(request_id)
                if explanation.attempts and explanation.attempts[0].prefilled_tokens >= tokens:
                    return explanation
            await asyncio.sleep(0.02)


async def measure_pauses(pauses: list[float]) -> None:
    """Record the seconds by which the event loop is late, until cancelled."""
    while True:
        due = now() + 0.01
        await asyncio.sleep(0.01)
        pauses.append(now() - due)


async def test_explain_shows_chunked_prefill_in_progress() -> None:
    worker = replace(
        WORKER, max_num_seqs=8, max_num_batched_tokens=32, fake=FakeModel(token_time=0.002)
    )
    async with cluster(1, 1, worker_config=worker) as parts, AsyncClient(parts.address) as client:
        [held] = parts.hold()
        pauses: list[float] = []
        measuring = asyncio.create_task(measure_pauses(pauses))
        going = asyncio.create_task(receive(client, PROMPT * 400, 2, request_id="long"))
        await until(lambda: held.num_requests)
        held.let(2)
        first = await until_prefilling(client, "long", 1)
        held.let(16)
        second = await until_prefilling(client, "long", 500)
        held.release()
        for explanation in (first, second):
            spent = seconds(explanation)
            assert spent[pb.SPAN_KIND_PREFILL] > 0
            assert explanation.attempts[0].known_tokens == 1200
            assert explanation.attempts[0].new_tokens == 0
        spent = seconds(second)
        # Reports that arrived during a pause of the event loop were read after it.
        most_s = second.total_s - 0.2 - sum(pauses)
        assert spent[pb.SPAN_KIND_PREFILL] > 0.8 * most_s
        measuring.cancel()
        await going
        (attempt,) = (await client.explain("long")).attempts
        assert (attempt.prefilled_tokens, attempt.new_tokens) == (0, 2)


async def test_explain_shows_single_step_prefill_in_progress() -> None:
    worker = replace(WORKER, max_num_batched_tokens=2048, fake=FakeModel(token_time=0.001))
    async with cluster(1, 1, worker_config=worker) as parts, AsyncClient(parts.address) as client:
        [held] = parts.hold()
        going = asyncio.create_task(receive(client, PROMPT * 600, 2, request_id="long"))
        await until(lambda: held.num_requests)
        async with asyncio.timeout(30.0):
            while seconds(await client.explain("long")).get(pb.SPAN_KIND_PREFILL, 0.0) <= 0.5:
                await asyncio.sleep(0.02)
        assert not going.done()
        held.release()
        await going


async def test_explain_names_requests_ahead_and_queue_order() -> None:
    worker = replace(WORKER, max_num_seqs=1)
    config = replace(ROUTER, local_depth=1)
    async with cluster(1, 1, config, worker) as parts, AsyncClient(parts.address) as client:
        [held] = parts.hold()
        work = [asyncio.create_task(receive(client, PROMPT, 8, request_id="first"))]
        await until(lambda: held.num_requests == 1)
        leader = parts.routers[0]._leader
        for name, priority in (("second", 0), ("third", 0), ("last", 0), ("high", 5)):
            queued = leader.queued
            going = receive(client, PROMPT, 8, request_id=name, priority=priority)
            work.append(asyncio.create_task(going))
            await until(
                lambda queued=queued, held=held: leader.queued + held.num_requests > queued + 1
            )
        waits = await client.explain("last")
        assert waits.state == pb.REQUEST_STATE_QUEUED
        assert waits.spans[-1].kind == pb.SPAN_KIND_QUEUE
        held.release()
        await asyncio.gather(*work)
        explanation = await client.explain("last")
    queue_wait = explanation.attempts[0].queue
    assert queue_wait.order == "fifo" and queue_wait.higher == 1 and queue_wait.earlier >= 1
    assert "high" in queue_wait.before
    spent = seconds(explanation)
    assert spent[pb.SPAN_KIND_QUEUE] > 0
    assert sum(spent.values()) == pytest.approx(explanation.total_s)


async def test_explain_names_occupants_of_full_worker() -> None:
    worker, config = replace(WORKER, max_num_seqs=1), replace(ROUTER, local_depth=1)
    async with cluster(1, 2, config, worker) as parts, AsyncClient(parts.address) as client:
        first, other = parts.hold()
        names = [f"r{number}" for number in range(5)]
        leader, work = parts.routers[0]._leader, {}

        def num_known() -> int:
            return leader.queued + first.num_requests + other.num_requests

        for number, name in enumerate(names, 1):
            going = receive(client, PROMPT, 8, request_id=name)
            work[name] = asyncio.create_task(going)
            await until(lambda number=number: num_known() == number)
        first.release()
        await work["r4"]
        explanations = {name: await client.explain(name) for name in names}
        other.release()
        await asyncio.gather(*work.values())
    last = explanations.pop("r4")
    assert seconds(last)[pb.SPAN_KIND_QUEUE] > 0
    [attempt] = last.attempts
    at_other = {
        name
        for name, explanation in explanations.items()
        if explanation.attempts[0].worker_id != attempt.worker_id
    }
    assert set(attempt.occupants) == at_other and at_other


async def test_explain_covers_requests_ended_in_queue() -> None:
    worker = replace(WORKER, max_num_seqs=1)
    config = replace(LONG_LEASE, local_depth=1)
    async with cluster(2, 1, config, worker) as parts, AsyncClient(parts.address) as client:
        [held] = parts.hold()
        await until(lambda: any(router._leader.is_leading for router in parts.routers))
        *_, leading = sorted(parts.routers, key=lambda router: router._leader.is_leading)
        work = [asyncio.create_task(receive(client, PROMPT, 8, request_id="first"))]
        await until(lambda: held.num_requests == 1)
        for number, name in enumerate(("second", "cancelled", "expires")):
            timeout_s = 4.0 if name == "expires" else None
            going = receive(client, PROMPT, 8, request_id=name, timeout_s=timeout_s)
            work.append(asyncio.create_task(going))
            await until(
                lambda number=number: leading._leader.queued + held.num_requests > number + 1
            )
        await client.cancel("cancelled")
        ends = await asyncio.gather(*work[2:], return_exceptions=True)
        assert [type(end) for end in ends] == [Cancelled, DeadlineExceeded]
        explanations = [await client.explain(name) for name in ("cancelled", "expires")]
        held.release()
        await asyncio.gather(*work[:2])
    for explanation in explanations:
        spent = seconds(explanation)
        assert spent[pb.SPAN_KIND_QUEUE] > 0
        assert sum(spent.values()) == pytest.approx(explanation.total_s)


async def test_explain_has_spans_for_worker_loss_and_absence(parts: Cluster) -> None:
    async with AsyncClient(parts.address) as client:
        [held] = parts.hold()
        work = asyncio.create_task(timed(parts.routers[0], asked("r", 40)))
        await until(lambda: held.num_requests == 1)
        link = parts.routers[0]._sessions._links[parts.workers[0].worker_id]
        # One by one, because a frame of several steps reports only the first one's breakdown.
        for step in range(1, 11):
            held.let(1)
            await until(lambda step=step: link.state.step >= step)
        killing = asyncio.create_task(parts.kill_worker(parts.workers[0]))
        await until(lambda: not link.is_up)
        held.release()
        await killing
        router = parts.routers[0]
        router.worker_starts(session_pb2.WorkerStart(name="successor", seconds=30.0))
        await asyncio.sleep(0.05)
        await parts.add_worker()
        took = await work
        explanation = await client.explain("r")
    spent = seconds(explanation)
    check_sum(explanation, took)
    assert spent[pb.SPAN_KIND_MIGRATION] > 0 and spent[pb.SPAN_KIND_NO_WORKER] > 0
    # The lost worker's last frame preceded the loss; its successor recomputed all tokens.
    assert spent[pb.SPAN_KIND_MIGRATION] > 0 and spent[pb.SPAN_KIND_RECOMPUTE] > 0
    attempts = {span.kind: span.attempt for span in explanation.spans}
    assert attempts[pb.SPAN_KIND_MIGRATION] == 1 and attempts[pb.SPAN_KIND_RECOMPUTE] == 2
    first, second = explanation.attempts
    assert "was lost" in first.end and second.end == "finished"
    assert second.known_tokens == len(PROMPT) + first.new_tokens
    assert first.steps == first.new_tokens == 10, "only the first step was reported"
    assert second.recomputed_tokens == second.known_tokens - 1


async def test_explain_attributes_decode_stall_to_other_prefill() -> None:
    worker = replace(WORKER, fake=FakeModel(step_time=0.002, token_time=2e-5))
    async with cluster(1, 1, ROUTER, worker) as parts, AsyncClient(parts.address) as client:
        [held] = parts.hold()
        work = asyncio.create_task(timed(parts.routers[0], asked("decodes", 60)))
        await until(lambda: held.num_requests == 1)
        link = parts.routers[0]._sessions._links[parts.workers[0].worker_id]
        held.let(10)
        await until(lambda: link.state.step >= 10)
        other = asyncio.create_task(receive(client, [5] * 2000, 4, request_id="prompt"))
        await until(lambda: held.num_requests == 2)
        running = await client.explain("decodes")
        held.release()
        took, _ = await asyncio.gather(work, other)
        decodes, prompt = [await client.explain(name) for name in ("decodes", "prompt")]
    check_sum(decodes, took)
    assert seconds(decodes)[pb.SPAN_KIND_INTERFERENCE] > 0
    assert decodes.attempts[0].most_neighbours == 1
    for explanation in (running, decodes):
        assert (explanation.attempts[0].neighbours, explanation.attempts[0].newcomers) == (
            [],
            ["prompt"],
        )
    assert (prompt.attempts[0].neighbours, prompt.attempts[0].newcomers) == (["decodes"], [])
    assert seconds(prompt)[pb.SPAN_KIND_PREFILL] > 0


async def test_explain_reports_fair_share_wait_without_other_tenant(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "keys.yaml")
    keys = [await keyring.key("many"), await keyring.key("few")]
    worker = replace(WORKER, max_num_seqs=1)
    config = replace(ROUTER, local_depth=2, access="file", access_file=str(keyring.path))
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(cluster(1, 1, config, worker))
        clients = [AsyncClient(parts.address, api_key=key) for key in keys]
        many, few = [await stack.enter_async_context(client) for client in clients]
        [held] = parts.hold()
        leader, work = parts.routers[0]._leader, []
        for number, client in enumerate((many, many, many, many, few)):
            going = receive(client, PROMPT, 8, request_id=f"r{number}")
            work.append(asyncio.create_task(going))
            await until(lambda number=number: leader.queued + held.num_requests > number)
        # A request counts twice for a moment, while the worker receives it.
        await until(lambda: (held.num_requests, leader.queued) == (2, 3))
        held.release()
        await asyncio.gather(*work)
        first, last = [await many.explain(name) for name in ("r0", "r3")]
        other = await few.explain("r4")
    spent, queue_wait = seconds(last), last.attempts[0].queue
    assert spent[pb.SPAN_KIND_QUEUE] > 0
    assert (queue_wait.fair_share, queue_wait.ordered) == (1, 0)
    # Requests of the other tenant are counted, but never named.
    assert set(queue_wait.before) <= {"r0", "r1", "r2"}
    assert {"r1"} <= {*first.attempts[0].newcomers} <= {"r1", "r2", "r3"}
    assert {*last.attempts[0].neighbours} <= {"r1", "r2"} and not other.attempts[0].neighbours
    assert other.attempts[0].queue.fair_share == 0


async def test_explain_has_spans_for_preemption_and_recompute() -> None:
    """The KV cache holds the beginnings of the three requests, but not their full lengths."""
    worker = replace(WORKER, num_blocks=8, watermark=0.0)
    async with cluster(1, 1, ROUTER, worker) as parts, AsyncClient(parts.address) as client:
        names = ("a", "b", "c")
        going = (timed(parts.routers[0], asked(name, 120)) for name in names)
        times = await asyncio.gather(*going)
        explanations = [await client.explain(name) for name in names]
    for explanation, took in zip(explanations, times, strict=True):
        check_sum(explanation, took)
    lost = [it for it in explanations if it.attempts[0].preemptions]
    assert lost and all(seconds(it)[pb.SPAN_KIND_PREEMPTED] > 0 for it in lost)
    assert any(pb.SPAN_KIND_RECOMPUTE in seconds(it) for it in lost)


async def test_explain_reports_wait_for_new_leader() -> None:
    worker, config = replace(WORKER, max_num_seqs=1), replace(LONG_LEASE, local_depth=1)
    async with cluster(2, 1, config, worker) as parts:
        [held] = parts.hold()
        await until(lambda: any(router._leader.is_leading for router in parts.routers))
        successor, leading = sorted(parts.routers, key=lambda router: router._leader.is_leading)
        work = [asyncio.create_task(timed(successor, asked("first", 8)))]
        await until(lambda: held.num_requests == 1)
        for name in ("second", "third", "fourth"):
            work.append(asyncio.create_task(timed(successor, asked(name, 8))))
        await until(lambda: leading._leader.queued > 0)
        term = leading._leader._lease.term
        await parts.kill_router(leading)
        await parts.ledger.resign(term)
        await until(lambda: successor._leader.is_leading)
        held.release()
        times = await asyncio.gather(*work)
        async with AsyncClient(successor.address) as client:
            explanations = [await client.explain(name) for name in ("first", "fourth")]
    for explanation, took in zip(explanations, (times[0], times[-1]), strict=True):
        check_sum(explanation, took)
    assert seconds(explanations[1])[pb.SPAN_KIND_NETWORK] > 0


async def test_explain_works_on_any_router_and_from_ledger() -> None:
    config = replace(ROUTER, reassert=3 * ROUTER.heartbeat)
    async with cluster(2, 1, config) as parts:
        async with AsyncClient(parts.routers[0].address) as here:
            async with AsyncClient(parts.routers[1].address) as there:
                [held] = parts.hold()
                work = asyncio.create_task(timed(parts.routers[0], asked("r", 20)))
                await until(lambda: held.num_requests == 1)
                assert (await there.explain("r")).state == pb.REQUEST_STATE_RUNNING
                held.release()
                took = await work
                fresh = await here.explain("r")
                await until(lambda: parts.routers[0]._requests._recent.get("r") is None)
                kept = await there.explain("r")
                with pytest.raises(UnknownRequest):
                    await there.explain("other")
    assert kept.state == pb.REQUEST_STATE_FINISHED
    check_sum(fresh, took)
    # The ledger counts from the moment at which it stored the request, and the router heard of that
    # later. The time between the two is counted twice; it is part of the first span LEDGER.
    [stored_s] = (
        span.seconds
        for span in fresh.spans
        if span.kind == pb.SPAN_KIND_LEDGER and span.attempt == 0
    )
    check_sum(kept, took._replace(most_s=took.most_s + stored_s))
    assert kept.attempts == fresh.attempts


async def test_explain_option_adds_spans_to_timing(parts: Cluster) -> None:
    async with AsyncClient(parts.address) as client:
        for explains in (False, True):
            stream = client.generate(PROMPT, max_tokens=4, explain=explains)
            await stream.text()
            assert stream.timing is not None
            assert bool(stream.timing.spans) is explains
        kinds = [span.kind for span in stream.timing.spans]
        assert kinds == sorted(set(kinds)) and pb.SPAN_KIND_DECODE in kinds


async def test_explain_over_http_returns_json_and_server_timing(parts: Cluster) -> None:
    address = parts.routers[0].http_address
    body = {"prompt": PROMPT, "max_tokens": 4}
    headers = {**JSON, "idempotency-key": "r", "x-explain": "1"}
    answer = await ask(address, "/v1/completions", body, headers)
    assert "decode;dur=" in answer.headers["server-timing"]
    explanation = (await get(address, "/v1/requests/r/explanation")).json
    assert explanation["state"] == "finished" and explanation["attempts"][0]["end"] == "finished"
    assert 0 <= explanation["ledger_s"] < explanation["ttft_s"] < explanation["total_s"]
    whole_s = sum(span["seconds"] for span in explanation["spans"])
    assert whole_s == pytest.approx(explanation["total_s"])
    unknown = await get(address, "/v1/requests/other/explanation")
    assert (unknown.status, unknown.error[0]) == (404, "unknown_request")
    async with streamed(
        address, "/v1/completions", {**body, "stream": True}, {**JSON, "x-explain": "true"}
    ) as stream:
        chunks = [event.json async for event in stream.events() if event.data != "[DONE]"]
    assert {"kind", "start_s", "seconds", "attempt"} == chunks[-1]["timing"][0].keys()
    plain = await ask(address, "/v1/completions", body, JSON)
    assert "server-timing" not in plain.headers


async def test_listing_of_session_has_its_turns(parts: Cluster) -> None:
    async with AsyncClient(parts.routers[0].address) as client:
        for request_id in ("one", "two"):
            stream = client.generate(PROMPT, request_id=request_id, session_id="s", max_tokens=1)
            await stream.text()
        await client.generate(PROMPT, request_id="other", max_tokens=1).text()
        page = await client.list_requests(session_id="s")
        assert [each.request_id for each in page.requests] == ["two", "one"]
        assert not (await client.list_requests(session_id="t")).requests
