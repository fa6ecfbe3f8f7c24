"""The ledger: the durable record of every request, and of the members of the cluster.

Every method that changes a request is one atomic operation: it checks the state and the caller,
changes the ledger, and returns the result. In a call with several items, each item is one such
operation. If a reply was lost, the call may be repeated with the same arguments. The repetition
changes nothing and returns the same result, with these exceptions: ``open`` and ``charge`` report
that the request is known already, ``erase`` raises UnknownRequest, ``put_object`` raises
ObjectConflict, and ``delete_object`` returns False. The ledger uses its own
clock, called ledger time: callers pass durations, and points in time only if they received them
from the ledger. Routers, the autoscaler and some commands use the ledger; workers and clients do
not.

A router that owns a request is called the gateway of the request. An epoch is a random number that
identifies one attempt at a worker; a term is one that identifies a leadership.

Every method raises LedgerUnavailable when the ledger cannot be reached or cannot write. The
operation may then have happened or not, and may be repeated. ``open``, ``charge`` and
``put_object`` raise LedgerFull, and store nothing, if the ledger's memory does not suffice. Other
operations that need memory then raise LedgerUnavailable.
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
    Turn,
)
from router.ledger.objects import StoredObject
from router.ledger.quota import Charge, Settlement

NOTHING = Tally()
#: Maximum number of requests that one call of ``list_requests`` examines.
MAX_PAGE_SIZE = 1000
#: Number of the newest requests of a session that ``turns`` examines by default.
MAX_TURNS = 8


@dataclass(frozen=True, slots=True)
class Opened:
    """Result of ``open``: the request's entry, and whether the call created it.

    ``created`` is False if the request id already existed with the same body.
    """

    entry: Entry
    created: bool


@dataclass(frozen=True, slots=True)
class Membership:
    """State of the cluster and of the ledger's servers as of ``now`` (ledger time in seconds).

    ``leader`` is the leader's router id, and ``leader_address`` its internal address. ``term`` is a
    random number that identifies the present leadership. Without a leader, both texts are empty and
    ``term`` is 0. ``workers_version`` changes with each change of the worker table,
    ``policy_version`` with each change of the run-time policy (0: never set).

    ``generation`` is an id of the present run of the servers. It changes with each restart or
    failover of a server, which may have lost acknowledged writes. ``memory_used`` is the used share
    of the fullest server's memory limit, 0 without a limit. ``unfit`` is the reason why a router
    that connects now would refuse to use this ledger; empty if there is none.
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
    """Run-time policy: settings of the queue and the engines that operators have set.

    ``values`` has the text of each such setting by its name. A larger ``version`` is newer; it is 0
    if no setting was ever set.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    version: int = 0


class Position(NamedTuple):
    """Place of a request in a listing, which is sorted by arrival, then by id, both descending.

    ``arrived`` is the request's arrival: ledger time in seconds, to the microsecond.
    """

    arrived: float
    request_id: str


@dataclass(frozen=True, slots=True)
class Page:
    """Page of a listing of requests, newest first.

    The next page begins after the position ``last``, which is None if there is no next page.
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
    """Decisions that a model's autoscaler last reported, and the age of the report in seconds."""

    scaling: session_pb2.Scaling
    age_s: float


@dataclass(frozen=True, slots=True)
class AccessRecords:
    """Records of API keys and tenants: each is a text, by the name of the record.

    ``version`` changes with every change of a record; it is 0 before the first one.
    """

    version: int
    texts: Mapping[str, str]


class StaleTerm(Exception):
    """Raised if a leader dispatches under another term than the latest one in the ledger.

    Another router has led since, or the ledger has lost the leader's term. The request is
    unchanged. The leader must stop dispatching.
    """


class NotQueued(Exception):
    """Raised if a request is to be dispatched but is not queued.

    ``entry`` is its current entry, or None if the request does not exist.
    """

    def __init__(self, entry: Entry | None) -> None:
        super().__init__(entry.state.value if entry else "gone")
        self.entry = entry


