"""The ledger: the durable record of every request, and of who is there.

Every method is one atomic move that checks state and mover, changes, and answers. Repeating a move
with the same arguments, because the reply was lost, changes nothing more and answers the same.
Time is the ledger's own: callers pass durations, never moments. Only routers call this.

Every method raises LedgerUnavailable when the ledger cannot be reached or cannot write: the move
may have happened or not, and may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from everlift.messages import Request
from everlift.v1 import session_pb2
from router.ledger.entry import Append, Appended, Entry, Move, State, Stored


@dataclass(frozen=True, slots=True)
class Opened:
    """``created`` is False when the id was known with the same body."""

    entry: Entry
    created: bool


@dataclass(frozen=True, slots=True)
class Membership:
    """Who is there, as of ``now`` (ledger time in seconds).

    ``leader`` and ``leader_address`` are empty while nobody leads. ``workers_version`` changes with
    every change of the worker table.
    """

    now: float
    leader: str
    leader_address: str
    term: int
    workers_version: int


class StaleTerm(Exception):
    """Somebody else leads by now: the caller must stop dispatching."""


class NotQueued(Exception):
    """The request is not waiting (any more). ``entry`` says what it is instead; None if gone."""

    def __init__(self, entry: Entry | None) -> None:
        super().__init__(entry.state.value if entry else "gone")
        self.entry = entry


def check_nonce(value: int) -> int:
    """Returns an epoch or term that can be one; raises ValueError. 0 means none."""
    if not 0 < value < 1 << 64:
        raise ValueError("an epoch or term must be from 1 to 2**64 - 1")
    return value


def check_end(state: State) -> State:
    """Returns a state that ``end`` can end in; raises ValueError."""
    if state not in Move.END.targets:
        raise ValueError(f"nothing is ended as {state.value}")
    return state


class Ledger(Protocol):
    # requests

    async def open(self, request: Request, gateway: str, timeout_s: float | None = None) -> Opened:
        """Files a new request as QUEUED, owned by ``gateway``. The stored deadline is ledger time
        plus ``timeout_s``, whatever ``request`` says. Raises RequestConflict when the id is known
        with another body hash."""
        ...

    async def dispatch(self, request_id: str, worker: str, epoch: int, term: int) -> Entry:
        """QUEUED -> RUNNING under the caller's fresh random ``epoch``, which names the dispatch: to
        repeat it answers the entry, under whatever term. Raises StaleTerm, NotQueued."""
        ...

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        """Stores tokens and their log probabilities; with the finish reason of the last choice
        that went on RUNNING -> FINISHED. One round trip for all of them. What overlaps stored
        tokens is trimmed. An item that is refused changes nothing and does not disturb the
        others."""
        ...

    async def release(
        self, request_id: str, epoch: int, *, loss: str | None, max_losses: int
    ) -> Entry:
        """RUNNING -> QUEUED. With ``loss``, its cause in words, one more loss is counted, and at
        ``max_losses`` it goes to FAILED (attempts_exhausted) with that cause instead. Answers the
        entry as it is when the epoch is not current. Raises UnknownRequest."""
        ...

    async def take_over(self, request_id: str, gateway: str, owner: str) -> Stored:
        """QUEUED or RUNNING -> QUEUED, owned by ``gateway`` from now on; what ran is fenced off. A
        request that is final, or no longer ``owner``'s, is answered as it is: the caller has it if
        the entry's gateway is ``gateway``. Raises UnknownRequest."""
        ...

    async def discard(self, request_id: str) -> None:
        """QUEUED -> gone: the id may be opened again. Any other state, or no request, stays as it
        is."""
        ...

    async def end(
        self, request_id: str, state: State, slug: str, message: str, owner: str | None = None
    ) -> Entry:
        """QUEUED or RUNNING -> ``state`` (FAILED, CANCELLED or EXPIRED). A request that is final,
        or not ``owner``'s where one is given, is answered as it is. Raises UnknownRequest."""
        ...

    async def get(self, request_id: str) -> Entry:
        """Raises UnknownRequest."""
        ...

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored:
        """What each choice has from its offset on, from 0 on where none is given. Raises
        UnknownRequest; OffsetOutOfRange for an offset beyond a choice's tokens, below 0 or of no
        choice."""
        ...

    # gateways

    async def beat(self, gateway: str, address: str, lease_s: float) -> Membership:
        """Renews the gateway's lease and tells who is there."""
        ...

    async def leave(self, gateway: str) -> None:
        """Ends the gateway's lease at once; its requests become orphans."""
        ...

    async def gateways(self) -> dict[str, str]:
        """Internal addresses of the gateways with a living lease, by gateway id."""
        ...

    async def orphans(self, limit: int) -> list[str]:
        """Up to ``limit`` unfinished requests whose gateway's lease is over, oldest gateway first.
        The cost does not grow with the requests of living gateways."""
        ...

    # leadership

    async def lead(self, router: str, address: str, term: int, lease_s: float) -> bool:
        """Takes the leader's lease if it is free, or renews it if it is held under ``term``; False
        if somebody else holds it. From then on dispatches of older terms are refused."""
        ...

    async def resign(self, term: int) -> None:
        """Gives the leader's lease back, if it is held under ``term``."""
        ...

    # workers

    async def put_worker(self, info: session_pb2.WorkerInfo) -> None:
        """Puts the worker into the table, in place of any other at its address: a worker that was
        restarted on a fixed port comes back under another id."""
        ...

    async def drop_worker(self, worker_id: str) -> None: ...

    async def workers(self) -> list[session_pb2.WorkerInfo]: ...

    async def cluster_id(self) -> str:
        """The random id of this ledger's cluster, made at the first call."""
        ...

    async def close(self) -> None: ...
