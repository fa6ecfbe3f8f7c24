"""The ledger: the durable record of every request, and of who is there.

Every method is one atomic move that checks state and mover, changes, and answers. Repeating a move
with the same arguments, because the reply was lost, changes nothing more and answers the same.
Time is the ledger's own: callers pass durations, never moments. Only routers call this.

Every method raises LedgerUnavailable when the ledger cannot be reached or cannot write: the move
may have happened or not, and may be repeated. ``open`` raises LedgerFull, and nothing is filed,
where there is no memory for it; other moves that need some are LedgerUnavailable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from everlift.messages import Request
from everlift.v1 import session_pb2
from router.ledger.config import DurabilityClass
from router.ledger.entry import (
    Append,
    Appended,
    Dispatch,
    Entry,
    Event,
    Explained,
    Move,
    Reasserted,
    State,
    Stored,
    Tally,
)
from router.ledger.quota import Charge, Settlement

NOTHING = Tally()
#: Requests that one listing looks at, at most.
MOST_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Opened:
    """Opened request; ``created`` is False if the id was known with the same body."""

    entry: Entry
    created: bool


@dataclass(frozen=True, slots=True)
class Membership:
    """Members of the cluster as of ``now`` (ledger time in seconds).

    ``leader`` and ``leader_address`` are empty without a leader. ``workers_version`` changes with
    the worker table, ``policy_version`` with the policy (0: never set). ``generation`` changes with
    each restart or failover of a server, which may have lost acknowledged writes. ``memory_used``
    is the used share of the fullest server, 0 without a limit. ``unfit`` is why a router would
    refuse this ledger now; empty if it would not.
    """

    now: float
    leader: str
    leader_address: str
    term: int
    workers_version: int
    generation: str = ""
    memory_used: float = 0.0
    unfit: str = ""
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """Settings of queue and engines that operators set at run time, as texts by name.

    The larger ``version`` is the newer one; 0: never set.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    version: int = 0


class Position(NamedTuple):
    """Position of a request in a listing, largest first.

    ``arrived`` is ledger time in seconds, to the microsecond.
    """

    arrived: float
    request_id: str


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing. The next one begins behind ``last``; None: nothing is left."""

    entries: tuple[Entry, ...]
    last: Position | None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of the cluster as a leader reported it, and its age in seconds."""

    load: session_pb2.ClusterLoad
    age_s: float


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """Decisions of the autoscaler as reported, and their age in seconds."""

    scaling: session_pb2.Scaling
    age_s: float


@dataclass(frozen=True, slots=True)
class AccessRecords:
    """Texts by their names. ``version`` changes with every change of them, 0 before the first."""

    version: int
    texts: Mapping[str, str]


class StaleTerm(Exception):
    """Dispatch of a leader whose term is over; it must stop dispatching."""


class NotQueued(Exception):
    """The request is not waiting (any more). ``entry`` says what it is instead; None if gone."""

    def __init__(self, entry: Entry | None) -> None:
        super().__init__(entry.state.value if entry else "gone")
        self.entry = entry


def check_nonce(value: int) -> int:
    """Return a valid epoch or term; 0 means none. Raises ValueError."""
    if not 0 < value < 1 << 64:
        raise ValueError("an epoch or term must be from 1 to 2**64 - 1")
    return value


def check_end(state: State) -> State:
    """Return a state in which a request can end. Raises ValueError."""
    if state not in Move.END.targets:
        raise ValueError(f"nothing is ended as {state.value}")
    return state


def check_listed(limit: int) -> int:
    """Return a valid page size of a listing. Raises ValueError."""
    if not 0 < limit <= MOST_LISTED:
        raise ValueError(f"a page has 1 to {MOST_LISTED} requests")
    return limit


def check_told(stored: Stored) -> Stored:
    """Return a valid report for ``reassert``. Raises ValueError."""
    entry = stored.entry
    if (entry.state is State.RUNNING) != (entry.epoch != 0):
        raise ValueError(f"a request that is {entry.state.value} under epoch {entry.epoch}")
    if entry.moves < 1:
        raise ValueError("a request without a move was never opened")
    if not len(stored.choices) == len(entry.finish_reasons) == stored.request.n:
        raise ValueError(f"not {stored.request.n} choices")
    if any(choice.offset for choice in stored.choices):
        raise ValueError("a choice that begins in its middle")
    return stored


