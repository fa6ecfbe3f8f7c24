"""Spans of a request add up to its total time at a router, over each front.

This includes the time before the router knows what is requested.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc
import pytest

from everlift import wire
from everlift.client.client import AsyncClient
from everlift.v1 import inference_pb2 as pb
from router.api.kserve.v2 import open_inference_pb2 as kserve_pb
from router.api.service import IDEMPOTENCY_KEY
from router.chat.templates import ChatTemplate
from tests.integration.router.test_explain import Bounds, check_sum, seconds
from tests.support.in_process import ROUTER, WORKER, Cluster, cluster, until
from tests.support.router.fronts import CHAT, COMPLETIONS, GENERATE, INFER, element
from tests.support.router.http_client import JSON, ask
from tests.support.router.rim import Rim
from tests.support.router.scrape import scraped
from tests.support.worker.grammar_support import DEMO_MODEL
from worker.config import WorkerConfig

MANY = "/everlift.v1.Inference/GenerateMany"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
#: Enough tokens that 1 % of their time exceeds one iteration of the router's event loop.
TOKENS = 150
LATE_S = 0.2
_TRIES = 4


@pytest.fixture
def rim(monkeypatch: pytest.MonkeyPatch) -> Rim:
    return Rim(monkeypatch)


@pytest.fixture
async def parts(rim: Rim) -> AsyncIterator[Cluster]:
    async with cluster(1, 1, ROUTER, WORKER) as parts:
        yield parts


@pytest.fixture
async def chatting(rim: Rim) -> AsyncIterator[Cluster]:
    worker = WorkerConfig(model=str(DEMO_MODEL), device="cpu", num_blocks=64, num_threads=1)
    async with cluster(1, 1, replace(ROUTER, model=str(DEMO_MODEL)), worker) as parts:
        yield parts


async def explain(parts: Cluster, name: str) -> pb.Explanation:
    async with AsyncClient(parts.address) as client:
        return await client.explain(name)


async def added_up(
    parts: Cluster, rim: Rim, send: Callable[[str], Awaitable[None]]
) -> pb.Explanation:
    """Return the explanation of a request whose spans add up to its measured time.

    A busy machine may pause the process between two readings of the clock; then the request is
    repeated.
    """
    for number in range(_TRIES):
        await send(name := f"r{number}")
        wall_s, explanation = rim.seconds[name], await explain(parts, name)
        if abs(sum(seconds(explanation).values()) - wall_s) <= max(1e-3, 0.01 * wall_s):
            break
    check_sum(explanation, Bounds(wall_s, wall_s))
    return explanation


def named(name: str) -> dict[str, str]:
    return {**JSON, IDEMPOTENCY_KEY: name}


Fields = Mapping[str, Any]
#: Sends one named call; its body follows LATE_S after the router received the headers.
Send = Callable[[Cluster, Rim, str], Awaitable[None]]


async def late(rim: Rim, name: str) -> None:
    await until(lambda: name in rim.arrivals)
    await asyncio.sleep(LATE_S)


def over_grpc(method: str, message: Callable[[str], Any]) -> Send:
    async def send(parts: Cluster, rim: Rim, name: str) -> None:
        async def messages() -> AsyncIterator[bytes]:
            await late(rim, name)
            yield message(name).SerializeToString()

        async with grpc.aio.insecure_channel(parts.address) as channel:
            call = channel.stream_stream(method)(messages(), metadata=((IDEMPOTENCY_KEY, name),))
            while await wire.read(call) is not None:
                pass

    return send


def over_http(body: Fields) -> Send:
    async def send(parts: Cluster, rim: Rim, name: str) -> None:
        data, address = json.dumps(body).encode(), parts.routers[0].http_address
        fields = {"host": address, "content-length": str(len(data)), **named(name)}
        head = "".join(f"{it}: {value}\r\n" for it, value in fields.items())
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\n{head}connection: close\r\n\r\n".encode())
        await late(rim, name)
        writer.write(data)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()

    return send


def generate(name: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", max_tokens=TOKENS)


def infer(name: str) -> kserve_pb.ModelInferRequest:
    message = kserve_pb.ModelInferRequest(model_name="fake", raw_input_contents=[element(b"a")])
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    message.parameters["max_tokens"].int64_param = TOKENS
    message.parameters["request_id"].string_param = name
    return message


FRONTS = {
    "Generate": over_grpc(GENERATE, generate),
    "ModelInfer": over_grpc(INFER, infer),
    "completions": over_http({"prompt": "a", "max_tokens": TOKENS}),
    "completions as they come": over_http({"prompt": "a", "max_tokens": TOKENS, "stream": True}),
}


@pytest.mark.parametrize("front", FRONTS)
async def test_explain_counts_slow_body_as_receive_time(
    parts: Cluster, rim: Rim, front: str
) -> None:
    explanation = await added_up(parts, rim, lambda name: FRONTS[front](parts, rim, name))
    assert explanation.spans[0].kind == pb.SPAN_KIND_RECEIVE
    assert explanation.spans[0].seconds > LATE_S


async def test_timing_and_metrics_start_at_call(parts: Cluster, rim: Rim) -> None:
    async def messages() -> AsyncIterator[bytes]:
        await late(rim, "r")
        yield generate("r").SerializeToString()

    async with grpc.aio.insecure_channel(parts.address) as channel:
        call = channel.stream_stream(GENERATE, response_deserializer=pb.GenerateResponse.FromString)
        *_, last = [it async for it in call(messages(), metadata=((IDEMPOTENCY_KEY, "r"),))]
    explanation, timing = await explain(parts, "r"), last.timing
    assert timing.time_to_first_token_s == explanation.ttft_s > LATE_S
    assert LATE_S < timing.total_s <= explanation.total_s
    samples = (await scraped(parts.routers[0].metrics_address)).samples

    def total_s(name: str) -> float:
        return samples.total(f"everlift_{name}_seconds_sum")

    assert total_s("time_to_first_token") == pytest.approx(timing.time_to_first_token_s)
    assert total_s("request_latency") == pytest.approx(timing.total_s)
    assert total_s("queue_wait") < explanation.total_s - LATE_S


async def test_explain_batch_requests_start_at_shared_call(parts: Cluster, rim: Rim) -> None:
    def many(name: str) -> pb.GenerateManyRequest:
        return pb.GenerateManyRequest(requests=[pb.GenerateRequest(text="a", max_tokens=2)] * 2)

    await over_grpc(MANY, many)(parts, rim, "r")
    await over_http({"prompt": ["a", "b"], "max_tokens": 2})(parts, rim, "s")
    for name in ("r:0", "r:1", "s:0", "s:1"):
        explanation = await explain(parts, name)
        assert explanation.spans[0].kind == pb.SPAN_KIND_RECEIVE
        assert explanation.spans[0].seconds > LATE_S


async def test_explain_streamed_request_starts_at_own_message(parts: Cluster, rim: Rim) -> None:
    """The call that carries the message may be much older."""
    await over_grpc(STREAM_INFER, lambda _: infer("r"))(parts, rim, "s")
    assert (await explain(parts, "r")).total_s < rim.seconds["s"] - LATE_S


class HeldTemplate:
    """Chat template of a router that can be held; while it is held, nothing is rendered."""

    def __init__(self, template: ChatTemplate, patch: pytest.MonkeyPatch) -> None:
        self.is_asked = False
        self._renders = template.render
        patch.setattr(template, "render", self._render)
        processes = [one._process for one in template._processes]
        self._pids = [process.pid for process in processes if process is not None]

    def hold(self) -> None:
        self.is_asked = False
        self._signal(signal.SIGSTOP)

    async def _render(self, *args: Any, **more: Any) -> str:
        self.is_asked = True
        return await self._renders(*args, **more)

    def let(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.killpg(pid, number)


@pytest.mark.parametrize("stream", [False, True])
async def test_explain_counts_template_rendering_as_receive_time(
    chatting: Cluster, rim: Rim, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    router = chatting.routers[0]
    [template] = router._templates.values()
    template.start()
    [process] = template._processes
    await until(lambda: process._process)
    template = HeldTemplate(template, monkeypatch)
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 20, "stream": stream}

    async def send(name: str) -> None:
        template.hold()
        chat = asyncio.create_task(ask(router.http_address, CHAT, body, named(name)))
        await until(lambda: template.is_asked)
        await asyncio.sleep(LATE_S)
        template.let()
        assert (await chat).status == 200

    explanation = await added_up(chatting, rim, send)
    received = explanation.spans[0]
    assert received.kind == pb.SPAN_KIND_RECEIVE and received.seconds > LATE_S
