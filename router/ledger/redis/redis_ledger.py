"""Ledger in Redis or Valkey: each state change is one Lua script, each request on one shard.

A shard holds a part of the requests, and all its keys are on one server. ``common.lua`` describes
the keys, ``base.py`` the behaviour.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from redis.exceptions import OutOfMemoryError

from everlift import logs
from everlift.errors import (
    AttemptsExhausted,
    ForgottenRequest,
    InvalidRequest,
    LedgerFull,
    LedgerUnavailable,
    OffsetOutOfRange,
    RequestConflict,
    UnknownRequest,
)
from everlift.hashes import CHUNK_SIZE
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
from router.ledger.config import EMBEDDED, LedgerConfig, LedgerSetupError
from router.ledger.entry import (
    Append,
    Appended,
    Dispatch,
    Entry,
    Event,
    Explained,
    Reasserted,
    State,
    Stored,
    Tally,
    Turn,
    attempts_exhausted_message,
)
from router.ledger.listing import Listing, Part
from router.ledger.objects import (
    ObjectConflict,
    StoredObject,
    check_object,
    check_object_name,
    collection_of,
)
from router.ledger.prompts import chunk_names, image_names, session_name
from router.ledger.quota import Charge, Settlement, refusal
from router.ledger.redis import codec, scripts
from router.ledger.redis.address import parse
from router.ledger.redis.channel import Argument
from router.ledger.redis.connections import Command
from router.ledger.redis.known_chunks import KnownChunks
from router.ledger.redis.redis_audit import RedisAudit
from router.ledger.redis.scripts import Script
from router.ledger.redis.server import generation, memory_used
from router.ledger.redis.setup import check_ledger, check_servers, layout
from router.ledger.redis.shards import Call, Shards, root

log = logs.get_logger(__name__)

#: Shard of the lease table, the leader, the workers and everything else of the whole cluster.
_CONTROL = 0
#: Scripts that may create or end a request: under durability class replicated, their calls wait for
#: a replica (``Call.settles``). So do appends that end a choice.
_SETTLING = (scripts.OPEN, scripts.RELEASE, scripts.END, scripts.FORGET, scripts.REASSERT)
#: Seconds after which a client may retry when the ledger was full.
_FULL_S = 1.0
#: Sections of INFO that a heartbeat reads.
_INFO_SECTIONS = ("server", "replication", "memory")
#: Time to live of an unfinished request after its last move other than an append, in ms. Deadlines
#: are shorter.
_UNFINISHED_MS = 8 * 24 * 3600 * 1000
#: Number of requests that one call of list.lua examines. The call blocks other calls for some
#: tenths of a millisecond.
_LISTED_PER_CALL = 128
#: Time in ms for which a cluster stays the active one after its last call of active.lua.
_ACTIVE_MS = 10_000
#: More log probabilities than this are packed in a thread, because this takes milliseconds.
_MANY_LOGPROBS = 2048
#: From this number of tokens on, the chunks of a prompt are packed in a thread, because packing
#: takes a millisecond.
_MANY_TOKENS = 1 << 15


async def connect(config: LedgerConfig | str) -> RedisLedger:
    """Connect to a ledger, check its servers and layout, and return it.

    ``config`` is the ledger's settings, or only its url. Raises LedgerSetupError for an unusable
    server or layout, LedgerUnavailable if a server does not answer, and ValueError for an invalid
    url.
    """
    config = LedgerConfig(url=config) if isinstance(config, str) else config
    if config.url == EMBEDDED:
        raise ValueError("connect to an embedded ledger by the url that its ``start`` returned")
    shards = Shards(config)
    try:
        server, cluster_id = await check_ledger(shards, config)
    except BaseException:
        await shards.close()
        raise
    log.info("ledger connected", server=server, cluster_id=cluster_id, shards=config.shards)
    return RedisLedger(shards, config, server, cluster_id)


class RedisLedger:
    """Ledger in Redis or Valkey; use ``connect`` to create it."""

    def __init__(self, shards: Shards, config: LedgerConfig, server: str, cluster_id: str) -> None:
        self.server = server
        self.durability_class = config.durability_class
        self._shards = shards
        self._retention_ms = round(config.retention * 1000)
        #: longest time in ms during which a call may still be retried
        self._call_ms = round(2000 * config.timeout)
        self._cluster_id = cluster_id
        #: commands that store the layout. They run at every heartbeat: after a FLUSHALL, the next
        #: router would otherwise store another cluster id
        self._layout = layout(config, cluster_id)
        self._config = config
        #: id of the servers' present run, and why these are unusable; empty if they are usable
        self._generation = self._unfit = ""
        self._is_local = bool(parse(config.url).path)
        self._known_chunks = [KnownChunks() for _ in range(config.shards)]

    async def _move(self, script: Script, request_id: str, *arguments: Argument) -> tuple[str, Any]:
        """Run a script for a request; return the first word of its answer, and the rest.

        Raises UnknownRequest if the request does not exist, ForgottenRequest if it was erased
        recently.
        """
        shard = self._shards.of(request_id)
        settles = script in _SETTLING
        word, *rest = await self._shards.run(script, shard, request_id, *arguments, settles=settles)
        if word == b"unknown":
            raise UnknownRequest(f"no request {strip_tenant(request_id)}")
        if word == b"erased":
            raise ForgottenRequest(f"request {strip_tenant(request_id)} was forgotten")
        return word.decode(), rest

    # requests

    async def open(
        self,
        request: Request,
        gateway: str,
        timeout_s: float | None = None,
        dispatch: Dispatch | None = None,
    ) -> Opened:
        with _raising_ledger_full():
            word, rest = await self._open(request, gateway, timeout_s, dispatch)
        if word == "conflict":
            raise RequestConflict(
                f'request id "{strip_tenant(request.request_id)}" already exists with a different '
                "request body"
            )
        return Opened(codec.entry(request.request_id, rest[0]), created=word == "created")

    async def _open(
        self, request: Request, gateway: str, timeout_s: float | None, dispatch: Dispatch | None
    ) -> tuple[str, Any]:
        name = request.request_id
        session, call = session_name(tenant_of(name), request.session_id), os.urandom(8)

        async def attempt(base: str, hashes: str, tokens: bytes, images: bytes) -> tuple[str, Any]:
            return await self._move(
                scripts.OPEN,
                name,
                gateway,
                "" if timeout_s is None else codec.microseconds(timeout_s),
                request.max_tokens,
                request.n,
                int(codec.has_logprobs(request)),
                request.body_hash,
                codec.pack_rest(request),
                request.turn,
                call,
                _UNFINISHED_MS,
                session,
                base,
                hashes,
                tokens,
                images,
                *_dispatch_arguments(dispatch),
            )

        known = self._known_chunks[self._shards.of(name)]
        names, images = chunk_names(request), image_names(request)
        first = known.num_leading(names)
        known_images = {image for image in images if known.num_leading([image])}
        word, rest = await attempt(
            names[first - 1] if first else "",
            *await _packed_chunks(request, first),
            codec.pack_images(request, known_images),
        )
        if word == "missing":
            chunks = await _packed_chunks(request, 0)
            word, rest = await attempt("", *chunks, codec.pack_images(request))
        for each in (names, *([image] for image in images)):
            known.add(each)
        return word, rest

    async def dispatch(self, request_id: str, worker: str, epoch: int, term: int) -> Entry:
        word, rest = await self._move(
            scripts.DISPATCH,
            request_id,
            worker,
            check_nonce(epoch),
            check_nonce(term),
            _UNFINISHED_MS,
        )
        if word == "stale_term":
            raise StaleTerm
        if word == "not_queued":
            raise NotQueued(codec.entry(request_id, rest[0]) if rest[0] else None)
        return codec.entry(request_id, rest[0])

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        if len(self._shards) == 1:
            [answer] = await self._shards.run_all([self._append_call(0, appends)])
            return codec.appended(answer, len(appends))
        places = [self._shards.of(item.request_id) for item in appends]
        by_shard: dict[int, list[Append]] = {}
        for shard, item in zip(places, appends, strict=True):
            by_shard.setdefault(shard, []).append(item)
        answers = await self._shards.run_all(
            [self._append_call(shard, items) for shard, items in by_shard.items()]
        )
        # Each shard answers in the order of its own items.
        words = {
            shard: iter(codec.appended(answer, len(items)))
            for (shard, items), answer in zip(by_shard.items(), answers, strict=True)
        }
        return [next(words[shard]) for shard in places]

    def _append_call(self, shard: int, items: Sequence[Append]) -> Call:
        settles = any(item.finish_reason is not None for item in items)
        return Call(scripts.APPEND, shard, [self._retention_ms, codec.appends(items)], settles)

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
        _, rest = await self._move(
            scripts.RELEASE,
            request_id,
            epoch,
            int(loss is not None),
            loss or "",
            max_losses,
            AttemptsExhausted.slug,
            attempts_exhausted_message(max_losses, loss or ""),
            codec.tally_text(tally),
            self._retention_ms,
            _UNFINISHED_MS,
            explanation,
        )
        return codec.entry(request_id, rest[0])

    async def take_over(self, request_id: str, gateway: str, owner: str) -> Stored:
        _, rest = await self._move(
            scripts.TAKE_OVER, request_id, gateway, owner, os.urandom(8), _UNFINISHED_MS
        )
        return await _stored(request_id, (), rest)

    async def discard(self, request_id: str, owner: str) -> Entry | None:
        word, rest = await self._move(scripts.DISCARD, request_id, owner)
        return None if word == "gone" else codec.entry(request_id, rest[0])

    async def end_request(
        self,
        request_id: str,
        state: State,
        slug: str,
        message: str,
        owner: str | None = None,
        explanation: bytes = b"",
    ) -> Entry:
        _, rest = await self._move(
            scripts.END,
            request_id,
            check_end(state).value,
            slug,
            message,
            self._retention_ms,
            explanation,
            *([] if owner is None else [owner]),
        )
        return codec.entry(request_id, rest[0])

    async def explain(self, explained: Sequence[Explained]) -> None:
        fields = (
            (it.request_id, it.gateway, codec.microseconds(it.arrived), it.explanation)
            for it in explained
        )
        await self._run_by_shard(scripts.EXPLAIN, (), fields)

    async def erase(self, request_id: str) -> Entry | None:
        word, rest = await self._move(
            scripts.FORGET, request_id, os.urandom(8).hex(), self._call_ms, self._retention_ms
        )
        return None if word == "gone" else codec.entry(request_id, rest[0])

    async def reassert(self, stored: Stored) -> tuple[Reasserted, Entry]:
        copy = check_copy(stored).entry
        word, rest = await self._move(
            scripts.REASSERT, copy.request_id, *await self._reassert_arguments(stored)
        )
        return Reasserted(word), codec.entry(copy.request_id, rest[0]) if rest else copy

    async def _reassert_arguments(self, stored: Stored) -> list[Argument]:
        def pack() -> list[Argument]:
            return codec.reassert_arguments(stored, self._retention_ms, _UNFINISHED_MS)

        logprobs = [stored.prompt_logprobs, *(choice.logprobs for choice in stored.choices)]
        many = sum(map(len, logprobs)) > _MANY_LOGPROBS
        return await asyncio.to_thread(pack) if many else pack()

    async def events(self, request_id: str) -> tuple[Event, ...]:
        _, rest = await self._move(scripts.EVENTS, request_id)
        return tuple(map(codec.event, rest[0]))

    async def get(self, request_id: str) -> Entry:
        _, rest = await self._move(scripts.GET, request_id)
        return codec.entry(request_id, rest[0])

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored:
        word, rest = await self._move(scripts.READ, request_id, *offsets)
        if word == "beyond":
            raise OffsetOutOfRange(
                f"offsets {list(offsets)} are negative, too many, or beyond the stored tokens"
            )
        return await _stored(request_id, offsets, rest)

    async def list_requests(
        self,
        tenant: str,
        *,
        states: Collection[State] = (),
        session_id: str = "",
        limit: int = MAX_PAGE_SIZE,
        before: Position | None = None,
    ) -> Page:
        listing = Listing(check_listed(limit), before)
        name = _listing_name(tenant, session_id)
        while not listing.is_over:
            # Read one row more than the page needs, to see whether the listing ends with the page.
            count = _LISTED_PER_CALL if states else min(_LISTED_PER_CALL, listing.missing + 1)
            listing.add(await self._parts(name, states, listing.last, count))
        return listing.page()

    async def _parts(
        self, name: str, states: Collection[State], last: Position | None, count: int
    ) -> list[Part]:
        start = "+inf" if last is None else codec.microseconds(last.arrived)
        arguments = [name, start, count, *(state.value for state in states)]
        calls = [Call(scripts.LIST, shard, arguments) for shard in range(len(self._shards))]
        return [codec.part(answer) for answer in await self._shards.run_all(calls)]

    async def turns(self, tenant: str, session_id: str, limit: int = MAX_TURNS) -> tuple[Turn, ...]:
        # Most requests of a session are on one shard, but a client may have chosen their ids.
        arguments: list[Argument] = [session_name(tenant, session_id), limit]
        calls = [Call(scripts.TURNS, shard, arguments) for shard in range(len(self._shards))]
        found = [it for answer in await self._shards.run_all(calls) for it in codec.turns(answer)]
        found.sort(key=lambda pair: pair[0], reverse=True)
        return tuple(turn for _, turn in found[:limit])

    # gateways

    async def heartbeat(self, gateway: str, address: str, lease_s: float) -> Membership:
        arguments = (gateway, address, codec.microseconds(lease_s))
        answer, infos = await self._shards.run_with_info(
            Call(scripts.BEAT, _CONTROL, arguments), _INFO_SECTIONS, self._layout
        )
        await self._recheck_servers(generation(infos))
        return replace(
            codec.membership(answer),
            generation=self._generation,
            memory_used=memory_used(infos),
            unfit=self._unfit,
        )

    async def _recheck_servers(self, generation: str) -> None:
        if generation == self._generation and not self._unfit:
            return
        try:
            await check_servers(self._shards, self._config)
            unfit = ""
        except LedgerSetupError as error:
            unfit = str(error)
        if unfit and unfit != self._unfit:
            log.error("ledger unusable", cause=unfit)
        self._generation, self._unfit = generation, unfit

    async def end_lease(self, gateway: str) -> None:
        await self._shards.run(scripts.LEAVE, _CONTROL, gateway)

    async def gateways(self) -> dict[str, str]:
        now, leases = await self._leases()
        return {gateway: address for gateway, address, ends in leases if int(ends) > now}

    async def _leases(self) -> tuple[int, list[tuple[str, str, bytes]]]:
        now, *fields = await self._shards.run(scripts.LEASES, _CONTROL)
        leases = zip(fields[::3], fields[1::3], fields[2::3], strict=True)
        return int(now), [(g.decode(), address.decode(), ends) for g, address, ends in leases]

    async def orphans(self, limit: int) -> list[str]:
        now, leases = await self._leases()
        ends = [field for gateway, _, end in leases for field in (gateway, end)]
        calls = [
            Call(scripts.ORPHANS, shard, [limit, now, *ends]) for shard in range(len(self._shards))
        ]
        found = [pair for answer in await self._shards.run_all(calls) for pair in answer]
        found.sort(key=lambda pair: int(pair[0]))
        return [request_id.decode() for _, request_id in found[:limit]]

    # leadership

    async def lead(
        self, router: str, address: str, term: int, lease_s: float, *, is_new: bool = True
    ) -> bool:
        since = await self._shards.run(
            scripts.LEAD,
            _CONTROL,
            router,
            address,
            check_nonce(term),
            codec.microseconds(lease_s),
            int(is_new),
            is_hedged=True,
        )
        if since is None:
            return False
        fences = [
            Call(scripts.FENCE, n, [term, since], is_hedged=True) for n in range(len(self._shards))
        ]
        return all(await self._shards.run_all(fences))

    async def resign(self, term: int) -> None:
        await self._shards.run(scripts.RESIGN, _CONTROL, term)

    # workers

    async def put_worker(self, info: session_pb2.WorkerInfo) -> None:
        stored = info.SerializeToString(deterministic=True)
        arguments = info.worker_id, stored, info.address, info.model
        await self._shards.run(scripts.SET_WORKER, _CONTROL, *arguments)

    async def drop_worker(self, worker_id: str) -> None:
        await self._shards.run(scripts.SET_WORKER, _CONTROL, worker_id, b"", "", "")

    async def workers(self) -> list[session_pb2.WorkerInfo]:
        key = self._shards.key("workers", _CONTROL)
        [stored] = await self._shards.run_commands("workers", Command(key, ("HVALS", key)))
        return sorted(map(session_pb2.WorkerInfo.FromString, stored), key=lambda w: w.worker_id)

    async def last_workers(self) -> list[session_pb2.WorkerInfo]:
        key = self._shards.key("last_workers", _CONTROL)
        [stored] = await self._shards.run_commands("last workers", Command(key, ("HVALS", key)))
        return sorted(map(session_pb2.WorkerInfo.FromString, stored), key=lambda w: w.model)

    # load

    async def put_load(self, load: session_pb2.ClusterLoad) -> None:
        await self._shards.run(scripts.SET_LOAD, _CONTROL, load.term, load.SerializeToString())

    async def load(self) -> LoadReport | None:
        return _load_report(await self._shards.run(scripts.GET_LOAD, _CONTROL))

    async def is_active(self) -> bool:
        return await self._active_prefix() == self._config.key_prefix

    async def activate(self) -> None:
        await self._active_prefix(takes=True)

    async def active_load(self) -> LoadReport | None:
        active = await self._active_prefix()
        if active == self._config.key_prefix:
            return None
        # The load of a cluster with another schema is under other keys, so None is returned.
        key = root(active, _CONTROL)
        return _load_report(await self._shards.run(scripts.GET_LOAD, _CONTROL, key=key))

    async def _active_prefix(self, *, takes: bool = False) -> str:
        config = self._config
        if not config.active_key:
            return config.key_prefix
        arguments = config.key_prefix, _ACTIVE_MS, int(takes)
        key = config.active_key
        active: bytes = await self._shards.run(scripts.ACTIVE, _CONTROL, *arguments, key=key)
        return active.decode()

    async def put_scaling(self, scaling: session_pb2.Scaling) -> None:
        stored = scaling.SerializeToString()
        await self._shards.run(scripts.SET_SCALING, _CONTROL, scaling.model, stored)

    async def scaling(self) -> list[ScalingReport]:
        answer = await self._shards.run(scripts.GET_SCALING, _CONTROL)
        reports = [
            ScalingReport(session_pb2.Scaling.FromString(scaling), codec.seconds(age))
            for scaling, age in zip(answer[::2], answer[1::2], strict=True)
        ]
        return sorted(reports, key=lambda report: report.scaling.model)

    # tenants

    async def charge(self, charge: Charge, lease_s: float) -> bool:
        tenant = tenant_of(charge.request_id)
        with _raising_ledger_full():
            word, *rest = await self._shards.run(
                scripts.CHARGE,
                self._shards.of(tenant),
                tenant,
                charge.request_id,
                os.urandom(8).hex(),
                codec.microseconds(lease_s),
                charge.prompt_tokens,
                charge.tokens,
                *map(
                    codec.optional,
                    (charge.requests_per_minute, charge.tokens_per_minute, charge.max_concurrent),
                ),
            )
        if word == b"refused":
            limit, wait_us = rest
            raise refusal(charge, limit.decode(), int(wait_us))
        return bool(word == b"charged")

    async def settle_charges(self, ends: Sequence[Settlement]) -> None:
        fields = (
            (tenant_of(end.request_id), end.request_id, codec.optional(end.output_tokens))
            for end in ends
        )
        await self._run_by_shard(scripts.SETTLE, (), fields)

    async def renew_charges(self, request_ids: Sequence[str], lease_s: float) -> None:
        fields = ((tenant_of(request_id), request_id) for request_id in request_ids)
        await self._run_by_shard(scripts.HOLD, [codec.microseconds(lease_s)], fields)

    async def _run_by_shard(
        self, script: Script, first: Sequence[Argument], fields: Iterable[tuple[Argument, ...]]
    ) -> None:
        by_shard: dict[int, list[Argument]] = {}
        for each in fields:
            arguments = by_shard.setdefault(self._shards.of(str(each[0])), [*first])
            arguments.extend(each)
        await self._shards.run_all([Call(script, *item) for item in by_shard.items()])

    # API keys and tenants

    async def access(self, known: int = -1) -> AccessRecords | None:
        answer = await self._shards.run(scripts.GET_ACCESS, _CONTROL, known)
        if not answer:
            return None
        version, fields = answer
        texts = [field.decode() for field in fields]
        return AccessRecords(int(version), dict(zip(texts[::2], texts[1::2], strict=True)))

    async def put_access(self, changes: Mapping[str, str | None]) -> None:
        fields = [field for name, text in changes.items() for field in (name, text or "")]
        await self._shards.run(scripts.SET_ACCESS, _CONTROL, *fields, settles=True)

    # policy

    async def set_policy(self, changes: Mapping[str, str]) -> ClusterPolicy:
        return await self._set_policy("", changes)

    async def restore_policy(self, policy: ClusterPolicy) -> ClusterPolicy:
        return await self._set_policy(policy.version, policy.values)

    async def _set_policy(self, version: int | str, values: Mapping[str, str]) -> ClusterPolicy:
        fields = [text for pair in values.items() for text in pair]
        answer = await self._shards.run(scripts.SET_POLICY, _CONTROL, version, *fields)
        return codec.policy(answer)

    async def policy(self) -> ClusterPolicy:
        return await self.set_policy({})

    # objects

    async def put_object(
        self, name: str, data: bytes, version: int, retention_s: float | None = None
    ) -> int:
        kept_ms = self._retention_ms if retention_s is None else round(retention_s * 1000)
        with _raising_ledger_full():
            word, stored = await self._shards.run(
                scripts.PUT_OBJECT,
                self._shards.of(check_object(name, data)),
                name,
                data,
                version,
                os.urandom(8).hex(),
                self._call_ms,
                kept_ms,
                settles=True,
            )
        if word == b"conflict":
            raise ObjectConflict(int(stored))
        return int(stored)

    async def get_object(self, name: str) -> StoredObject | None:
        key = self._shards.key(f"o:{name}", self._shards.of(check_object_name(name)))
        command = Command(key, ("HMGET", key, "version", "data"))
        [(version, data)] = await self._shards.run_commands("get object", command)
        return None if version is None else StoredObject(data, int(version))

    async def delete_object(self, name: str) -> bool:
        shard = self._shards.of(check_object_name(name))
        arguments = name, os.urandom(8).hex(), self._call_ms
        deleted = await self._shards.run(scripts.DELETE_OBJECT, shard, *arguments, settles=True)
        return bool(deleted == 1)

    async def list_objects(
        self, kind: str, tenant: str, after: str = "", limit: int = MAX_PAGE_SIZE
    ) -> tuple[str, ...]:
        arguments: list[Argument] = [collection_of(tenant, kind), after, check_listed(limit)]
        calls = [Call(scripts.LIST_OBJECTS, shard, arguments) for shard in range(len(self._shards))]
        found = [name.decode() for names in await self._shards.run_all(calls) for name in names]
        return tuple(sorted(found, reverse=True)[:limit])

    async def cluster_id(self) -> str:
        return self._cluster_id

    async def time(self) -> float:
        """Return the clock of the server, in seconds since 1970.

        With several servers, the first one is asked.
        """
        answers = await self._shards.run_on_each_server("time", "TIME")
        seconds, microseconds = answers[0]
        return float(seconds) + float(microseconds) / 1e6

    def disturb(self, seconds: float, delay_s: float) -> None:
        """Inject a fault: for ``seconds`` every call takes ``delay_s`` seconds longer.

        With an infinite ``delay_s`` no call is sent before the fault ends. A call that is delayed
        beyond the ledger's timeout fails. If ``seconds`` is 0, the fault in progress ends.
        """
        self._shards.disturb(seconds, delay_s)

    async def process_id(self) -> int:
        """Return the process id of the server.

        Raises InvalidRequest unless the ledger's url is a Unix socket, because a server with
        another url may run on another machine. Raises LedgerUnavailable.
        """
        if not self._is_local:
            raise InvalidRequest(
                "the ledger's url is not a Unix socket: its server may run on another machine"
            )
        [info] = await self._shards.run_on_each_server("process", "INFO", "server")
        return int(info["process_id"])

    def audit(self) -> RedisAudit:
        return RedisAudit(self._shards)

    async def close(self) -> None:
        await self._shards.close()


def _listing_name(tenant: str, session_id: str) -> str:
    if session_id:
        return f"session:{session_name(tenant, session_id)}"
    return f"arrivals:{tenant}" if tenant else "arrivals"


async def _packed_chunks(request: Request, first: int) -> tuple[str, bytes]:
    num_tokens = len(request.prompt_ids) - first * CHUNK_SIZE
    if num_tokens < _MANY_TOKENS:
        return codec.pack_chunks(request, first)
    return await asyncio.to_thread(codec.pack_chunks, request, first)


def _load_report(answer: Sequence[Any]) -> LoadReport | None:
    if not answer:
        return None
    load, age = answer
    return LoadReport(session_pb2.ClusterLoad.FromString(load), codec.seconds(age))


@contextmanager
def _raising_ledger_full() -> Iterator[None]:
    try:
        yield
    except LedgerUnavailable as error:
        if isinstance(error.__cause__, OutOfMemoryError):
            raise LedgerFull("the ledger is full", retry_after_s=_FULL_S) from error
        raise


async def _stored(request_id: str, offsets: Sequence[int], answer: Sequence[Any]) -> Stored:
    # Decode in a thread, because hundreds of thousands of log probabilities take a second.
    return await asyncio.to_thread(codec.stored, request_id, offsets, answer)


def _dispatch_arguments(dispatch: Dispatch | None) -> Sequence[Argument]:
    if dispatch is None:
        return ()
    return dispatch.worker, check_nonce(dispatch.epoch), check_nonce(dispatch.term)
