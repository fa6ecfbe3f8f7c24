"""A request's time at one worker, as its gateway sees it. Pure. Times are the router's clock in
seconds."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.requests.time_breakdown import Share, at_worker

#: Times without blocks that are kept of an attempt.
_MAX_PAUSES = 32


_NOTHING = session_pb2.Account()


class Speaker(Protocol):
    """A worker: when it was heard last, and what it said then of those that decode there, in a
    message of its own that stays as it is."""

    @property
    def last_heard(self) -> float: ...

    @property
    def decoding(self) -> session_pb2.Account: ...


class Silent:
    """A worker that cannot be reached."""

    last_heard = -inf
    decoding = _NOTHING


SILENT = Silent()


@dataclass(slots=True)
class Pause:
    """``choice`` has no KV blocks; ``until`` is None while it lasts."""

    choice: int
    since: float
    until: float | None = None


@dataclass(slots=True)
class Attempt:
    """``number`` counts from 1. None stands for what was not seen, or did not come to pass. What
    grows with each token or frame is as of the last look."""

    number: int
    dispatched: float
    worker_id: str = ""
    #: when it came there: its prompt, and what it had of outputs
    known_tokens: int = 0
    #: of its own tenant, at the same worker when it came there
    neighbours: tuple[str, ...] = ()
    #: of its own tenant too, at other workers then, if there was no room; and who came since
    occupants: tuple[str, ...] = ()
    newcomers: tuple[str, ...] = ()
    queue: pb.QueueStay | None = None
    #: None when it has left
    worker: Speaker | None = None
    #: of the request, by choice, and how many tokens they had when it came there
    outputs: Sequence[Sized] = ()
    tokens_before: int = 0
    #: to the first step that computed something of it, by the worker's clock
    waited_s: float | None = None
    #: known tokens that this step found in the KV cache
    cached_tokens: int = 0
    #: known tokens that are computed or cached, as the worker reported last in the prefill
    prefilled_tokens: int = 0
    first_token: float | None = None
    new_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    pauses: list[Pause] = field(default_factory=list)
    #: choices that have no KV blocks
    preempted: set[int] = field(default_factory=set)
    #: by the worker, of the choice that it told of last; and when that came
    account: session_pb2.Account | None = None
    accounted: float | None = None
    #: its worker's decoding then, and what came to that since
    _decoding: session_pb2.Account = field(default_factory=lambda: _NOTHING)
    since: session_pb2.Account = field(default_factory=lambda: _NOTHING)
    #: something was told of it
    is_begun: bool = False
    #: of one that was told of, when its worker was heard last
    heard: float | None = None
    #: how it ended, empty while it goes on
    end: str = ""

    @property
    def unaccounted(self) -> pb.SpanKind.ValueType:
        """What the time was since its worker told where it went, and not what came of others'."""
        if self._is_preempted:
            return pb.SPAN_KIND_PREEMPTED
        if self.new_tokens:
            return pb.SPAN_KIND_DECODE
        # After the first step and before the first token, the prompt is computed.
        return pb.SPAN_KIND_UNTOLD if self.waited_s is None else pb.SPAN_KIND_PREFILL

    @property
    def _is_preempted(self) -> bool:
        return (0 if self.account is None else self.account.choice) in self.preempted

    @property
    def shares(self) -> list[Share]:
        """Since its worker told where its time went: as with the others that decode there."""
        return at_worker(self.since)

    @property
    def steps(self) -> int:
        return self.since.steps + (self.account.steps if self.account is not None else 0)

    @property
    def last_token(self) -> float | None:
        """When it came, or later: as long as its worker was heard and it had its blocks."""
        if self.first_token is None:
            return None
        pause = self.pauses[-1] if self.pauses else None
        return pause.since if pause is not None and pause.until is None else self.heard

    # what comes of it

    def look(self) -> None:
        """At what its worker has said by now."""
        if self.worker is None:
            return
        self.new_tokens = sum(map(len, self.outputs)) - self.tokens_before
        if not self.is_begun:
            return
        self.heard = self.worker.last_heard
        if self.first_token is None or self.accounted is None or self._is_preempted:
            return
        if self.heard > self.accounted:
            self.since = _between(self._decoding, self.worker.decoding)

    def close(self, end: str) -> None:
        self.worker, self.outputs, self.end = None, (), end

    def tell(self, account: session_pb2.Account) -> None:
        """Its worker says where its time went."""
        assert self.worker is not None
        self.is_begun, self.accounted = True, self.worker.last_heard
        # A part of a message keeps all of it, and the worker's frame around it.
        self.account = session_pb2.Account()
        self.account.CopyFrom(account)
        self._decoding, self.since = self.worker.decoding, _NOTHING

    def progress(self, message: session_pb2.Progress) -> None:
        """What came with it besides more tokens than there were."""
        self.is_begun = True
        self.look()
        if self.new_tokens and self.first_token is None:
            self.first_token = self.heard
        if self.waited_s is None and message.HasField("waited_s"):
            self.waited_s, self.cached_tokens = message.waited_s, message.cached_tokens
        self.prefilled_tokens = message.prefilled_tokens or self.prefilled_tokens
        self.preemptions += message.preemptions
        self.recomputed_tokens += message.recomputed_tokens
        if message.residence == session_pb2.RESIDENCE_PREEMPTED:
            self._pause(message.choice)
        elif message.residence == session_pb2.RESIDENCE_RESUMED:
            self._resume(message.choice)

    def _pause(self, choice: int) -> None:
        assert self.heard is not None
        self.preempted.add(choice)
        if len(self.pauses) < _MAX_PAUSES:
            self.pauses.append(Pause(choice, self.heard))

    def _resume(self, choice: int) -> None:
        self.preempted.discard(choice)
        for pause in self.pauses:
            if pause.choice == choice and pause.until is None:
                pause.until = self.heard


def _between(then: session_pb2.Account, now: session_pb2.Account) -> session_pb2.Account:
    """Where the time went that has passed for all that decode."""
    return session_pb2.Account(
        stalled_s=now.stalled_s - then.stalled_s,
        decode_s=now.decode_s - then.decode_s,
        co_tenancy_s=now.co_tenancy_s - then.co_tenancy_s,
        between_steps_s=now.between_steps_s - then.between_steps_s,
        steps=max(0, now.steps - then.steps),
    )