class Ledger(Protocol):
    #: name and version of what keeps it
    server: str
    #: what an acknowledged move survives (README.md)
    durability_class: DurabilityClass

    # requests

    async def open(
        self,
        request: Request,
        gateway: str,
        timeout_s: float | None = None,
        dispatch: Dispatch | None = None,
    ) -> Opened:
        """Open a request as QUEUED, owned by ``gateway``, or as RUNNING with a valid ``dispatch``.

        The stored deadline is ledger time plus ``timeout_s``, whatever ``request`` says. Raises
        RequestConflict when the id is known with another body hash, LedgerFull.
        """
        ...

    async def dispatch(self, request_id: str, worker: str, epoch: int, term: int) -> Entry:
        """Move a request from QUEUED to RUNNING under a new random ``epoch`` of the dispatch.

        Repeating it returns the entry, under any term. Raises StaleTerm, NotQueued.
        """
        ...

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        """Store tokens and log probabilities; the end of the last choice moves RUNNING to FINISHED.

        One round trip for all of them. What overlaps stored tokens is trimmed. An item that is
        refused changes nothing and does not disturb the others.
        """
        ...

    async def release(
        self,
        request_id: str,
        epoch: int,
        *,
        loss: str | None,
        max_losses: int,
        tally: Tally = NOTHING,
        explanation: bytes = b"",
    ) -> Entry:
        """Move a request from RUNNING to QUEUED.

        With ``loss``, its cause in words, a loss is counted, and at ``max_losses`` the request goes
        to FAILED (attempts_exhausted). ``tally`` is stored, and ``explanation`` unless it is empty.
        Returns the entry unchanged if the epoch is not current. Raises UnknownRequest.
        """
        ...

    async def take_over(self, request_id: str, gateway: str, owner: str) -> Stored:
        """Move QUEUED or RUNNING to QUEUED, owned by ``gateway``; a running attempt is fenced off.

        A request that is final, or no longer ``owner``'s, is answered as it is: the caller has it
        if the entry's gateway is ``gateway``. Raises UnknownRequest.
        """
        ...

    async def discard(self, request_id: str, owner: str) -> Entry | None:
        """Move QUEUED to gone: the id may be opened again.

        Answers None, also where there is no request, or the entry of one that stays: it is not
        QUEUED, or not ``owner``'s.
        """
        ...

    async def end_request(
        self,
        request_id: str,
        state: State,
        slug: str,
        message: str,
        owner: str | None = None,
        explanation: bytes = b"",
    ) -> Entry:
        """Move QUEUED or RUNNING to ``state`` (FAILED, CANCELLED or EXPIRED).

        A request that is final, or not ``owner``'s where one is given, is answered as it is; else
        ``explanation`` is stored unless it is empty. Raises UnknownRequest.
        """
        ...

    async def explain(self, explained: Sequence[Explained]) -> None:
        """Store them in the place of what was told with the requests' ends.

        One whose request is not known, not final, another gateway's, or another one under the same
        id changes nothing. One round trip for all of them.
        """
        ...

    async def erase(self, request_id: str) -> Entry | None:
        """Erase a final request with prompt, outputs and events; its id may be opened again."""
        ...

    async def reassert(self, stored: Stored) -> tuple[Reasserted, Entry]:
        """Send a router's state of a request again to a ledger that may have lost some of it.

        ``stored`` has record, state, epoch, owner, ends, and every choice from offset 0. What is
        missing is created; tokens and ends beyond the ledger's are added; state, owner, arrival and
        deadline are taken from ``stored`` if it knows of more moves. With the end of its last
        choice the request is finished. A forgotten request stays forgotten. Returns the resulting
        entry.
        """
        ...

    async def events(self, request_id: str) -> tuple[Event, ...]:
        """Return a request's moves, oldest first; of very many the last ones.

        Raises UnknownRequest.
        """
        ...

    async def get(self, request_id: str) -> Entry:
        """Return the request's entry.

        Raises UnknownRequest; ForgottenRequest for ``retention`` after Forget.
        """
        ...

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored:
        """Return what each choice has from its offset on, from 0 on where none is given.

        Raises UnknownRequest and ForgottenRequest as ``get``; OffsetOutOfRange for an offset beyond
        a choice's tokens, below 0 or of no choice.
        """
        ...

    async def list_requests(
        self,
        tenant: str,
        *,
        states: Collection[State] = (),
        limit: int = MOST_LISTED,
        before: Position | None = None,
    ) -> Page:
        """Return up to ``limit`` requests of ``tenant`` in ``states``, newest first.

        An empty tenant is all tenants, no states are all states.
        """
        ...

    # gateways

    async def heartbeat(self, gateway: str, address: str, lease_s: float) -> Membership:
        """Renew the gateway's lease, and return who is connected."""
        ...

    async def end_lease(self, gateway: str) -> None:
        """End the gateway's lease at once; its requests become orphans."""
        ...

    async def gateways(self) -> dict[str, str]:
        """Return internal addresses of the routers with a living lease, by id."""
        ...

    async def orphans(self, limit: int) -> list[str]:
        """Return up to ``limit`` unfinished requests whose gateway's lease is over, oldest first.

        The cost does not grow with the requests of living gateways.
        """
        ...

    # leadership

    async def lead(
        self, router: str, address: str, term: int, lease_s: float, *, is_new: bool = True
    ) -> bool:
        """Take or renew the leader's lease; return False if another router holds it.

        ``term`` renews it if it was the last holder.
        """
        ...

    async def resign(self, term: int) -> None:
        """Give the leader's lease back, if it is held under ``term``."""
        ...

    # workers

    async def put_worker(self, info: session_pb2.WorkerInfo) -> None:
        """Put the worker into the table, in place of any other at its address.

        A worker that is restarted on a fixed port has another id.
        """
        ...

    async def drop_worker(self, worker_id: str) -> None: ...

    async def workers(self) -> list[session_pb2.WorkerInfo]: ...

    async def last_worker(self) -> session_pb2.WorkerInfo | None:
        """Return the worker that registered last, even if it is gone; None if there was none."""
        ...

    # load

    async def put_load(self, load: session_pb2.ClusterLoad) -> None:
        """Store the load for the autoscaler. Nothing changes unless ``load.term`` is the latest."""
        ...

    async def load(self) -> LoadReport | None:
        """Return the stored load; None if there is none."""
        ...

    async def is_active(self) -> bool:
        """Return whether this cluster serves clients, of those that share ``active_key``.

        A cluster that none of the others precedes becomes active by asking. The active one stays
        so for 10 s after its routers asked last.
        """
        ...

    async def activate(self) -> None:
        """Make this cluster the active one."""
        ...

    async def active_load(self) -> LoadReport | None:
        """Return the load of the active cluster if it is another one, as ``load`` does."""
        ...

    async def put_scaling(self, scaling: session_pb2.Scaling) -> None:
        """Store decisions of the autoscaler for display."""
        ...

    async def scaling(self) -> ScalingReport | None:
        """Return the stored decisions; None if there are none."""
        ...

    # tenants

    async def charge(self, charge: Charge, lease_s: float) -> bool:
        """Take what the request may need of all its tenant's limits, or nothing.

        It counts among the tenant's requests until it is settled, or for the lease unless it is
        held. False where it was charged before: nothing more is taken. Raises RateLimited,
        LedgerFull.
        """
        ...

    async def settle_charges(self, ends: Sequence[Settlement]) -> None:
        """Settle requests that have ended: refund what they did not use.

        Requests that were not charged or are settled are ignored.
        """
        ...

    async def hold(self, request_ids: Sequence[str], lease_s: float) -> None:
        """Renew the charges of running requests for another lease."""
        ...

    # who may come in

    async def access(self, known: int = -1) -> AccessRecords | None:
        """Return the records of keys and tenants; None if their version is the ``known`` one."""
        ...

    async def put_access(self, changes: Mapping[str, str | None]) -> None:
        """Change records by their names; None removes one."""
        ...

    # policy

    async def set_policy(self, changes: Mapping[str, str]) -> ClusterPolicy:
        """Change what is named, and answers what is set then.

        An empty text takes back what was set.
        """
        ...

    async def restore_policy(self, policy: ClusterPolicy) -> ClusterPolicy:
        """Restore the policy after a server lost it, unless the ledger's version is newer."""
        ...

    async def policy(self) -> ClusterPolicy:
        """Return the policy that operators set."""
        ...

    async def cluster_id(self) -> str:
        """Return the random id of this ledger's cluster, made at the first call."""
        ...

    async def close(self) -> None: ...
