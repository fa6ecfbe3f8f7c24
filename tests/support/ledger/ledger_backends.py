"""Backends of the model's histories: they create ledgers, make them lose moves, and check keys."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

from redis.asyncio import Redis

from everlift.request_id import tenant_of
from router.ledger.base import Ledger
from router.ledger.config import DEFAULTS, LedgerConfig
from router.ledger.entry import Stored
from router.ledger.memory.memory import MemoryLedger
from router.ledger.prompts import chunk_names, image_names, session_name
from router.ledger.redis import codec, scripts
from router.ledger.redis.redis_ledger import connect
from router.ledger.redis.server import SCHEMA
from router.ledger.redis.shards import Call
from tests.support.ledger.ledger_life import Life
from tests.support.ledger.ledgers import lose_answers

RETENTION_MS = DEFAULTS.retention * 1000


class InMemory:
    """Backend with ledgers in memory.

    A backend creates the machine's ledgers, keeps a state to which they can return, and checks the
    keys that they leave.
    """

    def __init__(self) -> None:
        self._times = count(1)
        self._ledger = MemoryLedger(self._now)
        self._kept: dict[str, Any] = {}

    async def open(self) -> Ledger:
        self._ledger = MemoryLedger(self._now)
        return self._ledger

    def _now(self) -> float:
        """Return a time that never repeats, as on a server."""
        return next(self._times) / 1e6

    async def read(self, request_ids: Sequence[str]) -> list[Stored | None]:
        """Return the stored state of each request, or None if it does not exist."""
        found = [self._ledger._find(request_id) for request_id in request_ids]
        return [record and record.stored((), 0.0) for record in found]

    async def keep(self) -> None:
        self._kept = self._copied(vars(self._ledger))

    async def come_back(self) -> None:
        vars(self._ledger).update(self._copied(self._kept))

    def _copied(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a deep copy of the state, which shares what never changes."""
        records = state["_records"].values()
        frozen = [
            state["_clock"],
            *(it for record in records for it in (record.request, record.entry)),
        ]
        return deepcopy(dict(state), {id(it): it for it in frozen})

    async def finish(self, lives: Mapping[str, Life] | None, objects: Collection[str]) -> None:
        """Do nothing, because there are no keys."""


class OnServer:
    """Backend with ledgers on a server.

    With ``loses_answers``, every answer is lost once, and every move is made twice.
    """

    def __init__(self, url: str, loses_answers: bool = False) -> None:
        # A busy machine must not cause timeouts.
        self._config = LedgerConfig(url=url, timeout=60.0)
        self._loses_answers = loses_answers

    async def open(self) -> Ledger:
        """Return a new ledger with keys of its own."""
        self._config = replace(self._config, key_prefix=secrets.token_hex(8))
        ledger = await connect(self._config)
        self._shards = ledger._shards
        if self._loses_answers:
            lose_answers(ledger)
        return ledger

    async def read(self, request_ids: Sequence[str]) -> list[Stored | None]:
        """Read all requests in one round trip, because this happens after every step."""
        calls = [Call(scripts.READ, 0, [request_id]) for request_id in request_ids]
        answers = await self._shards.run_all(calls)
        return [
            replace(codec.stored(request_id, (), rest), now=0.0) if word == b"ok" else None
            for request_id, (word, *rest) in zip(request_ids, answers, strict=True)
        ]

    @property
    def _root(self) -> str:
        return f"{self._config.key_prefix}:{SCHEMA}:{{0}}:"

    async def keep(self) -> None:
        async with Redis.from_url(self._config.url) as client:
            await copy_keys(client, self._root, f"kept:{self._root}")

    async def come_back(self) -> None:
        async with Redis.from_url(self._config.url) as client:
            await copy_keys(client, f"kept:{self._root}", self._root)

    async def finish(self, lives: Mapping[str, Life] | None, objects: Collection[str]) -> None:
        """Check the keys of the requests and objects, unless ``lives`` is None, and delete them."""
        async with Redis.from_url(self._config.url, decode_responses=True) as client:
            try:
                if lives is not None:
                    await check_keys(client, self._root, lives)
                    await check_objects(client, self._root, objects)
            finally:
                for root in (self._root, f"kept:{self._root}"):
                    await delete_keys(client, root)


