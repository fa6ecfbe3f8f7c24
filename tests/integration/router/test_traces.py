"""Traces as an OTLP collector receives them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from everlift.client.client import AsyncClient
from everlift.errors import (
    Cancelled,
    InvalidRequest,
    QueueFull,
    SettingsError,
    TooManyStops,
    UnknownModel,
)
from everlift.messages import OnDisconnect
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.ledger.entry import Event
from router.observability.traces.exporter import CLOSE_S
from router.router import Router
from tests.support.free_port import free_port
from tests.support.in_process import (
    ROUTER,
    Cluster,
    KeptLedger,
    cluster,
    receive,
    right_tokens,
    until,
)
from tests.support.router.otlp_collector import Collector, attributes, collector

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
ROOT = "text_completion fake"
SERVER = Span.SPAN_KIND_SERVER
ENGINE = [f"everlift.engine.{phase}" for phase in ("wait", "prefill", "decode")]


@pytest.fixture(autouse=True)
def quick_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@asynccontextmanager
async def traced(
    routers: int = 1, workers: int = 2, sample: float = 1.0
) -> AsyncIterator[tuple[Cluster, Collector]]:
    async with collector() as collecting:
        config = replace(ROUTER, trace_endpoint=collecting.endpoint, trace_sample=sample)
        async with cluster(routers, workers, config) as parts:
            yield parts, collecting


async def trace_of(collecting: Collector, trace_id: str) -> dict[str, list[Span]]:
    """Wait for a trace's root span, which arrives last; return the trace."""
    await until(lambda: ROOT in collecting.trace(trace_id))
    return collecting.trace(trace_id)


def is_within(inner: Span, outer: Span) -> bool:
    return (
        inner.parent_span_id == outer.span_id
        and outer.start_time_unix_nano <= inner.start_time_unix_nano
        and inner.end_time_unix_nano <= outer.end_time_unix_nano
    )


async def test_trace_nests_request_spans_under_caller_span() -> None:
    prompt = list(b"any prompt")
    async with traced() as (parts, collecting), AsyncClient(parts.address) as client:
        received = await receive(client, prompt, 20, traceparent=PARENT)
        spans = await trace_of(collecting, TRACE)
        router_id = parts.routers[0].router_id
        asked = await client.get_request(received.request_id)
    assert asked.trace_id == TRACE
    assert list(spans) == [ROOT, "everlift.accept", "everlift.queue", "everlift.attempt", *ENGINE]
    [root], [attempt] = spans[ROOT], spans["everlift.attempt"]
    assert (root.parent_span_id.hex(), root.kind) == (SPAN, SERVER)
    assert all(is_within(spans[name][0], root) for name in ("everlift.accept", "everlift.queue"))
    assert is_within(attempt, root)
    assert all(is_within(spans[phase][0], attempt) for phase in ENGINE)
    for before, after in itertools.pairwise(ENGINE):
        assert spans[before][0].end_time_unix_nano == spans[after][0].start_time_unix_nano
    assert collecting.resources[0]["service.name"] == "everlift"
    assert collecting.resources[0]["service.instance.id"] == router_id
    root_attributes = attributes(root)
    assert root_attributes["gen_ai.response.id"] == received.request_id
    assert (
        root_attributes["gen_ai.usage.input_tokens"],
        root_attributes["gen_ai.usage.output_tokens"],
    ) == (10, 20)
    assert attributes(attempt)["everlift.new_tokens"] == 20
    assert [event.name for event in root.events] == ["first_token"]