def check_nonce(value: int) -> int:
    """Return ``value``, the number of an attempt (epoch) or leadership (term), if it is valid.

    Valid numbers are 1 to 2**64 - 1; in the ledger, 0 means "no attempt" or "no leader". Raises
    ValueError for any other number.
    """
    if not 0 < value < 1 << 64:
        raise ValueError("an epoch or term must be from 1 to 2**64 - 1")
    return value


def check_end(state: State) -> State:
    """Return ``state`` if ``end_request`` may set it: FAILED, CANCELLED or EXPIRED.

    Raises ValueError for any other state.
    """
    if state not in Move.END.targets:
        raise ValueError(f"the state must be failed, cancelled or expired, not {state.value}")
    return state


def check_listed(limit: int) -> int:
    """Return ``limit`` if it is a valid page size of a listing, from 1 to MAX_PAGE_SIZE.

    Raises ValueError otherwise.
    """
    if not 0 < limit <= MAX_PAGE_SIZE:
        raise ValueError(f"limit must be from 1 to {MAX_PAGE_SIZE}, not {limit}")
    return limit


def check_copy(stored: Stored) -> Stored:
    """Return ``stored`` if it is a consistent argument for ``Ledger.reassert``.

    Raises ValueError if a RUNNING request has no epoch or a request in another state has one. Also
    raises it if ``moves`` is 0, if the number of choices is not the request's ``n``, or if a choice
    does not begin at offset 0.
    """
    entry = stored.entry
    if (entry.state is State.RUNNING) != (entry.epoch != 0):
        raise ValueError(f"state {entry.state.value} does not match epoch {entry.epoch}")
    if entry.moves < 1:
        raise ValueError("moves must be at least 1")
    if not len(stored.choices) == len(entry.finish_reasons) == stored.request.n:
        raise ValueError(f"the number of choices must be {stored.request.n}")
    if any(choice.offset for choice in stored.choices):
        raise ValueError("every choice must begin at offset 0")
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
        """Create a request owned by the router ``gateway``, and return its entry.

        The request becomes RUNNING if ``dispatch`` is given and has the latest leader's term, even
        if the lease of this leader has ended. Otherwise it becomes QUEUED. The stored deadline is
        ledger time plus ``timeout_s`` seconds, or None without a timeout; the deadline in
        ``request`` is ignored. If the id exists with the same body, the existing entry is returned
        unchanged. Raises RequestConflict if the id exists with another body, and LedgerFull.
        """
        ...

    async def dispatch(self, request_id: str, worker: str, epoch: int, term: int) -> Entry:
        """Move a request from QUEUED to RUNNING at ``worker``; return its new entry.

        ``epoch`` is a new random number that identifies this attempt; ``term`` identifies the
        leadership of the caller. If the request already runs under this epoch, its entry is
        returned, whatever the term. Otherwise raises StaleTerm if ``term`` is not the latest
        leader's term, and NotQueued if the request is not QUEUED. The latest leader may dispatch
        even if its lease has ended.
        """
        ...

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        """Store new tokens and log probabilities; return one result for each item of ``appends``.

        An item that ends the last unfinished choice of its request moves the request from RUNNING
        to FINISHED. All items take one round trip. Tokens that are already stored are skipped. The
        prompt stays as it was opened even if an item replaces the request. A refused item changes
        nothing and does not affect the others; its result says why it was refused.
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
        """Move a request from RUNNING to QUEUED, and return its entry.

        ``epoch`` identifies the attempt that ends. If it is not the current one, nothing changes.
        ``loss`` is the cause, in words, if the worker was lost; None if the worker returned the
        request. A loss is counted in the entry, and at loss number ``max_losses`` the request
        becomes FAILED (attempts_exhausted) instead of QUEUED. ``tally`` replaces the stored
        counters, and ``explanation`` the stored explanation unless it is empty. Raises
        UnknownRequest.
        """
        ...

    async def take_over(self, request_id: str, gateway: str, owner: str) -> Stored:
        """Make ``gateway`` the owner of an unfinished request of ``owner``; return the request.

        Both are ids of routers. The request becomes QUEUED, and later appends of an attempt that
        was running are refused. A request that is final, or not owned by ``owner``, is returned
        unchanged: the caller owns the request only if the returned entry's gateway is ``gateway``.
        Raises UnknownRequest.
        """
        ...

    async def discard(self, request_id: str, owner: str) -> Entry | None:
        """Delete a QUEUED request of the router ``owner``, so that its id may be opened again.

        Returns None if the request was deleted or does not exist. If it is not QUEUED or has
        another owner, nothing changes, and its entry is returned.
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
        empty. A request that is final is returned unchanged, and so is a request of another router
        than ``owner``. If ``owner`` is None, the request may belong to any router. Raises
        UnknownRequest, and ValueError for another ``state``.
        """
        ...

    async def explain(self, explained: Sequence[Explained]) -> None:
        """Replace the stored explanations of final requests.

        An item is ignored if its request is unknown or not final, or has another owner or arrival
        time than the item says. All items take one round trip.
        """
        ...

    async def erase(self, request_id: str) -> Entry | None:
        """Delete a final request with prompt, outputs and events; its id may be opened again.

        Returns None if the request was deleted. If it is not final, nothing changes, and its entry
        is returned. Raises UnknownRequest.
        """
        ...

    async def reassert(self, stored: Stored) -> tuple[Reasserted, Entry]:
        """Restore a request from its owner's copy in a ledger that may have lost parts of it.

        ``stored`` is the copy: the request, its entry, and every choice from offset 0. A missing
        request is created, and missing tokens and ends of choices are added. State, owner, arrival
        and deadline are taken from the copy if it counts more state changes (``moves``) than the
        ledger's entry. Versions of model and adapter are taken from the copy if both arrived at the
        same time. If all choices have then ended, the request becomes FINISHED. Nothing changes if
        the request is final in the ledger, if it was erased in the last ``retention`` seconds, or
        in the other cases that Reasserted lists.

        Returns the result, and the ledger's entry after it; if the request was erased, the copy's
        entry. Raises ValueError for an inconsistent ``stored``.
        """
        ...

    async def events(self, request_id: str) -> tuple[Event, ...]:
        """Return the last MAX_EVENTS events of a request, oldest first.

        Raises UnknownRequest.
        """
        ...

    async def get(self, request_id: str) -> Entry:
        """Return the request's entry.

        Raises ForgottenRequest if the request was erased in the last ``retention`` seconds, and
        UnknownRequest if it does not exist for another reason.
        """
        ...

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored:
        """Return a request with the tokens of each choice from an offset on.

        ``offsets`` has one offset per choice, in the order of the choices; missing ones at its end
        are 0. Raises OffsetOutOfRange for an offset that is negative or beyond a choice's tokens,
        and for more offsets than choices. Raises ForgottenRequest if the request was erased in the
        last ``retention`` seconds, and UnknownRequest if it does not exist for another reason.
        """
        ...

    async def list_requests(
        self,
        tenant: str,
        *,
        states: Collection[State] = (),
        session_id: str = "",
        limit: int = MAX_PAGE_SIZE,
        before: Position | None = None,
    ) -> Page:
        """Return a page of up to ``limit`` requests of ``tenant`` in ``states``, newest first.

        An empty ``tenant`` selects all tenants, empty ``states`` all states. With a ``session_id``,
        only requests of this session are returned, and an empty ``tenant`` selects only requests
        without a tenant. The page begins after the position ``before``, or with the newest request
        if ``before`` is None. A page may have fewer entries than ``limit`` although more follow;
        ``Page.last`` is then not None. Raises ValueError for a ``limit`` out of range.
        """
        ...

    async def turns(self, tenant: str, session_id: str, limit: int = MAX_TURNS) -> tuple[Turn, ...]:
        """Return up to ``limit`` turns of a session, newest first.

        A turn is a FINISHED request with digests of its prompt (``Request.turn``); requests without
        digests are left out. Each shard examines only its newest ``limit`` requests of the session,
        so the result may lack older turns even if it has fewer than ``limit``. An empty ``tenant``
        selects only requests without a tenant.
        """
        ...

    # gateways

    async def heartbeat(self, gateway: str, address: str, lease_s: float) -> Membership:
        """Renew the lease of the router ``gateway``, and return the state of the cluster.

        The lease then ends in ``lease_s`` seconds. ``address`` is the router's internal address,
        which is stored.
        """
        ...

    async def end_lease(self, gateway: str) -> None:
        """End the lease of the router ``gateway`` at once.

        Its unfinished requests are then among the ``orphans``, which other routers take over.
        """
        ...

    async def gateways(self) -> dict[str, str]:
        """Return the internal address of each router whose lease has not ended, by router id."""
        ...

    async def orphans(self, limit: int) -> list[str]:
        """Return the ids of up to ``limit`` unfinished requests whose router has no lease any more.

        The requests are sorted by the end of their routers' leases, earliest first. Requests of a
        router without a recorded lease come before all others. The cost does not depend on the
        number of requests of live routers.
        """
        ...

    # leadership

    async def lead(
        self, router: str, address: str, term: int, lease_s: float, *, is_new: bool = True
    ) -> bool:
        """Take or renew the leader's lease for ``term``; return whether ``term`` now holds it.

        The lease then ends in ``lease_s`` seconds. If ``term`` was the last term to hold the lease,
        it can renew the lease at any time. Another term can take the lease only after its end. If
        ``is_new`` is False, the call only renews the lease: it returns False if another term has
        held the lease since. A ledger that has lost all terms grants such a renewal, too.
        """
        ...

    async def resign(self, term: int) -> None:
        """End the leader's lease if ``term`` holds it; otherwise change nothing."""
        ...

    # workers

    async def put_worker(self, info: session_pb2.WorkerInfo) -> None:
        """Add the worker to the table of workers, replacing any other worker at its address.

        A worker that restarts on a fixed port has a new id at the same address.
        """
        ...

    async def drop_worker(self, worker_id: str) -> None: ...

    async def workers(self) -> list[session_pb2.WorkerInfo]: ...

    async def last_workers(self) -> list[session_pb2.WorkerInfo]:
        """Return, for each model, the worker that was added last, even if it is gone."""
        ...

    # load

    async def put_load(self, load: session_pb2.ClusterLoad) -> None:
        """Store the leader's report on the cluster's load, which the autoscaler reads.

        The report is ignored unless ``load.term`` identifies the latest leadership.
        """
        ...

    async def load(self) -> LoadReport | None:
        """Return the last stored report on the load, with its age; None if there is none."""
        ...

    async def is_active(self) -> bool:
        """Return whether this cluster is the active one, which serves clients.

        Clusters that share ``ledger.active_key`` have one active cluster, which the key names. If
        the key names none, this call makes this cluster the active one. A cluster stops being
        active 10 s after its last call of ``is_active``, ``activate`` or ``active_load``. Without
        an ``active_key`` every cluster is active.
        """
        ...

    async def activate(self) -> None:
        """Make this cluster the active one, in place of any other with the same ``active_key``.

        Clients are then sent to its routers. Without an ``active_key`` this has no effect.
        """
        ...

    async def active_load(self) -> LoadReport | None:
        """Return the load report of the active cluster, if that is another cluster.

        Returns None if this cluster is the active one, or the active one has no stored load. If no
        cluster is active, this call makes this one active, as ``is_active`` does.
        """
        ...

    async def put_scaling(self, scaling: session_pb2.Scaling) -> None:
        """Store the decisions of a model's autoscaler, which the leader and the console read."""
        ...

    async def scaling(self) -> list[ScalingReport]:
        """Return the last stored decisions of each model's autoscaler, and their ages.

        They are sorted by model.
        """
        ...

    # tenants

    async def charge(self, charge: Charge, lease_s: float) -> bool:
        """Count a request towards all limits of its tenant; return False if it was counted before.

        The largest amounts that the request may use are taken from the tenant's token buckets. The
        request also counts as concurrent until ``settle_charges``, or until ``lease_s`` seconds
        have passed without a ``renew_charges``. If it was counted before, nothing more is taken.
        Raises RateLimited, and counts the request towards no limit, if one of them is reached.
        Raises LedgerFull.
        """
        ...

    async def settle_charges(self, ends: Sequence[Settlement]) -> None:
        """Refund what ended requests did not use of the amounts that ``charge`` took for them.

        The ended requests no longer count as concurrent. Requests that were never charged, or are
        already settled, are ignored.
        """
        ...

    async def renew_charges(self, request_ids: Sequence[str], lease_s: float) -> None:
        """Let unfinished requests count as concurrent requests for ``lease_s`` seconds from now."""
        ...

    # API keys and tenants

    async def access(self, known: int = -1) -> AccessRecords | None:
        """Return the records of API keys and tenants; None if their version is still ``known``."""
        ...

    async def put_access(self, changes: Mapping[str, str | None]) -> None:
        """Store records of API keys and tenants.

        ``changes`` has the new text of each record by its name. None removes the record.
        """
        ...

    # policy

    async def set_policy(self, changes: Mapping[str, str]) -> ClusterPolicy:
        """Change run-time settings, and return the policy that is then in effect.

        ``changes`` has the new text of each setting by its name. An empty text unsets a setting.
        """
        ...

    async def restore_policy(self, policy: ClusterPolicy) -> ClusterPolicy:
        """Store ``policy`` again after a server lost it; return the policy that is then in effect.

        Nothing changes if the ledger's policy has the same version or a newer one.
        """
        ...

    async def policy(self) -> ClusterPolicy:
        """Return the run-time settings that operators have set."""
        ...

    # objects

    async def put_object(
        self, name: str, data: bytes, version: int, retention_s: float | None = None
    ) -> int:
        """Store an object, and return its new version, which is larger.

        ``version`` is the version that the object must have; 0 means that it must not exist. The
        object is deleted ``retention_s`` seconds after this call, unless it is put again; None
        means the setting ``retention``. Raises ObjectConflict, and stores nothing, if the object
        has another version. Raises LedgerFull, and ValueError for an invalid name (objects.py) or
        more than MAX_OBJECT_BYTES of ``data``. Raises InvalidRequest for an invalid tenant in the
        name.
        """
        ...

    async def get_object(self, name: str) -> StoredObject | None: ...

    async def delete_object(self, name: str) -> bool:
        """Delete an object, and return whether it existed.

        Raises ValueError for an invalid name (objects.py), and InvalidRequest for an invalid tenant
        in the name.
        """
        ...

    async def list_objects(
        self, kind: str, tenant: str, after: str = "", limit: int = MAX_PAGE_SIZE
    ) -> tuple[str, ...]:
        """Return the names of up to ``limit`` objects of a tenant and kind, in descending order.

        Objects whose ids begin with their creation time are thereby listed newest first. An empty
        ``tenant`` selects only objects without a tenant. The result begins after the name
        ``after``, or with the largest name if ``after`` is empty. No names follow a result that has
        fewer than ``limit``. The cost grows only with the logarithm of the number of objects.
        Raises ValueError for a ``limit`` out of range.
        """
        ...

    async def cluster_id(self) -> str:
        """Return the random id of this ledger's cluster, which is generated once."""
        ...

    async def close(self) -> None: ...
