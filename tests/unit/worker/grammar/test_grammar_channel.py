"""How long a step waits for a grammar's keeper, and what becomes of one that is late."""

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


class Keeper:
    """In the test's hands, at the other end of ``channel``, on which nobody waits by default."""

    def __init__(self, patience_s: float = 0.0) -> None:
        ours, self.sock = socket.socketpair()
        self.backlog = Backlog()
        self.channel = Channel(ours, 0.1, patience_s, self.backlog)

    def ask(self, matcher: int, do: str = "open") -> None:
        self.channel.expect(matcher)
        self.channel.tell({"do": do, "matcher": matcher})

    def answer(self, matcher: int, body: bytes = b"mask") -> None:
        self.sock.sendall(encode_reply(Reply(False, matcher, body, 0.001)))

    def take(self, matcher: int) -> bytes:
        return self.channel.take(matcher, time.monotonic())

    def is_told_to_end(self) -> bool:
        """Behind what it was asked."""
        self.sock.recv(CHUNK)
        return not self.sock.recv(CHUNK, socket.MSG_DONTWAIT)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    with closing(keeper.sock):
        yield keeper


def test_a_keeper_that_is_silent_for_too_long_is_ended(keeper: Keeper) -> None:
    keeper.ask(1)
    with pytest.raises(InvalidGrammar, match="takes too long"):
        keeper.take(1)
    assert keeper.is_told_to_end()


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_what_a_keeper_said_before_it_was_gone_is_not_heard_any_more(
    keeper: Keeper, is_waited_for: bool
) -> None:
    keeper.ask(1)
    keeper.ask(2)
    keeper.answer(1)
    keeper.sock.recv(CHUNK)
    keeper.sock.close()
    with pytest.raises(InvalidGrammar):
        keeper.ask(3)
    if not is_waited_for:
        assert keeper.channel.has_reply(1), "there is no use in waiting"
    for matcher in (1, 2):
        with pytest.raises(InvalidGrammar, match="takes too long"):
            keeper.take(matcher)
    assert keeper.backlog.seconds == pytest.approx(0)


def test_one_that_is_behind_with_its_work_costs_those_who_wait_and_goes_on(keeper: Keeper) -> None:
    keeper.ask(1)
    keeper.ask(2)
    began = time.monotonic()
    keeper.answer(1)
    assert keeper.channel.take(1, began) == b"mask"
    with pytest.raises(InvalidGrammar, match="takes too long"):
        keeper.channel.take(2, began)
    assert not keeper.channel.is_lost
    keeper.answer(2)
    assert keeper.take(2) == b"mask"


def test_what_one_keeper_was_waited_for_the_others_of_the_step_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines: list[float] = []

    def wait(channel: Channel, events: int, deadline: float) -> bool:
        """As long as it takes."""
        deadlines.append(deadline)
        return False

    monkeypatch.setattr(Channel, "_wait", wait)
    keepers = [Keeper(patience_s=5.0) for _ in range(3)]
    for each in keepers:
        each.ask(1)
    silent, slow, quick = keepers
    quick.answer(1)
    began = time.monotonic()
    for each in (silent, slow):
        with pytest.raises(InvalidGrammar):
            each.channel.take(1, began)
    assert quick.channel.take(1, began) == b"mask"
    assert deadlines == [began + 5.0] * 2
    for each in keepers:
        each.sock.close()
