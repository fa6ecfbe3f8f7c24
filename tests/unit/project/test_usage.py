"""Usage and stop reason of a request, over migrations and takeovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from tests.support.router.gateway_support import Gateway, started_gateway, until

EOS = session_pb2.STOP_CAUSE_EOS


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with started_gateway() as gateway:
        yield gateway


async def lose(gateway: Gateway, num_enqueued: int) -> None:
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == num_enqueued)


async def usage(gateway: Gateway, request_id: str = "r") -> pb.Usage:
    live = await gateway.requests.attach(request_id)
    return (await gateway.read(live))[-1].usage


async def test_cached_tokens_are_those_of_the_first_attempt(gateway: Gateway) -> None:
    await gateway.submit(text="prompt")
    gateway.make(await gateway.dispatch(), 0, "a", waited_s=0.0, cached_tokens=4)
    await lose(gateway, 2)
    gateway.make(await gateway.dispatch(), 1, "b", EOS, waited_s=0.0, cached_tokens=7)
    expected = pb.Usage(prompt_tokens=6, output_tokens=2, cached_tokens=4)
    assert await usage(gateway) == expected
    # The usage is read from the ledger now.
    await until(lambda: not len(gateway.requests))
    assert await usage(gateway) == expected


async def test_cached_tokens_ignore_an_attempt_that_never_began(
    gateway: Gateway,
) -> None:
    await gateway.submit(text="prompt")
    await gateway.dispatch()
    await lose(gateway, 2)
    gateway.make(await gateway.dispatch(), 0, "a", EOS, waited_s=0.0, cached_tokens=5)
    assert (await usage(gateway)).cached_tokens == 5


async def test_cached_tokens_count_the_prompt_once_for_all_choices(gateway: Gateway) -> None:
    await gateway.submit(text="prompt", n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "a", EOS, choice=1, waited_s=0.0, cached_tokens=6)
    gateway.make(epoch, 0, "b", EOS, choice=0, waited_s=0.0, cached_tokens=2)
    assert (await usage(gateway)).cached_tokens == 2


@pytest.mark.parametrize("cached_tokens", [0, 3])
async def test_cached_tokens_survive_a_takeover(cached_tokens: int) -> None:
    async with started_gateway() as successor:
        gone = Gateway(successor.ledger, "gone")
        run = asyncio.create_task(gone.requests.attempts.run())
        live = await gone.submit(text="prompt", on_disconnect=pb.ON_DISCONNECT_CONTINUE)
        epoch = await gone.dispatch()
        gone.make(epoch, 0, "a", waited_s=0.0, cached_tokens=cached_tokens)
        await until(lambda: live.choices[0].stored == 1)
        run.cancel()
        await successor.requests._takeover.take_over("r")
        successor.make(await successor.dispatch(), 1, "b", EOS, waited_s=0.0, cached_tokens=6)
        assert (await usage(successor)).cached_tokens == cached_tokens
        await gone.requests.stop(0.0)


async def test_stream_head_reports_the_prompt_token_count(gateway: Gateway) -> None:
    live = await gateway.submit(text="prompt")
    gateway.make(await gateway.dispatch(), 0, "a", EOS)
    head, *pieces = await gateway.read(live)
    assert [head.prompt_tokens, *(piece.prompt_tokens for piece in pieces)] == [6, 0]


@pytest.mark.parametrize(
    ("output", "stop_token_ids", "expected"),
    [
        ("aENDb", [], {"stop_string": "END"}),
        ("a#", [ord("#")], {"stop_token_id": ord("#")}),
        ("a$", [], {}),
        ("a$", [ord("$")], {}),
    ],
)
async def test_stop_reason_survives_migration_and_storage(
    gateway: Gateway, output: str, stop_token_ids: list[int], expected: dict[str, object]
) -> None:
    gateway.model.eos_ids = (ord("$"),)
    await gateway.submit(stop=["END"], stop_token_ids=stop_token_ids)
    gateway.make(await gateway.dispatch(), 0, output[:1])
    await lose(gateway, 2)
    gateway.make(await gateway.dispatch(), 1, output[1:], EOS)
    await until(lambda: not len(gateway.requests))
    # The reason is read from the ledger, independently of the router's own end tokens.
    gateway.model.eos_ids = ()
    *_, last = await gateway.read(await gateway.requests.attach("r"))
    reason = last.WhichOneof("stop_reason")
    assert ({reason: getattr(last, reason)} if reason else {}) == expected
    assert last.finish_reason == pb.FINISH_REASON_STOP
