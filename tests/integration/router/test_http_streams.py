"""Streams of OpenAI's API over HTTP: keep-alive, late failures, changes of the owning router."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from everlift.client.client import AsyncClient
from everlift.errors import DataLoss, ForgottenRequest, UnknownRequest
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.api.chat_renderer import ChatRenderer
from router.api.http.event_id import BEGIN, EventId
from router.api.kserve.v2 import open_inference_pb2, open_inference_pb2_grpc
from router.chat.conversation import Conversation
from router.requests.request import Elsewhere
from router.requests.tokenizer import ServedModel
from router.router import Router
from tests.support.in_process import (
    ROUTER,
    WORKER,
    Cluster,
    Held,
    cluster,
    paced_cluster,
    right_tokens,
    until,
)
from tests.support.router.http_client import JSON, Event, Stream, ask, streamed

PROMPT = [5, 6, 7]
BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stream": True}
NAMED = {**JSON, "idempotency-key": "mine"}
#: A client that parses every line as JSON.
PLAIN = {**NAMED, "accept": "application/json"}
COMMENT = b": keep-alive\n\n"
QUICK = replace(ROUTER, keep_alive=0.05)


def right_text(parts: Cluster, prompt: list[int], count: int) -> str:
    return parts.routers[0]._models.first.tokenizer.decode(right_tokens(prompt, count))


def text_of(events: list[Event], choice: int = 0) -> str:
    chunks = [json.loads(event.data) for event in events if event.data != "[DONE]"]
    shown = [it for chunk in chunks for it in chunk["choices"] if it["index"] == choice]
    return "".join(it["text"] for it in shown)


# keep-alive


@dataclass
class Idle:
    """Stream whose worker takes no step until released, and the chunks that its client read."""

    parts: Cluster
    held: Held
    began: asyncio.Future[Stream]
    read: list[bytes] = field(default_factory=list)

    async def run(self, headers: Mapping[str, str]) -> None:
        address = self.parts.routers[0].http_address
        async with streamed(address, "/v1/completions", BODY, headers) as stream:
            self.began.set_result(stream)
            async for chunk in stream._chunks():
                self.read.append(chunk)


@asynccontextmanager
async def idle_stream(headers: Mapping[str, str], **router: Any) -> AsyncIterator[Idle]:
    async with cluster(workers=1, router_config=replace(QUICK, **router)) as parts:
        [held] = parts.hold()
        idle = Idle(parts, held, asyncio.get_running_loop().create_future())
        reading = asyncio.create_task(idle.run(headers))
        await until(lambda: held.num_requests)
        yield idle
        held.release()
        await reading


async def test_queued_stream_sends_headers_and_comments() -> None:
    async with idle_stream(NAMED) as idle:
        stream = await asyncio.wait_for(idle.began, 30)
        assert stream.status == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["idempotency-key"] == "mine"
        await until(lambda: len(idle.read) >= 4)
        assert set(idle.read) == {COMMENT}
    events = b"".join(idle.read).replace(COMMENT, b"").decode().split("\n\n")
    assert events[-2].endswith("data: [DONE]")


async def test_stream_gets_comments_between_tokens() -> None:
    async with idle_stream(NAMED) as idle:
        idle.held.let(5)
        await until(lambda: any(b"data: " in chunk for chunk in idle.read))
        await until(lambda: idle.read[-3:] == [COMMENT] * 3)


@pytest.mark.parametrize(
    ("comments", "headers", "has_comments"),
    [
        ("accept", PLAIN, False),
        ("accept", {**NAMED, "accept": "text/event-stream, */*"}, True),
        ("always", PLAIN, True),
    ],
)
async def test_comments_go_to_clients_that_accept_them(
    comments: str, headers: Mapping[str, str], has_comments: bool
) -> None:
    async with idle_stream(headers, keep_alive_comments=comments) as idle:
        assert (await asyncio.wait_for(idle.began, 30)).status == 200
        if has_comments:
            await until(lambda: idle.read)
        else:
            await asyncio.sleep(0.2)
            assert not idle.read
    assert (COMMENT in idle.read) == has_comments
    lines = b"".join(idle.read).replace(COMMENT, b"").decode().split("\n")
    assert all(line.startswith(("data: ", "id: ")) for line in lines if line)


async def test_keep_alive_zero_sends_nothing_before_first_token() -> None:
    async with idle_stream(NAMED, keep_alive=0.0) as idle:
        await asyncio.sleep(0.2)
        assert not idle.began.done()
        idle.held.let(5)
        await until(lambda: idle.read)
        await asyncio.sleep(0.2)
    assert COMMENT not in idle.read


async def test_stream_without_pause_has_no_comments() -> None:
    async with cluster(workers=1, router_config=replace(ROUTER, keep_alive=5.0)) as parts:
        address = parts.routers[0].http_address
        async with streamed(address, "/v1/completions", BODY) as stream:
            events = [event async for event in stream.events()]
        assert stream.num_comments == 0
        assert text_of(events) == right_text(parts, PROMPT, 40)


@pytest.mark.parametrize("keep_alive", [0.1, 0.0])
async def test_rejection_is_event_after_headers_and_status_before(keep_alive: float) -> None:
    """A request queued longer than queue_ttl gets status 429, or an event after its headers."""
    # Headers and a comment precede the rejection, even if a busy machine sends them late.
    queue_ttl = 5.0 if keep_alive else 0.5
    config = replace(ROUTER, queue_ttl=queue_ttl, keep_alive=keep_alive, local_depth=0)
    slow = replace(WORKER, max_num_seqs=1)
    async with cluster(workers=1, router_config=config, worker_config=slow) as parts:
        [held] = parts.hold()
        address = parts.routers[0].http_address
        first = asyncio.create_task(ask(address, "/v1/completions", {**BODY, "max_tokens": 2}))
        await until(lambda: held.num_requests)
        async with streamed(address, "/v1/completions", BODY, NAMED) as stream:
            if not keep_alive:
                assert stream.status == 429
                assert json.loads(await stream.rest())["error"]["code"] == "queue_timeout"
                assert int(stream.headers["retry-after"]) >= 1
            else:
                assert stream.status == 200
                [event] = [event async for event in stream.events()]
                assert stream.num_comments
                error = event.json["error"]
                assert (error["code"], error["type"]) == ("queue_timeout", "rate_limit_error")
                assert error["retry_after"] > 0
                assert error["should_retry"] is True
                assert "resume" not in error
        held.release()
        await first


async def test_final_error_event_has_should_retry_false() -> None:
    async with idle_stream(NAMED) as idle:
        await asyncio.wait_for(idle.began, 30)
        async with AsyncClient(idle.parts.address) as client:
            await client.cancel("mine")
        await until(lambda: any(b"data: " in chunk for chunk in idle.read))
        [data] = [chunk for chunk in idle.read if b"data: " in chunk]
        error = json.loads(data.partition(b"data: ")[2])["error"]
        assert error["code"] == "cancelled"
        assert (error["retry_after"], error["should_retry"]) == (None, False)


async def test_grpc_stream_sends_metadata_before_first_token() -> None:
    async with cluster(workers=1) as parts:
        [held] = parts.hold()
        async with grpc.aio.insecure_channel(parts.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[misc]
            message = pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), max_tokens=2)
            one = stub.Generate(message)
            many = stub.GenerateMany(pb.GenerateManyRequest(requests=[message]))
            for call in (one, many):
                await asyncio.wait_for(call.initial_metadata(), 30)
            await until(lambda: held.num_requests == 2)
            held.release()
            assert [piece async for piece in one] and [piece async for piece in many]


# data loss


def last_event(name: str, *tokens: int) -> dict[str, str]:
    positions = [BEGIN._replace(tokens=count, characters=count) for count in tokens]
    return {**JSON, "last-event-id": str(EventId(name, positions))}


@pytest.mark.parametrize("router", [0, 1])
async def test_resume_of_unknown_request_with_offset_is_data_loss(router: int) -> None:
    async with cluster(routers=2, workers=1) as parts:
        address = parts.routers[router].http_address
        for headers, prompts, status, code in (
            (last_event("lost", 3), PROMPT, 500, "data_loss"),
            (last_event("lost", 0, 3), [[1], [2]], 500, "data_loss"),
            (last_event("lost", 0), PROMPT, 404, "unknown_request"),
        ):
            answer = await ask(address, "/v1/completions", {**BODY, "prompt": prompts}, headers)
            assert (answer.status, answer.error[0]) == (status, code)
            assert (answer.headers.get("x-should-retry") == "false") == (code == "data_loss")
        async with AsyncClient(parts.routers[router].address) as client:
            with pytest.raises(DataLoss):
                await client.attach("lost", 3).text()
            with pytest.raises(UnknownRequest):
                await client.attach("lost").text()


@pytest.mark.parametrize("router", [0, 1])
async def test_resume_of_forgotten_request_is_not_data_loss(router: int) -> None:
    config = replace(ROUTER, reassert=0.0)
    async with cluster(routers=2, workers=1, router_config=config) as parts:
        assert (await ask(parts.routers[0].http_address, "/v1/completions", BODY, NAMED)).status
        async with AsyncClient(parts.address) as client:
            await client.forget("mine")
        answer = await ask(
            parts.routers[router].http_address, "/v1/completions", BODY, last_event("mine", 3)
        )
        assert (answer.status, answer.error[0]) == (404, "forgotten_request")
        async with AsyncClient(parts.routers[router].address) as client:
            with pytest.raises(ForgottenRequest):
                await client.attach("mine", 3).text()


async def test_resume_after_ledger_and_router_loss_is_data_loss() -> None:
    """A resuming SSE client gets the same error as a gRPC client."""
    async with paced_cluster() as parts:
        body = {**BODY, "max_tokens": 400}
        async with streamed(parts.routers[0].http_address, "/v1/completions", body, NAMED) as old:
            events = aiter(old.events())
            last = [await anext(events) for _ in range(3)][-1]
            await parts.kill_router(parts.routers[0])
        ledger: Any = parts.ledger
        for records in (ledger._records, ledger._owned, ledger._ended):
            records.clear()
        router = await parts.add_router()
        headers = {**JSON, "last-event-id": last.id}
        answer = await ask(router.http_address, "/v1/completions", body, headers)
        assert (answer.status, answer.error[0]) == (500, "data_loss")


# changes of the owning router


async def move(parts: Cluster, request_id: str, old: Router, new: Router) -> None:
    """Let ``new`` take over the request from ``old``, which is alive but has lost its lease."""
    async with asyncio.timeout(60):
        while (await parts.ledger.get(request_id)).gateway != new.router_id:
            await parts.ledger.end_lease(old.router_id)
            # The old router may renew its lease before the new one has looked at it.
            with suppress(Elsewhere):
                await new._requests._takeover.take_over(request_id)


async def has_tokens(parts: Cluster, request_id: str, count: int) -> bool:
    return sum((await parts.ledger.get(request_id)).num_tokens) >= count


MOVES = [((0, 1),), ((0, 1), (1, 0)), ((0, 1), (1, 2)), ((0, 1), (1, 0), (0, 2), (2, 1))]


@pytest.mark.parametrize("moves", MOVES, ids=str)
@pytest.mark.parametrize("headers", [NAMED, PLAIN], ids=["ids", "plain"])
async def test_stream_follows_its_request(
    moves: tuple[tuple[int, int], ...], headers: Mapping[str, str]
) -> None:
    """The client of router 0 gets every token once, whichever router owns the request."""
    async with paced_cluster(routers=3) as parts:
        body = {**BODY, "max_tokens": 100, "stream_options": {"include_usage": True}}
        read: list[bytes] = []
        address = parts.routers[0].http_address

        async def run() -> None:
            async with streamed(address, "/v1/completions", body, headers) as stream:
                async for chunk in stream._chunks():
                    read.append(chunk)

        reading = asyncio.create_task(run())
        for old, new in moves:
            count = len(read)
            await until(lambda count=count: len(read) > count + 4)  # type: ignore[misc]
            await move(parts, "mine", parts.routers[old], parts.routers[new])
        await asyncio.wait_for(reading, 60)
        events = [
            line.removeprefix("data: ")
            for line in b"".join(read).decode().split("\n")
            if line.startswith("data: ")
        ]
        assert events[-1] == "[DONE]"
        chunks = [Event("", data) for data in events[:-1]]
        assert text_of(chunks) == right_text(parts, PROMPT, 100)
        usage = chunks[-1].json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 100)


async def test_chat_follows_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def text(self: ChatRenderer, model: ServedModel, conversation: Conversation) -> str:
        return "hi"

    monkeypatch.setattr(ChatRenderer, "_text", text)
    async with paced_cluster(routers=2) as parts:
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "stream": True}
        body |= {"max_tokens": 60}
        address = parts.routers[0].http_address
        parts_of_text: list[str] = []
        async with streamed(address, "/v1/chat/completions", body, NAMED) as stream:
            async for event in stream.events():
                if event.data == "[DONE]":
                    break
                [choice] = event.json["choices"]
                parts_of_text.append(choice["delta"].get("content", ""))
                if len(parts_of_text) == 5:
                    await move(parts, "mine", *parts.routers)
        assert choice["finish_reason"] == "length"
        assert "".join(parts_of_text) == right_text(parts, [*b"hi"], 60)


async def test_kserve_stream_follows_its_request() -> None:
    async with paced_cluster(routers=2) as parts:
        async with grpc.aio.insecure_channel(parts.address) as channel:
            stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = open_inference_pb2.ModelInferRequest(id="mine", model_name="fake")
            request.parameters["request_id"].string_param = "mine"
            request.parameters["temperature"].double_param = 0
            request.parameters["max_tokens"].int64_param = 60
            request.inputs.add(name="input_ids", datatype="UINT32", shape=[3])
            request.raw_input_contents.append(struct.pack("<3I", *PROMPT))
            tokens: list[int] = []
            num_answers = 0
            async for answer in stub.ModelStreamInfer(iter([request])):
                assert not answer.error_message
                response = answer.infer_response
                num_answers += 1
                for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
                    if output.name == "output_ids":
                        tokens.extend(struct.unpack(f"<{output.shape[0]}i", raw))
                if num_answers == 5:
                    await move(parts, "mine", *parts.routers)
            assert response.parameters["triton_final_response"].bool_param
            assert tokens == right_tokens(PROMPT, 60)


async def test_stream_of_several_prompts_follows_each_request() -> None:
    async with paced_cluster(routers=2) as parts:
        body = {**BODY, "prompt": [[5], [6]], "n": 2, "max_tokens": 60}
        address = parts.routers[0].http_address
        seen: list[Event] = []
        async with streamed(address, "/v1/completions", body, NAMED) as stream:
            async for event in stream.events():
                seen.append(event)
                if len(seen) in (8, 24):
                    place = 0 if len(seen) == 8 else 1
                    await move(parts, f"mine:{place}", *parts.routers)
        assert seen[-1].data == "[DONE]"
        for choice in range(4):
            assert text_of(seen, choice) == right_text(parts, [5 + choice // 2], 60)


async def test_unary_answer_follows_its_request() -> None:
    async with paced_cluster(routers=2) as parts:
        address = parts.routers[0].http_address
        body = {**BODY, "stream": False}
        asking = asyncio.create_task(ask(address, "/v1/completions", body, NAMED))
        while not (parts.ledger._records and await has_tokens(parts, "mine", 3)):  # type: ignore[attr-defined]
            await asyncio.sleep(0.002)
        await move(parts, "mine", *parts.routers)
        answer = await asking
        assert answer.status == 200
        assert answer.json["choices"][0]["text"] == right_text(parts, PROMPT, 40)


async def test_relayed_stream_survives_death_of_owning_router() -> None:
    """The relaying router takes over the request of the router that dies."""
    async with paced_cluster(routers=2) as parts:
        here, other = parts.routers
        body = {**BODY, "max_tokens": 200, "on_disconnect": "continue"}
        async with streamed(other.http_address, "/v1/completions", body, NAMED) as first:
            await anext(aiter(first.events()))
            async with streamed(here.http_address, "/v1/completions", body, NAMED) as stream:
                seen = []
                async for event in stream.events():
                    seen.append(event)
                    if len(seen) == 5:
                        await parts.kill_router(other)
        assert seen[-1].data == "[DONE]"
        assert text_of(seen) == right_text(parts, PROMPT, 200)
        assert (await parts.ledger.get("mine")).gateway == here.router_id


async def test_relayed_stream_survives_stop_of_owning_router() -> None:
    async with paced_cluster(routers=2) as parts:
        here, other = parts.routers
        body = {**BODY, "max_tokens": 200, "on_disconnect": "continue"}
        async with streamed(other.http_address, "/v1/completions", body, NAMED) as first:
            await anext(aiter(first.events()))
            stopping = None
            async with streamed(here.http_address, "/v1/completions", body, NAMED) as stream:
                seen = []
                async for event in stream.events():
                    seen.append(event)
                    if len(seen) == 5:
                        stopping = asyncio.create_task(other.stop())
            assert stopping is not None
            await stopping
        parts.routers.remove(other)
        assert seen[-1].data == "[DONE]"
        assert text_of(seen) == right_text(parts, PROMPT, 200)


async def test_stopping_router_ends_relayed_streams_resumably() -> None:
    async with paced_cluster(routers=2) as parts:
        owner, leaving = parts.routers
        body = {**BODY, "max_tokens": 300}
        async with streamed(owner.http_address, "/v1/completions", body, NAMED) as first:
            await anext(aiter(first.events()))
            async with streamed(leaving.http_address, "/v1/completions", body, NAMED) as stream:
                seen = []
                async for event in stream.events():
                    seen.append(event)
                    if len(seen) == 3:
                        stopping = asyncio.create_task(leaving.stop())
            await stopping
            parts.routers.remove(leaving)
            error = seen.pop().json["error"]
            assert error["code"] == "router_stopping"
            headers = {**JSON, **error["resume"]}
            async with streamed(owner.http_address, "/v1/completions", body, headers) as stream:
                rest = [event async for event in stream.events()]
        assert text_of([*seen, *rest]) == right_text(parts, PROMPT, 300)


async def test_grpc_calls_follow_their_requests() -> None:
    async with paced_cluster(routers=2) as parts:
        async with grpc.aio.insecure_channel(parts.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[misc]
            message = pb.GenerateRequest(
                request_id="one",
                tokens=pb.TokenIds(ids=PROMPT),
                max_tokens=60,
                sampling=pb.Sampling(temperature=0.0),
            )
            many = pb.GenerateManyRequest(requests=[message])
            many.requests[0].request_id = "many"
            one, several = stub.Generate(message), stub.GenerateMany(many)
            for request_id in ("one", "many"):
                while not (
                    request_id in parts.ledger._records  # type: ignore[attr-defined]
                    and await has_tokens(parts, request_id, 3)
                ):
                    await asyncio.sleep(0.002)
            for request_id in ("one", "many"):
                await move(parts, request_id, *parts.routers)
            tokens = [token async for piece in one for token in piece.token_ids]
            assert tokens == right_tokens(PROMPT, 60)
            pieces = [it.piece async for message in several for it in message.pieces]
            tokens = [token for piece in pieces for token in piece.token_ids]
            assert tokens == right_tokens(PROMPT, 60)
            assert pieces[-1].HasField("usage")


async def test_stopping_router_sends_resume_headers() -> None:
    async with paced_cluster(routers=2) as parts:
        leaving, other = parts.routers
        body = {**BODY, "max_tokens": 100}
        seen: list[Event] = []
        stopping = None
        async with streamed(leaving.http_address, "/v1/completions", body, NAMED) as stream:
            async for event in stream.events():
                seen.append(event)
                if stopping is None:
                    stopping = asyncio.create_task(leaving.stop())
        assert stopping is not None
        error = seen.pop().json["error"]
        assert (error["code"], error["should_retry"]) == ("router_stopping", True)
        assert error["resume"] == {"idempotency-key": "mine", "last-event-id": seen[-1].id}
        assert "POST the same body again with the headers" in error["message"]
        assert all(value in error["message"] for value in error["resume"].values())
        await stopping
        parts.routers.remove(leaving)
        headers = {**JSON, **error["resume"]}
        async with streamed(other.http_address, "/v1/completions", body, headers) as stream:
            rest = [event async for event in stream.events()]
        assert text_of([*seen, *rest]) == right_text(parts, PROMPT, 100)
