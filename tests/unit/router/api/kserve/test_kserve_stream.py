"""Concurrent requests on one stream: their order, their limit, and their end with the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.api.kserve.infer_stream import InferStream
from router.api.kserve.v2 import open_inference_pb2 as pb
from tests.support.router.gateway_support import until


class Requests:
    """Requests whose message states the name and the number of answers: b"a3"."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.most = 0
        self.may_go_on = asyncio.Event()

    async def answer(self, data: bytes) -> AsyncIterator[pb.ModelStreamInferResponse]:
        name, count = data.decode()[0], int(data.decode()[1:])
        self.running.add(name)
        self.most = max(self.most, len(self.running))
        try:
            for number in range(count):
                yield pb.ModelStreamInferResponse(error_message=f"{name}{number}")
                await self.may_go_on.wait()
        finally:
            self.running.remove(name)


async def sent(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def read(stream: InferStream, messages: AsyncIterator[bytes]) -> list[str]:
    return [answer.error_message async for answer in stream.answers(messages)]


async def test_infer_stream_runs_requests_at_once_each_in_order() -> None:
    requests, answers = Requests(), list[str]()

    async def read_all() -> None:
        async for answer in InferStream(requests.answer).answers(sent(b"a2", b"b3", b"c0")):
            answers.append(answer.error_message)

    reading = asyncio.create_task(read_all())
    await until(lambda: sorted(answers) == ["a0", "b0"])
    requests.may_go_on.set()
    await reading
    assert sorted(answers) == ["a0", "a1", "b0", "b1", "b2"]
    assert [it for it in answers if it[0] == "b"] == ["b0", "b1", "b2"]


async def test_infer_stream_without_requests_ends() -> None:
    assert await read(InferStream(Requests().answer), sent()) == []


async def test_infer_stream_limits_concurrent_requests() -> None:
    requests = Requests()
    messages = [f"{name}2".encode() for name in "abcdefg"]
    reading = asyncio.create_task(read(InferStream(requests.answer, 2), sent(*messages)))
    await until(lambda: len(requests.running) == 2)
    requests.may_go_on.set()
    assert len(await reading) == 14
    assert requests.most == 2


async def test_infer_stream_ends_all_requests_when_closed() -> None:
    requests = Requests()
    answers = InferStream(requests.answer).answers(sent(b"a9", b"b9"))
    await anext(answers)
    await until(lambda: len(requests.running) == 2)
    await answers.aclose()  # type: ignore[attr-defined]
    assert not requests.running


async def test_infer_stream_loses_nothing_for_a_slow_reader() -> None:
    requests = Requests()
    requests.may_go_on.set()
    answers = InferStream(requests.answer).answers(sent(b"a5", b"b5"))
    got = []
    async for answer in answers:
        for _ in range(20):
            await asyncio.sleep(0)
        got.append(answer.error_message)
    assert sorted(got) == sorted(f"{name}{number}" for name in "ab" for number in range(5))


async def test_infer_stream_reports_broken_input_after_answers() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"a1"
        raise ConnectionError("gone")

    requests = Requests()
    requests.may_go_on.set()
    answers = InferStream(requests.answer).answers(broken())
    assert (await anext(answers)).error_message == "a0"
    with pytest.raises(ConnectionError):
        await anext(answers)
