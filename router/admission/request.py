"""What waits in the admission queue, as far as order and placement look at it. Pure."""

from __future__ import annotations

from math import inf
from typing import NamedTuple, Protocol, Self, TypeAlias

from everlift.v1 import session_pb2
from router.admission.wanted import Wanted

#: By which the requests of a class are ordered, a number first: the smallest place leaves first.
Place: TypeAlias = tuple[float, *tuple[float | str, ...]]

#: By which the requests of all classes are ordered.
Key: TypeAlias = tuple[float | str, ...]


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

    @property
    def predicted_total(self) -> int: ...

    @property
    def predicted_rank(self) -> float: ...

    @property
    def predicted_work_rank(self) -> float: ...

    @property
    def foreseen_wait_s(self) -> float: ...


class Waiting(NamedTuple):
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
    #: its prompt and all its output, as predicted when it came: it stays when it comes back. 0: no
    #: order goes by it, nor by the two below
    predicted_total: int = 0
    #: the part of the requests lately whose outputs were predicted to be shorter; it stays too
    predicted_rank: float = 0.0
    #: the same of its prompt and all its output
    predicted_work_rank: float = 0.0
    #: seconds until what waited when it came has left the queue, as was foreseen. It stays too
    foreseen_wait_s: float = 0.0
    #: it was told before, or has run
    accepted: bool = False
    #: some worker has had it
    has_run: bool = False
    #: that each of its outputs gets at the least, as far as anybody can tell
    least_tokens: int = 1
    #: when it has waited for too long, ledger time
    expires: float = inf
    #: seconds until it leaves the queue, until its first token, and for each one after that, as
    #: predicted when it came
    predicted_wait_s: float | None = None
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None

    @property
    def due(self) -> float:
        """The earliest moment by which something of it is wanted, ledger time; infinite: none."""
        return min(self.deadline, self.ttft_deadline)

    @property
    def work_tokens(self) -> int:
        """To be computed for it, as predicted."""
        return self.prefill_tokens + self.predicted_tokens

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.ttft_deadline - self.arrived, self.deadline - self.arrived)

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
            message.predicted_total,
            message.predicted_rank,
            message.predicted_work_rank,
            message.foreseen_wait_s,
            message.accepted,
            message.attempt > 0,
            max(1, message.least_tokens),
        )
