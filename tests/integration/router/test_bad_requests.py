"""Every bad request gets status, slug and cause; a concurrent stream is undisturbed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from everlift import error_details, wire
from everlift.client.client import AsyncClient
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from tests.support.in_process import ROUTER, Cluster, cluster, receive, right_tokens, until

NEIGHBOUR = [5, 6, 7]


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    async with cluster(workers=1, router_config=replace(ROUTER, max_queued=2)) as parts:
        yield parts


@pytest.fixture
async def client(parts: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(parts.address) as client:
        yield client


async def refused(address: str, method: str, data: bytes) -> tuple[str, str, str]:
    """Return status, slug and cause of the error of a call with arbitrary bytes."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(f"/everlift.v1.Inference/{method}")(data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    error = caught.value
    details = error_details.decode(dict(error.trailing_metadata() or ()).get(wire.DETAILS, b""))
    return error.code().name, details.slug if details else "", error.details() or ""


BAD_REQUESTS = {
    "empty prompt": (dict(text=""), "INVALID_ARGUMENT", "empty_prompt"),
    "no prompt": (dict(), "INVALID_ARGUMENT", "empty_prompt"),
    "no tokens": (dict(tokens=pb.TokenIds()), "INVALID_ARGUMENT", "empty_prompt"),
    "prompt as long as the context": (
        dict(tokens=pb.TokenIds(ids=[1] * 4096)),
        "INVALID_ARGUMENT",
        "prompt_too_long",
    ),
    "huge prompt": (dict(text="x" * 5_000_000), "INVALID_ARGUMENT", "prompt_text_too_long"),
    "unknown token": (dict(tokens=pb.TokenIds(ids=[1024])), "INVALID_ARGUMENT", "out_of_range"),
    "largest token": (
        dict(tokens=pb.TokenIds(ids=[2**32 - 1])),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "negative temperature": (dict(temperature=-0.1), "INVALID_ARGUMENT", "out_of_range"),
    "temperature not a number": (dict(temperature=math.nan), "INVALID_ARGUMENT", "out_of_range"),
    "infinite temperature": (dict(temperature=math.inf), "INVALID_ARGUMENT", "out_of_range"),
    "top_p above one": (dict(top_p=1.5), "INVALID_ARGUMENT", "out_of_range"),
    "top_p zero": (dict(top_p=0.0), "INVALID_ARGUMENT", "out_of_range"),
    "negative top_k": (dict(top_k=-2), "INVALID_ARGUMENT", "out_of_range"),
    "min_p above one": (dict(min_p=2.0), "INVALID_ARGUMENT", "out_of_range"),
    "no tokens wanted": (dict(text="a", max_tokens=0), "INVALID_ARGUMENT", "out_of_range"),
    "absurd max_tokens": (
        dict(text="a", max_tokens=2**32 - 1),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "absurd n": (dict(text="a", n=1_000_000), "INVALID_ARGUMENT", "too_many_choices"),
    "no choice": (dict(text="a", n=0), "INVALID_ARGUMENT", "out_of_range"),
    "long session_id": (dict(text="a", session_id="s" * 129), "INVALID_ARGUMENT", "out_of_range"),
    "long application": (dict(text="a", application="a" * 129), "INVALID_ARGUMENT", "out_of_range"),
    "long fairness_id": (dict(text="a", fairness_id="ä" * 65), "INVALID_ARGUMENT", "out_of_range"),
    "a million stop tokens": (
        dict(text="a", stop_token_ids=[1] * 1_000_000),
        "INVALID_ARGUMENT",
        "too_many_stops",
    ),
    "a million tokens": (
        dict(tokens=pb.TokenIds(ids=[1] * 1_000_000)),
        "INVALID_ARGUMENT",
        "prompt_too_long",
    ),
    "n above the most": (dict(text="a", n=129), "INVALID_ARGUMENT", "too_many_choices"),
    "best_of above n": (dict(text="a", n=2, best_of=3), "INVALID_ARGUMENT", "out_of_range"),
    "best_of without n": (dict(text="a", best_of=2), "INVALID_ARGUMENT", "out_of_range"),
    "long cache_salt": (dict(text="a", cache_salt="s" * 129), "INVALID_ARGUMENT", "out_of_range"),
    "long cache_salt in bytes": (
        dict(text="a", cache_salt="ä" * 65),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "repetition_penalty zero": (dict(repetition_penalty=0.0), "INVALID_ARGUMENT", "out_of_range"),
    "negative repetition_penalty": (
        dict(repetition_penalty=-1.0),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "presence_penalty not a number": (
        dict(presence_penalty=math.nan),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "presence_penalty above two": (
        dict(presence_penalty=2.1),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "infinite frequency_penalty": (
        dict(frequency_penalty=-math.inf),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "logit_bias of an unknown token": (
        dict(logit_bias={1024: 1.0}),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "absurd logit_bias": (dict(logit_bias={1: 101.0}), "INVALID_ARGUMENT", "out_of_range"),
    "logit_bias not a number": (dict(logit_bias={1: math.nan}), "INVALID_ARGUMENT", "out_of_range"),
    "logit_bias of everything": (
        dict(logit_bias=dict.fromkeys(range(1025), 1.0)),
        "INVALID_ARGUMENT",
        "logit_bias_too_large",
    ),
    "min_tokens above max_tokens": (
        dict(text="a", max_tokens=5, sampling=pb.Sampling(min_tokens=6)),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "min_tokens beyond the context": (dict(min_tokens=4096), "INVALID_ARGUMENT", "out_of_range"),
    "absurd min_tokens": (dict(min_tokens=2**32 - 1), "INVALID_ARGUMENT", "out_of_range"),
    "absurd logprobs": (dict(logprobs=1_000_000), "INVALID_ARGUMENT", "out_of_range"),
    "absurd prompt_logprobs": (dict(prompt_logprobs=21), "INVALID_ARGUMENT", "out_of_range"),
    "grammar without a form": (dict(grammar=pb.Grammar()), "INVALID_ARGUMENT", "invalid_request"),
    "empty regex": (dict(grammar=pb.Grammar(regex="")), "INVALID_ARGUMENT", "invalid_request"),
    "no choices": (
        dict(grammar=pb.Grammar(choice=pb.Choices())),
        "INVALID_ARGUMENT",
        "invalid_request",
    ),
    "an empty choice": (
        dict(grammar=pb.Grammar(choice=pb.Choices(texts=["a", ""]))),
        "INVALID_ARGUMENT",
        "invalid_request",
    ),
    "too many choices": (
        dict(grammar=pb.Grammar(choice=pb.Choices(texts=["a"] * 1025))),
        "INVALID_ARGUMENT",
        "grammar_too_large",
    ),
    "long grammar": (
        dict(grammar=pb.Grammar(ebnf="a" * 70_000)),
        "INVALID_ARGUMENT",
        "grammar_too_large",
    ),
    "empty stop string": (dict(text="a", stop=[""]), "INVALID_ARGUMENT", "invalid_request"),
    "too many stop strings": (
        dict(text="a", stop=["s"] * 100_000),
        "INVALID_ARGUMENT",
        "too_many_stops",
    ),
    "long stop string": (
        dict(text="a", stop=["s" * 1_000_000]),
        "INVALID_ARGUMENT",
        "too_many_stops",
    ),
    "unknown stop token": (
        dict(text="a", stop_token_ids=[1024]),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
    "no time": (dict(text="a", timeout_ms=0), "INVALID_ARGUMENT", "out_of_range"),
    "unknown model": (dict(text="a", model="gpt-9"), "NOT_FOUND", "unknown_model"),
    "model of a novel's length": (
        dict(text="a", model="ä" * 600_000),
        "NOT_FOUND",
        "unknown_model",
    ),
    "model by path": (dict(text="a", model="../../etc"), "NOT_FOUND", "unknown_model"),
    "request id with a newline": (
        dict(text="a", request_id="a\nb"),
        "INVALID_ARGUMENT",
        "invalid_request",
    ),
    "request id with braces": (
        dict(text="a", request_id="{0}"),
        "INVALID_ARGUMENT",
        "invalid_request",
    ),
    "long request id": (
        dict(text="a", request_id="a" * 129),
        "INVALID_ARGUMENT",
        "invalid_request",
    ),
    "unknown way to disconnect": (
        dict(text="a", on_disconnect=77),
        "INVALID_ARGUMENT",
        "out_of_range",
    ),
}
_SAMPLING = pb.Sampling.DESCRIPTOR.fields_by_name.keys()


def message(fields: dict[str, object]) -> bytes:
    if _SAMPLING & fields.keys():
        fields = {"text": "a", "sampling": pb.Sampling(**fields)}  # type: ignore[arg-type]
    return pb.GenerateRequest(**fields).SerializeToString()  # type: ignore[arg-type]


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_bad_request_is_rejected_before_engine(
    parts: Cluster, client: AsyncClient, case: str
) -> None:
    fields, status, slug = BAD_REQUESTS[case]
    neighbour = asyncio.create_task(receive(client, NEIGHBOUR, 60))
    started = _starts_of(parts)
    answer = await refused(parts.address, "Generate", message(dict(fields)))
    assert answer[:2] == (status, slug)
    assert len(answer[2]) > 10
    assert (await neighbour).tokens == right_tokens(NEIGHBOUR, 60)
    assert len(started) <= 1


def _starts_of(parts: Cluster) -> list[str]:
    link = parts.routers[0]._sessions.links[0]
    started: list[str] = []
    start = link.start
    link.start = lambda starts: (started.extend(s.request_id for s in starts), start(starts))  # type: ignore
    return started


@pytest.mark.parametrize(
    ("data", "slug"),
    [
        (b"\x12\x04ab\xff\xfe", "not_utf8"),
        (b"\x12\x03\xed\xa0\x80", "not_utf8"),
        pytest.param(b"\x32\x01s" * 1_000_000 + b"\x32\x01\xff", "not_utf8", id="at a long end"),
        (b"\xff\xff\xff\xff", "invalid_request"),
        (b"\x12\xff", "invalid_request"),
    ],
)
async def test_malformed_message_is_rejected_with_slug(
    parts: Cluster, client: AsyncClient, data: bytes, slug: str
) -> None:
    neighbour = asyncio.create_task(receive(client, NEIGHBOUR, 60))
    status, answered, _ = await refused(parts.address, "Generate", data)
    assert (status, answered) == ("INVALID_ARGUMENT", slug)
    assert (await neighbour).tokens == right_tokens(NEIGHBOUR, 60)


async def test_request_id_reuse_with_different_body_conflicts(
    parts: Cluster, client: AsyncClient
) -> None:
    stream = client.generate([1, 2], max_tokens=50, temperature=0, request_id="mine")
    await anext(stream)
    other = message(dict(text="other", request_id="mine"))
    # The ledger uses the same words once the router no longer holds the request.
    cause = 'request id "mine" already exists with a different request body'
    answer = await refused(parts.address, "Generate", other)
    assert answer == ("ALREADY_EXISTS", "request_conflict", cause)
    assert await stream.text() is not None
    again = client.generate([1, 2], max_tokens=50, temperature=0, request_id="mine")
    tokens = [token async for chunk in again for token in chunk.token_ids]
    assert tokens == right_tokens([1, 2], 50)


async def test_attach_rejects_unknown_requests_and_bad_offsets(
    parts: Cluster, client: AsyncClient
) -> None:
    received = await receive(client, [1, 2], 5)
    for request_id, offsets, status, slug in [
        ("nobody", [], "NOT_FOUND", "unknown_request"),
        (received.request_id, [6], "OUT_OF_RANGE", "offset_out_of_range"),
        (received.request_id, [-1], "OUT_OF_RANGE", "offset_out_of_range"),
        (received.request_id, [0, 0], "OUT_OF_RANGE", "offset_out_of_range"),
        (received.request_id, [0] * 1_000_000, "OUT_OF_RANGE", "offset_out_of_range"),
        ("a\nb", [], "INVALID_ARGUMENT", "invalid_request"),
    ]:
        attach = pb.AttachRequest(request_id=request_id, from_offsets=offsets)
        answer = await refused(parts.address, "Attach", attach.SerializeToString())
        assert answer[:2] == (status, slug)


async def test_full_queue_returns_resource_exhausted() -> None:
    config = replace(ROUTER, max_queued=2)
    async with (
        cluster(workers=0, router_config=config) as parts,
        AsyncClient(parts.address) as client,
    ):
        waiting = [asyncio.create_task(receive(client, [n], 5)) for n in (1, 2)]
        await until(lambda: parts.routers[0]._leader_client.queued == 2)
        answer = await refused(parts.address, "Generate", message(dict(text="a", request_id="r")))
        assert answer[:2] == ("RESOURCE_EXHAUSTED", "queue_full")
        await parts.add_worker()
        for number, task in enumerate(waiting, 1):
            assert (await task).tokens == right_tokens([number], 5)
        stream = client.generate("a", max_tokens=3, temperature=0, request_id="r")
        assert sum([len(chunk.token_ids) async for chunk in stream]) == 3


async def test_expired_request_gets_deadline_exceeded_and_frees_blocks(
    parts: Cluster, client: AsyncClient
) -> None:
    link = parts.routers[0]._sessions.links[0]
    request = pb.GenerateRequest(text="slow", timeout_ms=150, request_id="late")
    answer = await refused(parts.address, "Generate", request.SerializeToString())
    assert answer[:2] == ("DEADLINE_EXCEEDED", "deadline_exceeded")
    await until(lambda: link.state.blocks_used == 0)
    assert (await client.get_request("late")).state == pb.REQUEST_STATE_EXPIRED


async def test_grpc_deadline_sets_request_deadline(
    parts: Cluster, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may deliver the answer late.
    monkeypatch.setattr("router.api.grpc.handlers._ANSWER_MARGIN_S", 4.0)
    link = parts.routers[0]._sessions.links[0]
    async with grpc.aio.insecure_channel(parts.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="slow", request_id="late"), timeout=8.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # The error comes from the router, not from a deadline of the client library.
    assert wire.DETAILS in dict(caught.value.trailing_metadata() or ())
    assert link.state.step > 0
    await until(lambda: link.state.blocks_used == 0)
    entry = await parts.ledger.get("late")
    assert entry.state.value == "expired"


async def test_grpc_disconnect_cancels_request_and_frees_blocks(
    parts: Cluster, client: AsyncClient
) -> None:
    link = parts.routers[0]._sessions.links[0]
    async with grpc.aio.insecure_channel(parts.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="plain", request_id="gone"))
        await until(lambda: link.state.num_running == 1)
        call.cancel()
        await until(lambda: link.state.num_running == 0)
    assert link.state.blocks_used == 0
    await until_state(parts, "gone", "cancelled")


async def until_state(parts: Cluster, request_id: str, state: str) -> None:
    async with asyncio.timeout(10):
        while (await parts.ledger.get(request_id)).state.value != state:
            await asyncio.sleep(0.01)
