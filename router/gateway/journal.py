"""What a gateway sees of a traced request between its moves in the ledger. Pure.

    dispatched --waits at its worker--> first step --> first token --> last token --> left
                                                     |--- preempted, resumed ---|

Times are the router's clock in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from everlift.v1 import session_pb2
from router.ledger.entry import MAX_EVENTS

#: Times without blocks that are kept of an attempt.
_MAX_PAUSES = 32


@dataclass(slots=True)
class Pause:
    """``choice`` has no KV blocks; ``until`` is None while it lasts."""

    choice: int
    since: float
    until: float | None = None


@dataclass(slots=True)
class Attempt:
    """``number`` counts from 1. None stands for what was not seen, or did not come to pass."""

    number: int
    dispatched: float
    #: to the first step that computed something of it, by the worker's clock
    waited_s: float | None = None
    #: known tokens that this step found in the KV cache
    cached_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    new_tokens: int = 0
    pauses: list[Pause] = field(default_factory=list)

    def progress(self, message: session_pb2.Progress, num_new: int, now: float) -> None:
        if message.HasField("waited_s") and self.waited_s is None:
            self.waited_s, self.cached_tokens = message.waited_s, message.cached_tokens
        if num_new:
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now
            self.new_tokens += num_new
        if message.residence == session_pb2.RESIDENCE_PREEMPTED:
            self._pause(message.choice, now)
        elif message.residence == session_pb2.RESIDENCE_RESUMED:
            self._resume(message.choice, now)

    def _pause(self, choice: int, now: float) -> None:
        if len(self.pauses) < _MAX_PAUSES:
            self.pauses.append(Pause(choice, now))

    def _resume(self, choice: int, now: float) -> None:
        for pause in self.pauses:
            if pause.choice == choice and pause.until is None:
                pause.until = now


class Journal:
    """``accept_s`` is what it took to accept the request: tokenised, and in the ledger. None where
    another gateway did."""

    def __init__(self) -> None:
        self.accept_s: float | None = None
        #: since its arrival, when its first token could be read
        self.readable_s: float | None = None
        self._attempts: deque[Attempt] = deque(maxlen=MAX_EVENTS)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts)

    def accepted(self, accept_s: float) -> None:
        self.accept_s = accept_s

    def dispatched(self, number: int, now: float) -> None:
        self._attempts.append(Attempt(number, now))

    def progress(self, message: session_pb2.Progress, num_new: int, now: float) -> None:
        """With it came so many tokens that the request did not have."""
        if self._attempts:
            self._attempts[-1].progress(message, num_new, now)

    def readable(self, since_begun_s: float) -> None:
        """By clients, for the first time here."""
        if self.accept_s is not None:
            self.readable_s = since_begun_s