async def test_traceresponse_names_new_trace_for_untraced_caller() -> None:
    message = pb.GenerateRequest(text="hi", max_tokens=3)
    async with traced() as (parts, collecting):
        async with grpc.aio.insecure_channel(parts.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(message)
            pieces = [piece async for piece in call]
            answered = dict(await call.initial_metadata())
            again = stub.Attach(pb.AttachRequest(request_id=pieces[0].request_id))
            assert [piece async for piece in again]
            attached = dict(await again.initial_metadata())
        assert attached == answered
        _, trace_id, span_id, flags = str(answered["traceresponse"]).split("-")
        [root] = (await trace_of(collecting, trace_id))[ROOT]
    assert answered["idempotency-key"] == pieces[0].request_id
    assert (root.span_id.hex(), root.parent_span_id, flags) == (span_id, b"", "01")


async def test_trace_attributes_come_from_request_headers() -> None:
    headers = (
        ("traceparent", PARENT),
        ("x-session-id", "talk-7"),
        ("x-gateway-inference-fairness-id", "acme"),
        ("x-application", "chat"),
        ("x-request-id", "mesh/1"),
    )
    async with traced() as (parts, collecting):
        async with grpc.aio.insecure_channel(parts.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = pb.GenerateRequest(text="hi", max_tokens=2)
            assert [piece async for piece in stub.Generate(request, metadata=headers)]
        spans = await trace_of(collecting, TRACE)
    root_attributes = attributes(spans[ROOT][0])
    assert (root_attributes["session.id"], root_attributes["everlift.fairness_id"]) == (
        "talk-7",
        "acme",
    )
    assert root_attributes["everlift.application"] == "chat"
    assert root_attributes["http.request.header.x-request-id"] == ["mesh/1"]


@pytest.mark.parametrize("traceparent, sample", [(f"00-{TRACE}-{SPAN}-00", 1.0), ("", 0.0)])
async def test_trace_not_sampled_is_not_exported(traceparent: str, sample: float) -> None:
    async with traced(sample=sample) as (parts, collecting):
        async with AsyncClient(parts.address) as client:
            await receive(client, [1], 3, traceparent=traceparent)
            # The export of a later trace shows that the earlier one is not exported.
            await receive(client, [2], 3, traceparent=PARENT.replace(TRACE, "f" * 32))
            await trace_of(collecting, "f" * 32)
    assert {span.trace_id.hex() for span in collecting.spans} == {"f" * 32}


async def test_trace_marks_attempt_on_lost_worker_as_error() -> None:
    async with traced() as (parts, collecting), AsyncClient(parts.address) as client:
        parts.hold()
        work = asyncio.create_task(receive(client, [7], 60, traceparent=PARENT))
        await until(lambda: any(held.num_requests for held in parts.held))
        [at] = [i for i, held in enumerate(parts.held) if held.num_requests]
        victim, held = parts.workers[at], parts.held[at]
        held.let(10)
        [live] = parts.routers[0]._requests._registry
        await until(lambda: live.num_tokens >= 5)
        killing = asyncio.create_task(parts.kill_worker(victim))
        await until(lambda: live.worker_id != victim.worker_id)
        for each in parts.held:
            each.release()
        assert (await work).tokens == right_tokens([7], 60)
        await killing
        spans = await trace_of(collecting, TRACE)
    first, second = spans["everlift.attempt"]
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert attributes(first)["everlift.outcome"] == "lost"
    assert attributes(first)["everlift.worker_id"] == victim.worker_id
    assert attributes(second)["everlift.outcome"] == "finished"
    assert second.status.code == Status.STATUS_CODE_UNSET
    assert len(spans["everlift.queue"]) == 2
    assert len(spans["everlift.engine.prefill"]) == 2
    [root] = spans[ROOT]
    assert attributes(root)["everlift.migrations"] == 1
    assert root.status.code == Status.STATUS_CODE_UNSET


async def test_trace_continues_after_gateway_loss() -> None:
    async with traced(routers=2, workers=1) as (parts, collecting):
        [held] = parts.hold()
        first, second = parts.routers
        async with AsyncClient([first.address, second.address]) as client:
            going = receive(
                client, [9], 40, traceparent=PARENT, on_disconnect=OnDisconnect.CONTINUE
            )
            work = asyncio.create_task(going)
            await until(lambda: held.num_requests)
            held.let(5)
            [live] = first._requests._registry
            await until(lambda: live.num_tokens >= 3)
            await parts.kill_router(first)
            held.release()
            assert (await work).tokens == right_tokens([9], 40)
            spans = await trace_of(collecting, TRACE)
    [root] = spans[ROOT]
    assert root.parent_span_id.hex() == SPAN
    outcomes = [attributes(span)["everlift.outcome"] for span in spans["everlift.attempt"]]
    assert outcomes == ["gateway_lost", "finished"]
    assert "take_over" in [event.name for event in root.events]
    assert all(is_within(span, root) for span in spans["everlift.attempt"])


async def test_trace_of_rejected_request_has_error_type() -> None:
    async with traced() as (parts, collecting), AsyncClient(parts.address) as client:
        with pytest.raises(UnknownModel):
            await client.generate("hi", traceparent=PARENT, model="marker" * 100_000).text()
        with pytest.raises(TooManyStops):
            await client.generate("hi", stop=["x"] * 17).text()
        await until(lambda: len(collecting.spans) == 2)
        refused, other = collecting.spans
    assert refused.trace_id.hex() == TRACE and refused.parent_span_id.hex() == SPAN
    assert refused.status.code == Status.STATUS_CODE_ERROR
    assert attributes(refused)["error.type"] == UnknownModel.slug
    assert "marker" not in str(refused)
    assert attributes(other)["error.type"] == TooManyStops.slug


async def test_trace_of_rejected_request_has_x_request_id() -> None:
    headers = (("traceparent", PARENT), ("x-request-id", "mesh/1"))
    async with traced() as (parts, collecting):
        async with grpc.aio.insecure_channel(parts.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(pb.GenerateRequest(model="none"), metadata=headers).read()
        await until(lambda: collecting.spans)
    [refused] = collecting.spans
    assert attributes(refused)["http.request.header.x-request-id"] == ["mesh/1"]


async def test_trace_of_queue_full_rejection_is_exported() -> None:
    async with collector() as collecting:
        config = replace(ROUTER, trace_endpoint=collecting.endpoint, max_queued=1)
        async with cluster(workers=0, router_config=config) as parts:
            # Requests that wait before the leader is known are not rejected.
            await until(lambda: parts.routers[0]._leader_client.is_open)
            async with AsyncClient(parts.address, reconnect_s=0.0, retry_s=0.0) as client:
                asked = [
                    asyncio.create_task(client.generate("hi", timeout_s=6.0).text())
                    for _ in range(6)
                ]
                results = await asyncio.gather(*asked, return_exceptions=True)
        refused = sum(isinstance(result, QueueFull) for result in results)
        await until(lambda: len(collecting.spans) >= 6)
    slugs = [attributes(span)["error.type"] for span in collecting.spans if not span.parent_span_id]
    assert slugs.count(QueueFull.slug) == refused >= 4


async def test_trace_ending_during_router_stop_is_exported() -> None:
    class Slow(KeptLedger):
        async def events(self, request_id: str) -> tuple[Event, ...]:
            await asyncio.sleep(0.05)
            return await super().events(request_id)

    async with collector() as collecting:
        config = replace(ROUTER, trace_endpoint=collecting.endpoint, drain=5.0)
        parts = Cluster(Slow(time.monotonic), config)
        router = await parts.add_router()
        await parts.add_worker()
        async with AsyncClient(parts.address) as client:
            work = asyncio.create_task(receive(client, [1], 100, traceparent=PARENT))
            await until(lambda: len(router._requests))
            parts.routers.remove(router)
            await router.stop()
            await work
        await parts.stop()
        assert ROOT in collecting.trace(TRACE)


@pytest.mark.parametrize("traceparent", ["ä", "abc\n", "x" * 20_000])
async def test_client_rejects_malformed_traceparent(traceparent: str) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="traceparent"):
            client.generate("hi", traceparent=traceparent)


@pytest.mark.parametrize(
    "state, kept", [(("a=1", "b=2"), "a=1,b=2"), (("SECRET token",), ""), (("a=1", "B"), "")]
)
async def test_tracestate_is_propagated_only_if_valid(
    state: tuple[str, ...], kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = (("traceparent", PARENT), *(("tracestate", each) for each in state))
    async with traced() as (parts, collecting):
        async with grpc.aio.insecure_channel(parts.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(pb.GenerateRequest(text="hi", max_tokens=2), metadata=metadata)
            assert [piece async for piece in call]
        spans = await trace_of(collecting, TRACE)
    assert {span.trace_state for named in spans.values() for span in named} == {kept}
    assert "SECRET" not in caplog.text


async def test_trace_of_cancelled_request_has_cancelled_state() -> None:
    async with traced() as (parts, collecting), AsyncClient(parts.address) as client:
        parts.hold()
        stream = client.generate("hi", max_tokens=50, traceparent=PARENT)
        reading = asyncio.create_task(stream.text())
        await until(lambda: any(held.num_requests for held in parts.held))
        await client.cancel(stream.request_id)
        with pytest.raises(Cancelled):
            await reading
        [root] = (await trace_of(collecting, TRACE))[ROOT]
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes(root)["everlift.state"] == "cancelled"


async def test_trace_collector_outage_does_not_affect_streams() -> None:
    config = replace(ROUTER, trace_endpoint=f"http://127.0.0.1:{free_port()}")
    loop = asyncio.get_running_loop()
    async with cluster(router_config=config) as parts, AsyncClient(parts.address) as client:
        for number in range(5):
            assert (await receive(client, [number], 10)).tokens == right_tokens([number], 10)
        stopping = loop.time()
    assert loop.time() - stopping < 4 * CLOSE_S


async def test_trace_exporter_headers_come_from_env_and_are_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    with caplog.at_level(logging.DEBUG):
        async with traced() as (parts, collecting), AsyncClient(parts.address) as client:
            await receive(client, [1], 3, traceparent=PARENT)
            await trace_of(collecting, TRACE)
    assert collecting.metadata[0]["authorization"] == "Bearer s3cret"
    assert collecting.resources[0]["service.name"] == "chat"
    assert "s3cret" not in caplog.text


async def test_router_without_trace_exporter_names_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    config = replace(ROUTER, trace_endpoint="http://127.0.0.1:1")
    with pytest.raises(SettingsError, match=r"pip install 'everlift\[traces\]'"):
        await Router.start(config, KeptLedger(time.monotonic))


async def test_trace_id_of_caller_is_stored_without_collector() -> None:
    async with cluster() as parts, AsyncClient(parts.address) as client:
        received = await receive(client, [1], 3, traceparent=PARENT)
        assert (await client.get_request(received.request_id)).trace_id == TRACE
        received = await receive(client, [1], 3)
        assert (await client.get_request(received.request_id)).trace_id == ""
