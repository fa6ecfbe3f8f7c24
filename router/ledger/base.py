"""The ledger: the durable record of every request, and of the members of the cluster.

Every method is one atomic operation: it checks the state and the caller, changes the ledger, and
returns the result. If a reply was lost, the call may be repeated: with the same arguments it
changes nothing more and returns the same. The ledger uses its own clock: callers pass durations,
never points in time. Only routers call this.

Every method raises LedgerUnavailable when the ledger cannot be reached or cannot write. The
operation may then have happened or not, and may be repeated. ``open`` and ``charge`` raise
LedgerFull, and store nothing, if the ledger's memory does not suffice. Other operations that need
memory then raise LedgerUnavailable.
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
#: Maximum number of requests that one call of ``list_requests`` examines.
MOST_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Opened:
    """Result of ``open``; ``created`` is False if the id already existed with the same body."""

    entry: Entry
    created: bool


@dataclass(frozen=True, slots=True)
class Membership:
    """State of the cluster and of the ledger's servers as of ``now`` (ledger time in seconds).

    ``term`` is a random number that identifies the present leadership. Without a leader, ``leader``
    and ``leader_address`` are empty and ``term`` is 0. ``workers_version`` changes with the worker
    table, ``policy_version`` with the policy (0: never set). ``generation`` changes with each
    restart or failover of a server, which may have lost acknowledged writes. ``memory_used`` is the
    used share of the fullest server's memory limit, 0 without a limit. ``unfit`` is the reason why
    a router would refuse to use this ledger now; empty if there is none.
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
    """Settings of the queue and the engines that operators set at run time, as text by name.

    A larger ``version`` is newer; it is 0 if no setting was ever set.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    version: int = 0


class Position(NamedTuple):
    """Place of a request in a listing: its arrival, then its id; a listing descends in both.

    ``arrived`` is ledger time in seconds, to the microsecond.
    """

    arrived: float
    request_id: str


@dataclass(frozen=True, slots=True)
class Page:
    """Page of a listing of requests.

    ``last`` is the position after which the next page begins; it is None on the last page.
    """

    entries: tuple[Entry, ...]
    last: Position | None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of the cluster as a leader last reported it, and the age of the report in seconds."""

    load: session_pb2.ClusterLoad
    age_s: float


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """Decisions that the autoscaler last reported, and the age of the report in seconds."""

    scaling: session_pb2.Scaling
    age_s: float


@dataclass(frozen=True, slots=True)
class AccessRecords:
    """Records of API keys and tenants, as text by name.

    ``version`` changes with every change of a record; it is 0 before the first one.
    """

    version: int
    texts: Mapping[str, str]


class StaleTerm(Exception):
    """Raised if a leader whose term has ended dispatches a request; it must stop dispatching."""


class NotQueued(Exception):
    """Raised if a request to be dispatched is not queued.

    ``entry`` is its current entry, or None if the request does not exist.
    """

    def __init__(self, entry: Entry | None) -> None:
        super().__init__(entry.state.value if entry else "gone")
        self.entry = entry


def check_nonce(value: int) -> int:
    """Return ``value`` if it is a valid epoch or term, from 1 to 2**64 - 1; 0 stands for none.

    Raises ValueError otherwise.
    """
    if not 0 < value < 1 << 64:
        raise ValueError("an epoch or term must be from 1 to 2**64 - 1")
    return value


def check_end(state: State) -> State:
    """Return ``state`` if ``end_request`` may set it (FAILED, CANCELLED, EXPIRED).

    Raises ValueError otherwise.
    """
    if state not in Move.END.targets:
        raise ValueError(f"nothing is ended as {state.value}")
    return state


def check_listed(limit: int) -> int:
    """Return ``limit`` if it is a valid page size of a listing. Raises ValueError otherwise."""
    if not 0 < limit <= MOST_LISTED:
        raise ValueError(f"a page has 1 to {MOST_LISTED} requests")
    return limit


