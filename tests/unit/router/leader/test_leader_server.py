"""The leader's end of the gateways' streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from everlift.v1 import session_pb2 as pb
from router.leader.server import LeaderServer
from tests.support.in_process import until


class Recorder:
    def __init__(self) -> None:
        self.words: list[str] = []

    def connected(self, gateway: str) -> None:
        self.words.append(f"{gateway} connected")

    def disconnected(self, gateway: str) -> None:
        self.words.append(f"{gateway} disconnected")

    def receive(self, gateway: str, message: pb.GatewayMessage) -> None:
        self.words.append(f"{gateway} says {' '.join(message.withdraw)}")


class Line:
    """Stream of a gateway: the messages that it sends and receives."""

    def __init__(self, lines: LeaderServer, name: str) -> None:
        self.said: asyncio.Queue[pb.GatewayMessage | None] = asyncio.Queue()
        self.said.put_nowait(pb.GatewayMessage(router_id=name, withdraw=["hello"]))
        self.received: list[pb.LeaderMessage] = []
        self.task = asyncio.create_task(self._listen(lines))

    def say(self, word: str) -> None:
        self.said.put_nowait(pb.GatewayMessage(withdraw=[word]))

    async def _messages(self) -> AsyncIterator[pb.GatewayMessage]:
        while (message := await self.said.get()) is not None:
            yield message

    async def _listen(self, lines: LeaderServer) -> None:
        async with aclosing(lines.serve_stream(self._messages())) as answers:
            async for message in answers:
                self.received.append(message)

    @property
    def is_over(self) -> bool:
        return self.task.done() and self.received[-1].resigned


async def test_line_exchanges_messages_until_the_gateway_hangs_up() -> None:
    recorder = Recorder()
    lines = LeaderServer(recorder)
    line = Line(lines, "g")
    await until(lambda: recorder.words == ["g connected", "g says hello"])
    lines.send("g", pb.LeaderMessage(queued=7))
    lines.send("nobody", pb.LeaderMessage(queued=8))
    await until(lambda: line.received and line.received[-1].queued == 7)
    line.said.put_nowait(None)
    await until(lambda: line.is_over)
    assert recorder.words[2:] == ["g disconnected"]
    assert lines.gateways == []


async def test_lines_end_with_the_leaders_resignation() -> None:
    recorder = Recorder()
    lines = LeaderServer(recorder)
    both = [Line(lines, "a"), Line(lines, "b")]
    await until(lambda: len(lines.gateways) == 2)
    lines.disconnect_all()
    assert lines.gateways == []
    await until(lambda: all(line.is_over for line in both))
    assert recorder.words.count("a disconnected") == 1


async def test_line_is_replaced_by_a_newer_one_of_its_gateway() -> None:
    recorder = Recorder()
    lines = LeaderServer(recorder)
    old = Line(lines, "g")
    await until(lambda: "g says hello" in recorder.words)
    recorder.words.clear()
    new = Line(lines, "g")
    await until(lambda: recorder.words == ["g disconnected", "g connected", "g says hello"])
    old.say("late")
    await until(lambda: old.is_over)
    new.say("news")
    await until(lambda: "g says news" in recorder.words)
    assert "g says late" not in recorder.words
    assert lines.gateways == ["g"]
    lines.disconnect_all()
    await until(lambda: new.is_over)


async def test_line_without_a_gateway_name_is_rejected() -> None:
    recorder = Recorder()
    line = Line(LeaderServer(recorder), "")
    await until(lambda: line.is_over)
    assert not recorder.words


async def test_lines_take_turns_despite_a_busy_gateway() -> None:
    recorder = Recorder()
    lines = LeaderServer(recorder)
    loud, quiet = Line(lines, "loud"), Line(lines, "quiet")
    for number in range(100):
        loud.say(f"{number}")
    quiet.say("once")
    await until(lambda: "loud says 99" in recorder.words)
    assert recorder.words.index("quiet says once") < recorder.words.index("loud says 9")
    lines.disconnect_all()
    await until(lambda: loud.is_over and quiet.is_over)
