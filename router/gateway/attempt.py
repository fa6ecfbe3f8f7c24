"""A request's time at one worker, as its gateway sees it. Pure. Times are the router's clock in
seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2

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
    worker_id: str = ""
    #: when it came there: its prompt, and what it had of outputs
    known_tokens: int = 0
    #: of its own tenant, at the same worker when it came there
    neighbours: tuple[str, ...] = ()
    queue: pb.QueueStay | None = None
    #: to the first step that computed something of it, by the worker's clock
    waited_s: float | None = None
    #: known tokens that this step found in the KV cache
    cached_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    new_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    pauses: list[Pause] = field(default_factory=list)
    #: choices that have no KV blocks
    preempted: set[int] = field(default_factory=set)
    #: by the worker, of the choice that told of itself last; and when that came
    account: session_pb2.Account | None = None
    accounted: float | None = None
    accounted_choice: int = 0
    #: when its worker told of it last
    heard: float | None = None
    #: how it ended, empty while it goes on
    end: str = ""

    @property
    def unaccounted(self) -> pb.SpanKind.ValueType:
        """What the time was since its worker told where it went."""
        if self.accounted_choice in self.preempted:
            return pb.SPAN_KIND_PREEMPTED
        return pb.SPAN_KIND_DECODE if self.new_tokens else pb.SPAN_KIND_UNTOLD

    def progress(self, message: session_pb2.Progress, num_new: int, now: float) -> None:
        self.heard = now
        if num_new:
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now
            self.new_tokens += num_new
        if message.HasField("account"):
            self._tell(message, now)
        if self.waited_s is None and message.HasField("waited_s"):
            self.waited_s, self.cached_tokens = message.waited_s, message.cached_tokens
        if message.preemptions or message.recomputed_tokens:
            self.preemptions += message.preemptions
            self.recomputed_tokens += message.recomputed_tokens
        if message.residence == session_pb2.RESIDENCE_PREEMPTED:
            self._pause(message.choice, now)
        elif message.residence == session_pb2.RESIDENCE_RESUMED:
            self._resume(message.choice, now)

    def _tell(self, message: session_pb2.Progress, now: float) -> None:
        # A part of a message keeps all of it, and the worker's frame around it.
        self.account = session_pb2.Account()
        self.account.CopyFrom(message.account)
        self.accounted, self.accounted_choice = now, message.choice

    def _pause(self, choice: int, now: float) -> None:
        self.preempted.add(choice)
        if len(self.pauses) < _MAX_PAUSES:
            self.pauses.append(Pause(choice, now))

    def _resume(self, choice: int, now: float) -> None:
        self.preempted.discard(choice)
        for pause in self.pauses:
            if pause.choice == choice and pause.until is None:
                pause.until = now