def check_told(stored: Stored) -> Stored:
    """Return ``stored`` if it is a consistent argument for ``Ledger.reassert``.

    Raises ValueError otherwise.
    """
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
    #: name and version of the server that stores the ledger
    server: str
    #: faults that an acknowledged move survives (README.md)
    durability_class: DurabilityClass

    # requests

    async def open(
        self,
        request: Request,
        gateway: str,
        timeout_s: float | None = None,
        dispatch: Dispatch | None = None,
    ) -> Opened:
        """Create a request owned by ``gateway``: QUEUED, or RUNNING if ``dispatch`` is in effect.

        A ``dispatch`` is ignored unless its term is the present leader's. The stored deadline is
        ledger time plus ``timeout_s``, or None without a timeout; the deadline in ``request`` is
        ignored. If the id exists with the same body, its entry is returned unchanged. Raises
        RequestConflict if it exists with another body, LedgerFull.
        """
        ...

    async def dispatch(self, request_id: str, worker: str, epoch: int, term: int) -> Entry:
        """Move a request from QUEUED to RUNNING at ``worker``; return its entry.

        ``epoch`` is a new random number that identifies this attempt. If the request already runs
        under this epoch, its entry is returned, whatever the term. Otherwise raises StaleTerm if
        ``term`` is not the present leader's, and NotQueued if the request is not QUEUED.
        """
        ...

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        """Store new tokens and log probabilities; return one result per item.

        The end of a request's last choice moves it from RUNNING to FINISHED. All items take one
        round trip. Tokens that are already stored are skipped. A refused item changes nothing and
        does not affect the others.
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
        """Move a request from RUNNING to QUEUED and return its entry.

        ``loss`` is the cause, in words, if its worker was lost, else None. A loss is counted, and
        at ``max_losses`` the request becomes FAILED (attempts_exhausted) instead. ``tally`` is
        stored, and so is ``explanation`` unless it is empty. If ``epoch`` is not the current one,
        nothing changes. Raises UnknownRequest.
        """
        ...

    async def take_over(self, request_id: str, gateway: str, owner: str) -> Stored:
        """Move an unfinished request from ``owner`` to ``gateway``, as QUEUED; return it.

        Appends of a running attempt are refused from then on. A request that is final, or not owned
        by ``owner``, is returned unchanged: the caller owns the request only if the entry's gateway
        is ``gateway``. Raises UnknownRequest.
        """
        ...

    async def discard(self, request_id: str, owner: str) -> Entry | None:
        """Delete a QUEUED request of ``owner``, so that its id may be opened again; return None.

        The result is None, too, if the request does not exist. If it is not QUEUED or not owned by
        ``owner``, nothing changes, and its entry is returned.
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
        """End an unfinished request in ``state`` (FAILED, CANCELLED or EXPIRED); return its entry.

        ``slug`` and ``message`` are stored as its error, and ``explanation`` is stored unless it is
        empty. A request that is final, or not owned by a given ``owner``, is returned unchanged.
        Raises UnknownRequest, and ValueError for another state.
        """
        ...

    async def explain(self, explained: Sequence[Explained]) -> None:
        """Replace the explanations of final requests, which were stored when the requests ended.

        An item is ignored if its request is unknown or not final, has another owner, or is another
        request with the same id. All items take one round trip.
        """
        ...

    async def erase(self, request_id: str) -> Entry | None:
        """Delete a final request with prompt, outputs and events; its id may be opened again.

        Returns None. If the request is not final, nothing changes, and its entry is returned.
        Raises UnknownRequest.
        """
        ...

    async def reassert(self, stored: Stored) -> tuple[Reasserted, Entry]:
        """Restore a request from its gateway's copy in a ledger that may have lost parts of it.

        ``stored`` is the copy: the request, its entry, and every choice from offset 0. A missing
        request is created, and missing tokens and ends of choices are added. State, owner, arrival
        and deadline are taken from the copy if it has made more moves than the ledger's entry (see
        entry.py). If the last choice thereby ends, the request is finished. An erased request stays
        erased. Returns the result, and the entry after it. Raises ValueError for an inconsistent
        ``stored``.
        """
        ...

    async def events(self, request_id: str) -> tuple[Event, ...]:
        """Return the last MAX_EVENTS events of a request, oldest first.

        Raises UnknownRequest.
        """
        ...

    async def get(self, request_id: str) -> Entry:
        """Return the request's entry.

        Raises UnknownRequest. For ``retention`` seconds after ``erase`` it raises ForgottenRequest
        instead.
        """
        ...

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored:
        """Return a request with the tokens of each choice from an offset on.

        ``offsets`` has the offset of each choice; a missing one is 0. Raises UnknownRequest and
        ForgottenRequest as ``get`` does. Raises OffsetOutOfRange for an offset that is negative or
        beyond a choice's tokens, and for more offsets than choices.
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
        """Return a page of up to ``limit`` requests of ``tenant`` in ``states``, newest first.

        An empty ``tenant`` selects all tenants, empty ``states`` all states. The page begins after
        the position ``before``; if it is None, with the newest request. Raises ValueError for a
        ``limit`` out of range.
        """
        ...

    # gateways

    async def heartbeat(self, gateway: str, address: str, lease_s: float) -> Membership:
        """Renew the gateway's lease for ``lease_s`` seconds; return the state of the cluster."""
        ...

    async def end_lease(self, gateway: str) -> None:
        """End the gateway's lease at once, so that its requests become orphans."""
        ...

    async def gateways(self) -> dict[str, str]:
        """Return the internal address of each router whose lease has not ended, by router id."""
        ...

    async def orphans(self, limit: int) -> list[str]:
        """Return the ids of up to ``limit`` unfinished requests whose gateway's lease has ended.

        Requests of the gateway whose lease ended first come first. The cost does not depend on the
        number of requests of live gateways.
        """
        ...

    # leadership

    async def lead(
        self, router: str, address: str, term: int, lease_s: float, *, is_new: bool = True
    ) -> bool:
        """Take or renew the leader's lease for ``lease_s`` seconds; return whether it is held.

        The term that held it last renews it at any time. Another term takes it only after it has
        ended. With ``is_new`` False the call only renews: it returns False if another term has held
        the lease since.
        """
        ...

    async def resign(self, term: int) -> None:
        """End the leader's lease if it is held under ``term``."""
        ...

    # workers

    async def put_worker(self, info: session_pb2.WorkerInfo) -> None:
        """Add the worker to the table, replacing any other worker at its address.

        The same address may belong to another id, because a worker that restarts on a fixed port
        gets a new one.
        """
        ...

    async def drop_worker(self, worker_id: str) -> None: ...

    async def workers(self) -> list[session_pb2.WorkerInfo]: ...

    async def last_worker(self) -> session_pb2.WorkerInfo | None:
        """Return the worker that was added last, even if it is gone; None if there was none."""
        ...

    # load

    async def put_load(self, load: session_pb2.ClusterLoad) -> None:
        """Store the leader's report on the load, for the autoscaler.

        It is ignored unless ``load.term`` is the latest term.
        """
        ...

    async def load(self) -> LoadReport | None:
        """Return the last stored load; None if there is none."""
        ...

    async def is_active(self) -> bool:
        """Return whether this cluster is the active one of those that share ``active_key``.

        Only the active cluster serves clients. If none is active, this call makes this cluster the
        active one. A cluster stops being active 10 s after the last such call of its routers.
        Without an ``active_key`` every cluster is active.
        """
        ...

    async def activate(self) -> None:
        """Make this cluster the active one in place of any other."""
        ...

    async def active_load(self) -> LoadReport | None:
        """Return the active cluster's load; None if that is this cluster, or no load is stored."""
        ...

    async def put_scaling(self, scaling: session_pb2.Scaling) -> None:
        """Store the decisions of the autoscaler, for display."""
        ...

    async def scaling(self) -> ScalingReport | None:
        """Return the last stored decisions; None if there are none."""
        ...

    # tenants

    async def charge(self, charge: Charge, lease_s: float) -> bool:
        """Charge a request to all limits of its tenant, or to none; return whether this was new.

        The request counts as a concurrent request of the tenant until it is settled, or until
        ``lease_s`` seconds have passed without a ``hold``. If it was charged before, nothing more
        is taken, and the result is False. Raises RateLimited if a limit is reached, LedgerFull.
        """
        ...

    async def settle_charges(self, ends: Sequence[Settlement]) -> None:
        """Settle the charges of requests that have ended: refund the amounts that they did not use.

        Requests that were never charged, or are already settled, are ignored.
        """
        ...

    async def hold(self, request_ids: Sequence[str], lease_s: float) -> None:
        """Extend the charges of unfinished requests to ``lease_s`` seconds from now."""
        ...

    # API keys and tenants

    async def access(self, known: int = -1) -> AccessRecords | None:
        """Return the records of API keys and tenants; None if their version is still ``known``."""
        ...

    async def put_access(self, changes: Mapping[str, str | None]) -> None:
        """Change the records of API keys and tenants with these names; None removes a record."""
        ...

    # policy

    async def set_policy(self, changes: Mapping[str, str]) -> ClusterPolicy:
        """Change the settings in ``changes`` and return the resulting policy.

        An empty text unsets a setting.
        """
        ...

    async def restore_policy(self, policy: ClusterPolicy) -> ClusterPolicy:
        """Store ``policy`` again after a server lost it; return the policy in effect.

        Nothing changes if the ledger's version is the same or newer.
        """
        ...

    async def policy(self) -> ClusterPolicy:
        """Return the policy that operators set."""
        ...

    async def cluster_id(self) -> str:
        """Return the random id of this ledger's cluster, which is generated once."""
        ...

    async def close(self) -> None: ...