async def check_keys(client: Redis, root: str, lives: Mapping[str, Life]) -> None:
    """Check I12 for requests: no key is left over, and each has a time to live.

    A final request's keys expire within the retention, an unfinished one's later.
    """
    keys = await keys_under(client, root)
    assert {key for key in keys if key.startswith(("r:", "t:", "l:", "p:", "e:"))} == {
        key for life in lives.values() for key in keys_of(life)
    }
    for life in lives.values():
        for key in keys_of(life):
            left = await client.pttl(root + key)
            is_final = life.entry.state.is_final
            assert 0 < left <= RETENTION_MS if is_final else left > RETENTION_MS
    for key in keys:
        assert not key.startswith(("f:", "g:")) or await client.pttl(root + key) > 0
    await check_listings(client, root, lives.values())
    await check_chunks(client, root, lives.values())
    unfinished = [life.entry for life in lives.values() if not life.entry.state.is_final]
    owners = {entry.gateway for entry in unfinished}
    assert {key for key in keys if key.startswith("owned:")} == {f"owned:{g}" for g in owners}
    assert await client.smembers(f"{root}owners") == owners
    for gateway in owners:
        owned = await client.smembers(f"{root}owned:{gateway}")
        assert owned == {entry.request_id for entry in unfinished if entry.gateway == gateway}


async def check_objects(client: Redis, root: str, objects: Collection[str]) -> None:
    """Check I12 for objects: each has a time to live, and the listings have exactly these."""
    assert {*await keys_under(client, f"{root}o:")} == {*objects}
    for name in objects:
        assert 0 < await client.pttl(f"{root}o:{name}") <= RETENTION_MS
    assert {*await client.zrange(f"{root}object_expiries", 0, -1)} == {*objects}
    listed = {
        (collection, name)
        for collection in await keys_under(client, f"{root}objects:")
        for name in await client.zrange(f"{root}objects:{collection}", 0, -1)
    }
    assert listed == {(name.rpartition("/")[0], name) for name in objects}


async def check_chunks(client: Redis, root: str, lives: Collection[Life]) -> None:
    chains = {life.entry.request_id: chunk_names(life.request) for life in lives}
    images = {life.entry.request_id: image_names(life.request) for life in lives}
    assert await client.hgetall(f"{root}tails") == {
        request_id: "".join((*chain[-1:], *images[request_id]))
        for request_id, chain in chains.items()
        if chain or images[request_id]
    }
    references = Counter(chain[-1] for chain in chains.values() if chain)
    references.update(name for names in images.values() for name in names)
    followers = {pair for chain in chains.values() for pair in pairwise(chain)}
    references.update(before for before, _ in followers)
    names = await keys_under(client, f"{root}c:")
    assert references == {
        name: int(await client.getrange(f"{root}c:{name}", 0, 7)) for name in names
    }


async def check_listings(client: Redis, root: str, lives: Collection[Life]) -> None:
    entries = [life.entry for life in lives]
    listings = {"arrivals": {entry.request_id: entry.arrived for entry in entries}}
    sessions = {}
    for life in lives:
        entry, tenant = life.entry, tenant_of(life.entry.request_id)
        if tenant:
            listings.setdefault(f"arrivals:{tenant}", {})[entry.request_id] = entry.arrived
        if name := session_name(tenant, life.request.session_id):
            sessions[entry.request_id] = name
            listings.setdefault(f"session:{name}", {})[entry.request_id] = entry.arrived
    assert await client.hgetall(f"{root}sessions") == sessions
    assert {*await client.zrange(f"{root}expiries", 0, -1)} == {it.request_id for it in entries}
    for kind in ("arrivals", "session"):
        for key in await keys_under(client, f"{root}{kind}"):
            if not (kind == "session" and key == "s"):
                listings.setdefault(f"{kind}{key}", {})
    for key, listed in listings.items():
        scores = await client.zrange(root + key, 0, -1, withscores=True)
        assert {name: score / 1e6 for name, score in scores} == listed


def keys_of(life: Life) -> set[str]:
    request_id, numbers = life.entry.request_id, range(life.request.n)
    always = {f"r:{request_id}", f"e:{request_id}"} | {f"t:{request_id}:{n}" for n in numbers}
    if not codec.has_logprobs(life.request):
        return always
    return {f"p:{request_id}"} | always | {f"l:{request_id}:{n}" for n in numbers}


async def keys_under(client: Redis, root: Any) -> list[Any]:
    """Return the keys that begin with ``root``, without this prefix."""
    return [key[len(root) :] async for key in client.scan_iter(f"{root}*", count=1000)]


async def delete_keys(client: Redis, root: str) -> None:
    if keys := await keys_under(client, root):
        await client.delete(*(root + key for key in keys))


async def copy_keys(client: Redis, source: str, target: str) -> None:
    """Copy keys with their times to live; earlier keys under ``target`` are deleted."""
    pipeline = client.pipeline(transaction=False)
    for key in [key.decode() for key in await keys_under(client, target)]:
        pipeline.delete(target + key)
    for key in [key.decode() for key in await keys_under(client, source)]:
        pipeline.copy(source + key, target + key)
    await pipeline.execute()
