"""Waits of a step for a grammar process, and the end of a late one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from everlift.errors import InvalidGrammar
from worker.grammar.backlog import Backlog
from worker.grammar.channel import Channel
from worker.grammar.messages import CHUNK, Reply, encode_reply


class GrammarProcess:
    """Grammar process that the test controls, at the other end of ``channel``.

    By default calls do not wait.
    """

    def __init__(self, timeout_s: float = 0.0) -> None:
        ours, self.sock = socket.socketpair()
        self.backlog = Backlog()
        self.channel = Channel(ours, 0.1, timeout_s, self.backlog)

    def ask(self, matcher: int, do: str = "open") -> None:
        self.channel.expect(matcher)
        self.channel.send({"do": do, "matcher": matcher})

    def answer(self, matcher: int, body: bytes = b"mask") -> None:
        self.sock.sendall(encode_reply(Reply(False, matcher, body, 0.001)))

    def take(self, matcher: int) -> bytes:
        return self.channel.take_reply(matcher, time.monotonic())

    def is_closed(self) -> bool:
        """Read the pending requests, and return whether the channel is closed after them."""
        self.sock.recv(CHUNK)
        return not self.sock.recv(CHUNK, socket.MSG_DONTWAIT)


@pytest.fixture
def process() -> Iterator[GrammarProcess]:
    made = GrammarProcess()
    with closing(made.sock):
        yield made


def test_silent_grammar_process_is_ended_after_timeout(process: GrammarProcess) -> None:
    process.ask(1)
    with pytest.raises(InvalidGrammar, match="takes too long"):
        process.take(1)
    assert process.is_closed()


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_messages_of_a_lost_process_are_ignored(
    process: GrammarProcess, is_waited_for: bool
) -> None:
    process.ask(1)
    process.ask(2)
    process.answer(1)
    process.sock.recv(CHUNK)
    process.sock.close()
    with pytest.raises(InvalidGrammar):
        process.ask(3)
    if not is_waited_for:
        assert process.channel.has_reply(1), "there is no use in waiting"
    for matcher in (1, 2):
        with pytest.raises(InvalidGrammar, match="takes too long"):
            process.take(matcher)
    assert process.backlog.seconds == pytest.approx(0)


def test_dropped_matcher_leaves_the_backlog(process: GrammarProcess) -> None:
    process.ask(1)
    process.ask(2)
    process.channel.drop_matcher(1)
    assert process.backlog.seconds == pytest.approx(0.1)
    process.answer(1)
    process.answer(2)
    assert process.take(2) == b"mask"
    assert process.backlog.seconds == pytest.approx(0)
    process.ask(2)
    assert process.backlog.seconds == pytest.approx(0.001)


def test_grammar_timeout_fails_only_waiting_sequences(
    process: GrammarProcess,
) -> None:
    process.ask(1)
    process.ask(2)
    began = time.monotonic()
    process.answer(1)
    assert process.channel.take_reply(1, began) == b"mask"
    with pytest.raises(InvalidGrammar, match="takes too long"):
        process.channel.take_reply(2, began)
    assert not process.channel.is_lost
    process.answer(2)
    assert process.take(2) == b"mask"


def test_step_waits_for_one_grammar_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines: list[float] = []

    def wait(channel: Channel, events: int, deadline: float) -> bool:
        """Record the deadline, and time out."""
        deadlines.append(deadline)
        return False

    monkeypatch.setattr(Channel, "_wait", wait)
    processes = [GrammarProcess(timeout_s=5.0) for _ in range(3)]
    for each in processes:
        each.ask(1)
    silent, slow, quick = processes
    quick.answer(1)
    began = time.monotonic()
    for each in (silent, slow):
        with pytest.raises(InvalidGrammar):
            each.channel.take_reply(1, began)
    assert quick.channel.take_reply(1, began) == b"mask"
    assert deadlines == [began + 5.0] * 2
    for each in processes:
        each.sock.close()
