"""In which order requests leave the admission queue, and how many may wait. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol, Self

from everlift.v1 import session_pb2


@dataclass(frozen=True, slots=True)
class Waiting:
    """What order and placement may look at.

    ``arrived``, ``deadline`` and ``ttft_deadline`` are ledger time in seconds; ``arrived`` survives
    requeues. ``prefill_tokens`` are to be computed before the next token: the prompt, which the
    choices share, and each choice's output so far. ``max_tokens`` may still be generated, by all of
    the ``choices`` together.
    """

    request_id: str
    gateway: str
    arrived: float
    prefill_tokens: int
    max_tokens: int
    avoid: str = ""
    choices: int = 1
    #: a larger one goes first
    priority: int = 0
    deadline: float = inf
    ttft_deadline: float = inf
    #: times that it may still be moved when it is preempted
    moves_left: int = 0
    #: it may be what its last workers died of
    is_suspect: bool = False
    #: that will probably be generated, of all choices
    predicted_tokens: int = 0

    @property
    def due(self) -> float:
        """The earliest moment by which something of it is wanted, ledger time; infinite: none."""
        return min(self.deadline, self.ttft_deadline)

    @property
    def work_tokens(self) -> int:
        """To be computed for it, as predicted."""
        return self.prefill_tokens + self.predicted_tokens

    @classmethod
    def told(cls, gateway: str, message: session_pb2.Waiting) -> Self:
        return cls(
            message.request_id,
            gateway,
            message.arrived,
            message.prompt_tokens,
            message.max_tokens,
            message.avoid,
            message.choices,
            message.priority,
            message.deadline or inf,
            message.ttft_deadline or inf,
            message.moves_left,
            message.suspect,
            message.predicted_tokens,
        )


class Ordered(Protocol):
    """Whatever has a place in the queue's order: it waits, or runs and may come back."""

    @property
    def request_id(self) -> str: ...

    @property
    def arrived(self) -> float: ...

    @property
    def priority(self) -> int: ...

    @property
    def due(self) -> float: ...


#: Compared as a tuple; the smallest key leaves first.
Key = tuple[float | str, ...]


class Policy(Protocol):
    """A key is taken once, when the request enters the queue: it may not depend on the time."""

    #: how operators call it
    name: str

    def key(self, waiting: Ordered) -> Key: ...


class Fifo:
    """By class, then by arrival. A request that comes back from a worker keeps its place."""

    name = "fifo"

    def key(self, waiting: Ordered) -> Key:
        return (-waiting.priority, waiting.arrived, waiting.request_id)


class EarliestDeadline:
    """By class, then by what is due first: a request's deadline or that of its first token. Those
    without any come after all that have one, by arrival.

    A missed one still goes first, as its time does not change its key. And as nothing ages, those
    without a deadline wait for as long as those with one keep the workers busy.
    """

    name = "deadline"

    def key(self, waiting: Ordered) -> Key:
        return (-waiting.priority, waiting.due, waiting.arrived, waiting.request_id)


#: By their names.
ORDERS: Mapping[str, Policy] = {policy.name: policy for policy in (Fifo(), EarliestDeadline())}


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds of the admission queue now."""

    order: Policy
    #: requests that may wait; one more is refused
    max_queued: int
