"""Ledger in the memory of one process. Pure.

It behaves as ``base.py`` specifies, but its data ends with the process. It is the reference for
that behaviour, and serves simulations and tests. It has no scripts and no shards.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from everlift.errors import AttemptsExhausted, ForgottenRequest, RequestConflict, UnknownRequest
from everlift.messages import Request
from everlift.request_id import strip_tenant, tenant_of
from everlift.v1 import session_pb2
from router.ledger.base import (
    MAX_PAGE_SIZE,
    MAX_TURNS,
    NOTHING,
    AccessRecords,
    ClusterPolicy,
    LoadReport,
    Membership,
    NotQueued,
    Opened,
    Page,
    Position,
    ScalingReport,
    StaleTerm,
    check_copy,
    check_end,
    check_listed,
    check_nonce,
)
from router.ledger.config import DEFAULTS, DurabilityClass, LedgerConfig
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
    attempts_exhausted_message,
)
from router.ledger.listing import Audited, Chunk, Claim, Item, Listed, Listing, Part, Row, Stray
from router.ledger.memory.memory_quotas import MemoryQuotas
from router.ledger.memory.object_store import ObjectStore
from router.ledger.memory.prompt_store import PromptStore
from router.ledger.memory.record import Record
from router.ledger.objects import StoredObject, collection_of
from router.ledger.quota import Charge, Settlement


@dataclass(frozen=True, slots=True)
class _Lease:
    address: str
    ends: float


_NO_LEASE = _Lease("", float("-inf"))


@dataclass(frozen=True, slots=True)
class _Leader:
    router: str
    address: str
    term: int
    ends: float


_NO_LEADER = _Leader("", "", 0, float("-inf"))


class MemoryLedger:
    """Ledger in memory; ``clock`` returns seconds and never goes back."""

    server = "memory"
    durability_class: DurabilityClass = "memory"

    def __init__(self, clock: Callable[[], float], config: LedgerConfig = DEFAULTS) -> None:
        self._clock = clock
        self._retention_s = config.retention
        self._records: dict[str, Record] = {}
        self._prompts = PromptStore()
        #: ids of unfinished requests by gateway; a gateway without any has no item
        self._owned: dict[str, dict[str, None]] = {}
        #: time at which a final request is deleted, by its id, in the order of the requests' ends
        self._ended: OrderedDict[str, float] = OrderedDict()
        #: time until which the erasure of a request is remembered, by the request's id and arrival
        self._forgotten: OrderedDict[tuple[str, float], float] = OrderedDict()
        #: time until which the last erasure of a request with an id is remembered, by this id
        self._forgotten_ids: dict[str, float] = {}
        self._leases: dict[str, _Lease] = {}
        self._leader = _NO_LEADER
        self._term = 0
        self._workers: dict[str, bytes] = {}
        self._workers_version = 0
        self._last_workers: dict[str, bytes] = {}
        self._load: tuple[float, bytes] | None = None
        self._scaling: dict[str, tuple[float, bytes]] = {}
        self._quotas = MemoryQuotas(clock)
        self._access = AccessRecords(0, {})
        self._policy = ClusterPolicy()
        self._objects = ObjectStore(clock)
        self._cluster_id = secrets.token_hex(8)

    def _find(self, request_id: str) -> Record | None:
        self._forget_expired()
        return self._records.get(request_id)

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._ended and next(iter(self._ended.values())) <= now:
            self._remove(self._ended.popitem(last=False)[0])
        while self._forgotten and next(iter(self._forgotten.values())) <= now:
            (request_id, _), until = self._forgotten.popitem(last=False)
            # If a later request with this id was erased too, the id expires with that request.
            if self._forgotten_ids.get(request_id) == until:
                del self._forgotten_ids[request_id]

    def _remove(self, request_id: str) -> None:
        record = self._records.pop(request_id)
        self._prompts.release(record.request, record.last_chunk)

    def _get(self, request_id: str) -> Record:
        if (record := self._find(request_id)) is None:
            raise UnknownRequest(f"no request {strip_tenant(request_id)}")
        return record

    # requests

    async def open(
        self,
        request: Request,
        gateway: str,
        timeout_s: float | None = None,
        dispatch: Dispatch | None = None,
    ) -> Opened:
        if dispatch is not None:
            check_nonce(dispatch.epoch), check_nonce(dispatch.term)
        record = self._find(request.request_id)
        if record is None:
            record = self._create(request, gateway, timeout_s)
            if dispatch is not None and dispatch.term == self._term:
                self._run(record, dispatch.worker, dispatch.epoch)
            return Opened(record.entry, created=True)
        if record.request.body_hash != request.body_hash:
            raise RequestConflict(
                f'request id "{strip_tenant(request.request_id)}" already exists with a different '
                "request body"
            )
        return Opened(record.entry, created=False)

    def _create(self, request: Request, gateway: str, timeout_s: float | None) -> Record:
        now = self._clock()
        deadline = None if timeout_s is None else now + timeout_s
        record = Record.blank(replace(request, deadline=deadline), self._prompts, gateway, now)
        record.move(now, "open", gateway)
        self._records[request.request_id] = record
        self._own(record.entry)
        return record

    async def dispatch(self, request_id: str, worker: str, epoch: int, term: int) -> Entry:
        check_nonce(epoch), check_nonce(term)
        record = self._find(request_id)
        entry = record.entry if record else None
        if entry and entry.epoch == epoch:
            return entry
        if term != self._term:
            raise StaleTerm
        if record is None or entry is None or entry.state not in Move.DISPATCH.sources:
            raise NotQueued(entry)
        self._run(record, worker, epoch)
        return record.entry

    def _run(self, record: Record, worker: str, epoch: int) -> None:
        self._move(
            record,
            "dispatch",
            worker,
            state=State.RUNNING,
            worker=worker,
            epoch=epoch,
            attempts=record.entry.attempts + 1,
        )

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        return [self._append(item) for item in appends]

    def _append(self, item: Append) -> Appended:
        record = self._find(item.request_id)
        if record is None or item.choice >= len(record.choices):
            return Appended.UNKNOWN
        choice = record.choices[item.choice]
        if record.entry.state.is_final:
            is_ours = record.finished_by == item.epoch
            return Appended.FINISHED if is_ours and choice.is_repeated(item) else Appended.ENDED
        if record.entry.state not in Move.APPEND.sources or record.entry.epoch != item.epoch:
            return Appended.FENCED
        if choice.finish_reason:
            return Appended.OK if choice.is_repeated(item) else Appended.ENDED
        return self._store(record, item)

    def _store(self, record: Record, item: Append) -> Appended:
        answer = record.store(item)
        if answer is not Appended.OK or not record.is_complete:
            return answer
        record.finished_by = item.epoch
        self._end(record, "finish", "", State.FINISHED)
        return Appended.FINISHED

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
        record = self._get(request_id)
        if record.entry.state not in Move.RELEASE.sources or record.entry.epoch != epoch:
            return record.entry
        losses = record.entry.losses + (loss is not None)
        record.update(losses=losses, tally=tally)
        record.explain(explanation)
        if loss is not None and losses >= max_losses:
            message = attempts_exhausted_message(max_losses, loss)
            self._end(record, "release", loss, State.FAILED, AttemptsExhausted.slug, message)
        else:
            self._queue(record, "release", loss or "")
        return record.entry

    async def take_over(self, request_id: str, gateway: str, owner: str) -> Stored:
        record = self._get(request_id)
        if record.entry.state in Move.TAKE_OVER.sources and record.entry.gateway == owner:
            self._disown(record.entry)
            self._queue(record, "take_over", gateway, gateway=gateway)
            self._own(record.entry)
        return record.stored((), self._clock())

    async def discard(self, request_id: str, owner: str) -> Entry | None:
        if (record := self._find(request_id)) is None:
            return None
        if record.entry.state not in Move.DISCARD.sources or record.entry.gateway != owner:
            return record.entry
        self._disown(record.entry)
        self._remove(request_id)
        return None

    async def end_request(
        self,
        request_id: str,
        state: State,
        slug: str,
        message: str,
        owner: str | None = None,
        explanation: bytes = b"",
    ) -> Entry:
        check_end(state)
        record = self._get(request_id)
        if record.entry.state in Move.END.sources and owner in (None, record.entry.gateway):
            record.explain(explanation)
            self._end(record, "end", slug, state, slug, message)
        return record.entry

    def _move(self, record: Record, name: str, detail: str, **changes: object) -> None:
        record.move(self._clock(), name, detail, **changes)

    def _queue(self, record: Record, name: str, detail: str, **changes: object) -> None:
        self._move(record, name, detail, state=State.QUEUED, worker="", epoch=0, **changes)

    def _end(
        self,
        record: Record,
        name: str,
        detail: str,
        state: State,
        slug: str = "",
        message: str = "",
    ) -> None:
        self._disown(record.entry)
        ended = {"state": state, "error_slug": slug, "error_message": message}
        self._move(record, name, detail, worker="", epoch=0, **ended)
        self._retain(record.entry)

    def _retain(self, entry: Entry) -> None:
        self._ended[entry.request_id] = self._clock() + self._retention_s

    async def explain(self, explained: Sequence[Explained]) -> None:
        for item in explained:
            record = self._find(item.request_id)
            if record is not None and record.is_of(item):
                record.explain(item.explanation)

    async def erase(self, request_id: str) -> Entry | None:
        entry = self._get(request_id).entry
        if entry.state not in Move.FORGET.sources:
            return entry
        self._remove(request_id)
        del self._ended[request_id]
        until = self._clock() + self._retention_s
        self._forgotten[request_id, entry.arrived] = self._forgotten_ids[request_id] = until
        return None

    async def reassert(self, stored: Stored) -> tuple[Reasserted, Entry]:
        copy = check_copy(stored)
        known = self._find(copy.entry.request_id)
        if (copy.entry.request_id, copy.entry.arrived) in self._forgotten:
            return Reasserted.FORGOTTEN, copy.entry
        record = known or self._restore(copy)
        answer = record.compare(copy)
        if answer is Reasserted.OK and not record.entry.state.is_final:
            answer = self._merge(record, copy)
        return answer, record.entry

    def _restore(self, copy: Stored) -> Record:
        entry = copy.entry
        record = Record.blank(copy.request, self._prompts, entry.gateway, entry.arrived)
        self._records[copy.entry.request_id] = record
        self._own(record.entry)
        return record

    def _merge(self, record: Record, copy: Stored) -> Reasserted:
        self._disown(record.entry)
        record.merge(copy, self._clock())
        if record.entry.state.is_final:
            self._retain(record.entry)
        else:
            self._own(record.entry)
        return record.compare(copy)

    async def events(self, request_id: str) -> tuple[Event, ...]:
        return tuple(self._get(request_id).events)

    async def get(self, request_id: str) -> Entry:
        self._check_not_forgotten(request_id)
        return self._get(request_id).entry

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored:
        self._check_not_forgotten(request_id)
        return self._get(request_id).stored(offsets, self._clock())

    def _check_not_forgotten(self, request_id: str) -> None:
        if self._find(request_id) is None and request_id in self._forgotten_ids:
            raise ForgottenRequest(f"request {strip_tenant(request_id)} was forgotten")

    async def list_requests(
        self,
        tenant: str,
        *,
        states: Collection[State] = (),
        session_id: str = "",
        limit: int = MAX_PAGE_SIZE,
        before: Position | None = None,
    ) -> Page:
        self._forget_expired()
        if session_id:
            found = self._of_session(tenant, session_id)
        else:
            records = self._records.values()
            found = [it for it in records if tenant in ("", tenant_of(it.request.request_id))]
        rows = [
            Row(
                Position(round(it.arrived, 6), it.request_id),
                it if not states or it.state in states else None,
            )
            for it in (record.entry for record in found)
        ]
        listing = Listing(check_listed(limit), before)
        listing.add([Part(rows, is_end=True)])
        return listing.page()

    def _of_session(self, tenant: str, session_id: str) -> list[Record]:
        return [
            record
            for record in self._records.values()
            if record.request.session_id == session_id
            and tenant_of(record.request.request_id) == tenant
        ]

    async def turns(self, tenant: str, session_id: str, limit: int = MAX_TURNS) -> tuple[Turn, ...]:
        self._forget_expired()
        found = self._of_session(tenant, session_id)
        found.sort(key=lambda it: (it.entry.arrived, it.entry.request_id), reverse=True)
        return tuple(
            Turn(it.entry.request_id, it.request.turn)
            for it in found[:limit]
            if it.entry.state is State.FINISHED and it.request.turn
        )

    # gateways

    def _own(self, entry: Entry) -> None:
        self._owned.setdefault(entry.gateway, {})[entry.request_id] = None

    def _disown(self, entry: Entry) -> None:
        owned = self._owned[entry.gateway]
        del owned[entry.request_id]
        if not owned:
            del self._owned[entry.gateway]

    async def heartbeat(self, gateway: str, address: str, lease_s: float) -> Membership:
        now = self._clock()
        self._leases[gateway] = _Lease(address, now + lease_s)
        leader = self._leader if self._leader.ends > now else _NO_LEADER
        return Membership(
            now,
            leader.router,
            leader.address,
            leader.term,
            self._workers_version,
            policy_version=self._policy.version,
        )

    async def end_lease(self, gateway: str) -> None:
        if (lease := self._leases.get(gateway)) is not None:
            self._leases[gateway] = replace(lease, ends=min(lease.ends, self._clock()))

    async def gateways(self) -> dict[str, str]:
        now = self._clock()
        return {gateway: it.address for gateway, it in self._leases.items() if it.ends > now}

    async def orphans(self, limit: int) -> list[str]:
        now = self._clock()
        ends = {gateway: self._leases.get(gateway, _NO_LEASE).ends for gateway in self._owned}
        dead = sorted((gateway for gateway in ends if ends[gateway] <= now), key=ends.__getitem__)
        return list(islice(chain.from_iterable(self._owned[gateway] for gateway in dead), limit))

    # leadership

    @property
    def term(self) -> int:
        """Number that identifies the present or last leadership.

        A dispatch under another number is refused.
        """
        return self._term

    async def lead(
        self, router: str, address: str, term: int, lease_s: float, *, is_new: bool = True
    ) -> bool:
        now, known = self._clock(), self._leader
        was_deposed = known.term and not is_new
        if known.term != check_nonce(term) and (known.ends > now or was_deposed):
            return False
        self._leader = _Leader(router, address, term, now + lease_s)
        self._term = term
        return True

    async def resign(self, term: int) -> None:
        if self._leader.term == term:
            self._leader = replace(self._leader, ends=_NO_LEADER.ends)

    # workers

    async def put_worker(self, info: session_pb2.WorkerInfo) -> None:
        stored = info.SerializeToString(deterministic=True)
        if self._workers.get(info.worker_id) != stored:
            for other in await self.workers():
                if other.address == info.address:
                    del self._workers[other.worker_id]
            self._workers[info.worker_id] = self._last_workers[info.model] = stored
            self._workers_version += 1

    async def drop_worker(self, worker_id: str) -> None:
        if self._workers.pop(worker_id, None) is not None:
            self._workers_version += 1

    async def workers(self) -> list[session_pb2.WorkerInfo]:
        return [
            session_pb2.WorkerInfo.FromString(info) for _, info in sorted(self._workers.items())
        ]

    async def last_workers(self) -> list[session_pb2.WorkerInfo]:
        stored = sorted(self._last_workers.items())
        return [session_pb2.WorkerInfo.FromString(info) for _, info in stored]

    # load

    async def put_load(self, load: session_pb2.ClusterLoad) -> None:
        if load.term == self._leader.term:
            self._load = (self._clock(), load.SerializeToString())

    async def load(self) -> LoadReport | None:
        if self._load is None:
            return None
        reported_at, load = self._load
        return LoadReport(session_pb2.ClusterLoad.FromString(load), self._clock() - reported_at)

    async def is_active(self) -> bool:
        return True

    async def activate(self) -> None:
        pass

    async def active_load(self) -> LoadReport | None:
        return None

    async def put_scaling(self, scaling: session_pb2.Scaling) -> None:
        self._scaling[scaling.model] = (self._clock(), scaling.SerializeToString())

    async def scaling(self) -> list[ScalingReport]:
        now = self._clock()
        return [
            ScalingReport(session_pb2.Scaling.FromString(scaling), now - reported_at)
            for _, (reported_at, scaling) in sorted(self._scaling.items())
        ]

    # tenants

    async def charge(self, charge: Charge, lease_s: float) -> bool:
        return self._quotas.charge(charge, lease_s)

    async def settle_charges(self, ends: Sequence[Settlement]) -> None:
        self._quotas.settle(ends)

    async def renew_charges(self, request_ids: Sequence[str], lease_s: float) -> None:
        self._quotas.renew_charges(request_ids, lease_s)

    # API keys and tenants

    async def access(self, known: int = -1) -> AccessRecords | None:
        return None if self._access.version == known else self._access

    async def put_access(self, changes: Mapping[str, str | None]) -> None:
        texts = {**self._access.texts, **changes}
        self._access = AccessRecords(
            self._access.version + 1,
            {name: text for name, text in texts.items() if text is not None},
        )

    # policy

    async def set_policy(self, changes: Mapping[str, str]) -> ClusterPolicy:
        known = self._policy
        values = {name: text for name, text in {**known.values, **changes}.items() if text}
        if values != known.values:
            # The version is a time instead of a counter, so that a lost one is never issued again.
            version = max(round(self._clock() * 1e6), known.version + 1)
            self._policy = ClusterPolicy(values, version)
        return self._policy

    async def restore_policy(self, policy: ClusterPolicy) -> ClusterPolicy:
        if policy.version > self._policy.version:
            self._policy = policy
        return self._policy

    async def policy(self) -> ClusterPolicy:
        return self._policy

    # objects

    async def put_object(
        self, name: str, data: bytes, version: int, retention_s: float | None = None
    ) -> int:
        kept_s = self._retention_s if retention_s is None else retention_s
        return self._objects.put(name, data, version, kept_s)

    async def get_object(self, name: str) -> StoredObject | None:
        return self._objects.get(name)

    async def delete_object(self, name: str) -> bool:
        return self._objects.delete(name)

    async def list_objects(
        self, kind: str, tenant: str, after: str = "", limit: int = MAX_PAGE_SIZE
    ) -> tuple[str, ...]:
        return self._objects.names(collection_of(tenant, kind), after, check_listed(limit))

    async def cluster_id(self) -> str:
        return self._cluster_id

    def audit(self) -> MemoryAudit:
        return MemoryAudit(self._records, self._owned)

    async def close(self) -> None:
        """Do nothing, because there is no connection."""


class MemoryAudit:
    """Audit of the memory ledger; ``owned`` has the ids of unfinished requests by router id."""

    def __init__(self, records: Mapping[str, Record], owned: Mapping[str, Collection[str]]) -> None:
        self._records = records
        self._owned = owned

    async def items(self) -> AsyncIterator[Item]:
        for record in list(self._records.values()):
            yield self._audited(record)
        for gateway, owned in list(self._owned.items()):
            for request_id in list(owned):
                yield self._claim(gateway, request_id)

    async def reread(self, items: Sequence[Item]) -> list[Item]:
        found = [self._reread(item) for item in items]
        return [item for item in found if item is not None]

    def _reread(self, item: Item) -> Item | None:
        match item:
            case Audited():
                record = self._records.get(item.request_id)
                return self._audited(record) if record else None
            case Claim():
                owned = self._owned.get(item.gateway, ())
                return (
                    self._claim(item.gateway, item.request_id) if item.request_id in owned else None
                )
            case Stray() | Listed() | Chunk():
                return None

    def _audited(self, record: Record) -> Audited:
        entry = record.entry
        return Audited(
            entry=entry,
            max_tokens=record.request.max_tokens,
            finished_by=record.finished_by,
            events=tuple(record.events),
            owned=entry.request_id in self._owned.get(entry.gateway, ()),
        )

    def _claim(self, gateway: str, request_id: str) -> Claim:
        record = self._records.get(request_id)
        if record is None:
            return Claim(request_id, gateway, None, "")
        return Claim(request_id, gateway, record.entry.state, record.entry.gateway)
