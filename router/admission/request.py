"""Queued and running requests, with the facts that the leader's decisions need. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf
from typing import NamedTuple, Protocol, Self, TypeAlias

from everlift.v1 import session_pb2

#: Sort key of a request within its class; its first element is a number. The smallest leaves first.
Place: TypeAlias = tuple[float, *tuple[float | str, ...]]

#: Sort key of a request over all classes.
Key: TypeAlias = tuple[float | str, ...]


class QueueKey(NamedTuple):
    """Predictions by which queue policies sort a request; they are fixed when it arrives.

    The messages ``Waiting`` and ``Running`` in session.proto have fields with the same names.
    """

    #: uncached tokens of the prompt, and those of all outputs; 0: the request is ordered by arrival
    predicted_total: int = 0
    #: share of the recent requests whose outputs were predicted to be shorter, below 1
    predicted_rank: float = 0.0
    #: share of the recent requests with a smaller total, below 1
    predicted_work_rank: float = 0.0
    #: estimated seconds from the arrival until the requests ahead have left the queue
    estimated_wait_s: float = 0.0

    @classmethod
    def from_proto(cls, message: session_pb2.Waiting | session_pb2.Running) -> Self:
        return cls(
            message.predicted_total,
            message.predicted_rank,
            message.predicted_work_rank,
            message.estimated_wait_s,
        )


#: Queue key of a request without predictions, which is ordered by arrival.
BY_ARRIVAL = QueueKey()


class Ordered(Protocol):
    """Request that queue policies can sort: a queued one, or a running one."""

    @property
    def request_id(self) -> str: ...

    @property
    def arrived(self) -> float: ...

    @property
    def priority(self) -> int: ...

    @property
    def due(self) -> float: ...

    @property
    def queue_key(self) -> QueueKey: ...


class Waiting(NamedTuple):
    """Queued request, with the facts by which it is sorted and placed on a worker.

    The message ``Waiting`` of session.proto is its encoding between a router and the leader.

    ``gateway`` is the id of the router that has the request. ``arrived``, ``deadline`` and
    ``ttft_deadline`` are ledger time in seconds. ``arrived`` is kept when the request is queued
    again. ``prefill_tokens`` is the number of tokens to compute before the next output token: the
    prompt, which the choices share, and the output so far of each choice. All ``choices`` together
    may still generate ``max_tokens``.
    """

    request_id: str
    gateway: str
    arrived: float
    prefill_tokens: int
    max_tokens: int
    #: worker that the gateway could not reach, or whose engine failed the request; empty: none
    avoid: str = ""
    choices: int = 1
    #: class; requests of a larger one leave first
    priority: int = 0
    deadline: float = inf
    ttft_deadline: float = inf
    #: how often the request may still be moved to another worker when it is preempted
    moves_left: int = 0
    #: the request may have caused the loss of its last workers
    is_suspect: bool = False
    #: predicted tokens that all choices together will still generate
    predicted_tokens: int = 0
    #: kept when the request is queued again
    queue_key: QueueKey = BY_ARRIVAL
    #: a leader accepted the request before, or it has run; it is not refused any more
    accepted: bool = False
    #: the request has been dispatched to a worker before
    has_run: bool = False
    #: tokens that each output reaches nearly always, as the gateway predicts
    least_tokens: int = 1
    #: ledger time from which the request has waited too long
    expires: float = inf
    #: predictions made at arrival, in seconds; None if unknown: time until the request leaves the
    #: queue, time to its first token, and time per output token after that
    predicted_wait_s: float | None = None
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    #: ids of the chunks of its known tokens, if locality is on
    chunks: tuple[int, ...] = ()
    #: leading known tokens that some worker had in its prefix cache when the request arrived
    cached_tokens: int = 0
    #: number of the tenant's session; 0: none
    session: int = 0
    #: LoRA adapter that the worker must serve, and the digest of its files (empty: any); empty:
    #: none
    adapter: str = ""
    adapter_digest: str = ""
    #: name of the model that the worker must serve
    model: str = ""
    #: share of the recent requests whose sessions had attained less service, below 1; set by the
    #: leader when the request enters its queue
    attained_rank: float = 0.0

    @property
    def due(self) -> float:
        """Earlier of ``deadline`` and ``ttft_deadline``, in ledger time; infinite without any."""
        return min(self.deadline, self.ttft_deadline)

    @property
    def work_tokens(self) -> int:
        """Predicted number of tokens to compute for the request: prefill and future output."""
        return self.uncached_tokens + self.predicted_tokens

    @property
    def uncached_tokens(self) -> int:
        """Number of tokens to prefill at a worker that has the longest cached prefix."""
        return self.prefill_tokens - self.cached_tokens

    @classmethod
    def from_proto(cls, gateway: str, message: session_pb2.Waiting) -> Self:
        """Return the request that ``message`` of the router ``gateway`` reports.

        A deadline of 0 becomes infinite. Values of another router may be out of range and are then
        corrected: ``prefill_tokens`` and ``least_tokens`` to at least 1, and ``cached_tokens`` to
        at most ``prefill_tokens - 1``.
        """
        return cls(
            message.request_id,
            gateway,
            message.arrived,
            max(1, message.prompt_tokens),
            message.max_tokens,
            message.avoid,
            message.choices,
            message.priority,
            message.deadline or inf,
            message.ttft_deadline or inf,
            message.moves_left,
            message.suspect,
            message.predicted_tokens,
            QueueKey.from_proto(message),
            message.accepted,
            message.attempt > 0,
            max(1, message.least_tokens),
            chunks=tuple(message.chunks),
            cached_tokens=min(message.cached_tokens, max(0, message.prompt_tokens - 1)),
            session=message.session,
            adapter=message.adapter,
            adapter_digest=message.adapter_digest,
            model=message.model,
        )

    def to_proto(self) -> session_pb2.Waiting:
        """Return the message that reports the request to the leader.

        It lacks the gateway, which the leader knows from the stream, and all that the leader sets.
        """
        return session_pb2.Waiting(
            request_id=self.request_id,
            arrived=self.arrived,
            prompt_tokens=self.prefill_tokens,
            max_tokens=self.max_tokens,
            attempt=int(self.has_run),
            accepted=self.accepted,
            avoid=self.avoid,
            choices=self.choices,
            priority=self.priority,
            deadline=_finite_or_zero(self.deadline),
            ttft_deadline=_finite_or_zero(self.ttft_deadline),
            moves_left=self.moves_left,
            suspect=self.is_suspect,
            predicted_tokens=self.predicted_tokens,
            least_tokens=self.least_tokens,
            chunks=self.chunks,
            cached_tokens=self.cached_tokens,
            session=self.session,
            adapter=self.adapter,
            adapter_digest=self.adapter_digest,
            model=self.model,
            **self.queue_key._asdict(),
        )


def _finite_or_zero(seconds: float) -> float:
    return 0.0 if seconds == inf else seconds


#: Priority, known tokens and request id. The request with the smallest rank is evicted first.
_Rank: TypeAlias = tuple[int, int, str]


class Running(NamedTuple):
    """Request that was dispatched to a worker and has not left it.

    The message ``Running`` of session.proto is its encoding between a router and the leader.

    ``gateway`` is the id of the router that has the request, and ``epoch`` the random id of the
    dispatch. ``known_tokens`` is the length of the prompt plus the lengths of the outputs so far of
    all unfinished choices, at the dispatch or in the router's last report. ``choices`` is the
    number of these choices. ``arrived`` is ledger time in seconds.
    """

    request_id: str
    gateway: str
    worker_id: str
    epoch: int
    priority: int
    known_tokens: int
    arrived: float
    moves_left: int
    choices: int = 1
    #: the request waits at its worker without KV blocks
    is_preempted: bool = False
    #: this, the queue key, the adapter and the model are as in ``Waiting``
    due: float = inf
    queue_key: QueueKey = BY_ARRIVAL
    adapter: str = ""
    model: str = ""

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
            queue_key=waiting.queue_key,
            adapter=waiting.adapter,
            model=waiting.model,
        )

    @classmethod
    def from_proto(cls, gateway: str, message: session_pb2.Running) -> Self:
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
            queue_key=QueueKey.from_proto(message),
            adapter=message.adapter,
            model=message.model,
        )

    def to_proto(self) -> session_pb2.Running:
        """Return the message that reports the request to the leader, without the gateway."""
        return session_pb2.Running(
            request_id=self.request_id,
            worker_id=self.worker_id,
            epoch=self.epoch,
            priority=self.priority,
            known_tokens=self.known_tokens,
            moves_left=self.moves_left,
            preempted=self.is_preempted,
            arrived=self.arrived,
            choices=self.choices,
            due=_finite_or_zero(self.due),
            adapter=self.adapter,
            model=self.model,
            **self.queue_key._asdict(),
        )

    @property
    def rank(self) -> _Rank:
        return (self.priority, self.known_tokens, self.request_id)


class RunningTable:
    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._of_gateway: dict[str, set[str]] = {}
        #: ranks of the requests of each worker, ascending
        self._ranks: dict[str, list[_Rank]] = {}
        self._preempted: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def get(self, request_id: str) -> Running | None:
        return self._running.get(request_id)

    def add(self, running: Running) -> None:
        """Add a request; it replaces one with the same id."""
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
        """Return the requests that wait at their workers to resume after a preemption."""
        return [self._running[request_id] for request_id in self._preempted]

    def below(self, priority: int, worker_id: str) -> Iterator[Running]:
        """Yield a worker's requests of classes below ``priority``.

        The lowest class comes first; within a class, the request with the fewest known tokens.
        """
        for rank in self._ranks.get(worker_id, ()):
            if rank[0] >= priority:
                return
            yield self._running[rank[2]]

    def from_class(self, priority: int, worker_id: str) -> Iterator[Running]:
        """Yield a worker's requests of class ``priority`` or higher, the lowest class first."""
        ranks = self._ranks.get(worker_id, [])
        for rank in ranks[bisect_left(ranks, (priority,)) :]:
            yield self._running[rank[2]]


def _discard(index: dict[str, set[str]], key: str, request_id: str) -> None:
    index[key].discard(request_id)
    if not index[key]:
        del index[key]
