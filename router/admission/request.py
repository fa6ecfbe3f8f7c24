"""What waits in the admission queue, as far as order and placement look at it. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol, Self, TypeAlias

from everlift.v1 import session_pb2


class Late(NamedTuple):
    """Something comes later than it is wanted. ``is_by_output``: its first token would come in
    time, and its end would not. By ``shorter_s`` the queue has to be shorter, if that helps."""

    is_by_output: bool
    shorter_s: float


class Wanted(NamedTuple):
    """Seconds after its arrival by which its first token and its end are wanted; infinite: at no
    time."""

    first_token_s: float = inf
    end_s: float = inf

    def late(self, wait_s: float, prefill_s: float, output_s: float) -> Late | None:
        """None where it can come in time. At the least it waits for ``wait_s``, and its output goes
        on for ``output_s`` after its first token. Who need not wait is not late for its prompt's
        sake, which its worker may have computed for another one."""
        first_s = wait_s + prefill_s if wait_s else 0.0
        first_late_s = first_s - min(self.first_token_s, self.end_s)
        late_s = max(first_late_s, first_s + output_s - self.end_s)
        return Late(first_late_s <= 0, min(late_s, wait_s)) if late_s > 0 else None


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


#: Priority, known tokens, request id: of those on one worker the smallest gives up its place first.
_Rank: TypeAlias = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Running:
    """A request that a worker has. ``known_tokens`` are of all its unfinished ``choices``, when the
    leader heard of it; ``arrived`` is ledger time in seconds."""

    request_id: str
    gateway: str
    worker_id: str
    epoch: int
    priority: int
    known_tokens: int
    arrived: float
    moves_left: int
    choices: int = 1
    #: it waits at its worker, without blocks
    is_preempted: bool = False
    #: as of what waits
    due: float = inf
    predicted_total: int = 0
    predicted_rank: float = 0.0
    predicted_work_rank: float = 0.0
    foreseen_wait_s: float = 0.0

    @classmethod
    def dispatched(cls, waiting: Waiting, gateway: str, worker_id: str, epoch: int) -> Self:
        return cls(
            waiting.request_id,
            gateway,
            worker_id,
            epoch,
            waiting.priority,
            waiting.prefill_tokens,
            waiting.arrived,
            waiting.moves_left,
            waiting.choices,
            due=waiting.due,
            predicted_total=waiting.predicted_total,
            predicted_rank=waiting.predicted_rank,
            predicted_work_rank=waiting.predicted_work_rank,
            foreseen_wait_s=waiting.foreseen_wait_s,
        )

    @classmethod
    def told(cls, gateway: str, message: session_pb2.Running) -> Self:
        return cls(
            message.request_id,
            gateway,
            message.worker_id,
            message.epoch,
            message.priority,
            message.known_tokens,
            message.arrived,
            message.moves_left,
            message.choices,
            is_preempted=message.preempted,
            due=message.due or inf,
            predicted_total=message.predicted_total,
            predicted_rank=message.predicted_rank,
            predicted_work_rank=message.predicted_work_rank,
            foreseen_wait_s=message.foreseen_wait_s,
        )

    @property
    def rank(self) -> _Rank:
        return (self.priority, self.known_tokens, self.request_id)


class RunningTable:
    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._of_gateway: dict[str, set[str]] = {}
        #: by worker, sorted
        self._ranks: dict[str, list[_Rank]] = {}
        self._preempted: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def get(self, request_id: str) -> Running | None:
        return self._running.get(request_id)

    def put(self, running: Running) -> None:
        """In place of what was known of it."""
        self.remove(running.request_id)
        self._running[running.request_id] = running
        self._of_gateway.setdefault(running.gateway, set()).add(running.request_id)
        insort(self._ranks.setdefault(running.worker_id, []), running.rank)
        if running.is_preempted:
            self._preempted[running.request_id] = None

    def remove(self, request_id: str) -> Running | None:
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        self._preempted.pop(request_id, None)
        _discard(self._of_gateway, running.gateway, request_id)
        ranks = self._ranks[running.worker_id]
        del ranks[bisect_left(ranks, running.rank)]
        if not ranks:
            del self._ranks[running.worker_id]
        return running

    def remove_gateway(self, gateway: str) -> None:
        for request_id in tuple(self._of_gateway.get(gateway, ())):
            self.remove(request_id)

    @property
    def has_preempted(self) -> bool:
        return bool(self._preempted)

    def preempted(self) -> list[Running]:
        """Those that wait at their workers."""
        return [self._running[request_id] for request_id in self._preempted]

    def below(self, priority: int, worker_id: str) -> Iterator[Running]:
        """Those of a lower class on a worker; of the lowest class, and there of those with the
        fewest known tokens, the first."""
        for rank in self._ranks.get(worker_id, ()):
            if rank[0] >= priority:
                return
            yield self._running[rank[2]]

    def from_class(self, priority: int, worker_id: str) -> Iterator[Running]:
        """Those of this class or a higher one on a worker."""
        ranks = self._ranks.get(worker_id, [])
        for rank in ranks[bisect_left(ranks, (priority,)) :]:
            yield self._running[rank[2]]


def _discard(index: dict[str, set[str]], key: str, request_id: str) -> None:
    index[key].discard(request_id)
    if not index[key]:
        del index[key]
