"""Audit of a ledger in Redis or Valkey: its keys are found with SCAN, and examined by audit.lua."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from router.ledger.entry import State
from router.ledger.listing import Audited, Chunk, Claim, Item, Listed, Stray
from router.ledger.redis import codec, scripts
from router.ledger.redis.channel import Argument
from router.ledger.redis.connections import Command
from router.ledger.redis.shards import Shards

T = TypeVar("T")

#: Approximate number of keys or members that one SCAN returns.
_KEYS_PER_SCAN = 512
#: Number of items that one call examines. The call blocks other calls for some tenths of a
#: millisecond.
_PLACES_PER_CALL = 32
#: Functions that read the request id from the rest of a key's name, by the name's first letter.
_PARTS: dict[str, Callable[[str], str]] = {
    "t": lambda rest: rest.rpartition(":")[0],
    "l": lambda rest: rest.rpartition(":")[0],
    "p": str,
    "e": str,
}


class _Place(NamedTuple):
    """Item that audit.lua examines: it concerns the request ``request_id``, or is a chunk.

    ``shard`` is the number of a chunk's shard. ``kind`` is a letter:

        r    the request; ``name`` is empty
        s    the request's key ``name``
        o    the request's id in the set of unfinished requests of the router ``name``
        a    the request's id in the listing of a tenant or session in the key ``name``
        c    the chunk or image whose name is ``request_id``
    """

    kind: str
    request_id: str
    name: str = ""
    shard: int = -1


class RedisAudit:
    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._numbers = {shards.key("", number): number for number in range(len(shards))}

    async def items(self) -> AsyncIterator[Item]:
        requests: set[_Place] = set()
        async for keys in self._keys():
            # SCAN may return a key twice.
            found = {place async for place in self._places(keys)} - requests
            requests |= {place for place in found if place.kind == "r"}
            for item in await self._examine(sorted(found)):
                yield item

    async def reread(self, items: Sequence[Item]) -> list[Item]:
        return await self._examine([_place(item) for item in items])

    async def _keys(self) -> AsyncIterator[list[str]]:
        root = self._shards.key("")
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", root[: root.index("{")]) + "{*}:*"
        for server in await self._shards.servers():
            command: list[Argument] = ["SCAN", 0, "MATCH", pattern, "COUNT", _KEYS_PER_SCAN]
            async for keys in self._scanned(server, command):
                yield [key.decode() for key in keys]

    async def _places(self, keys: Sequence[str]) -> AsyncIterator[_Place]:
        for key in keys:
            name = key[key.index("}:") + 2 :]
            kind, _, rest = name.partition(":")
            if kind == "r":
                yield _Place("r", rest)
            elif kind in _PARTS:
                yield _Place("s", _PARTS[kind](rest), name)
            elif kind == "owned":
                async for request_id in self._members("SSCAN", key):
                    yield _Place("o", request_id, rest)
            elif kind == "c":
                yield _Place("c", rest, "", self._numbers[key[: -len(name)]])
            elif kind in ("arrivals", "session") and rest:
                async for request_id in self._members("ZSCAN", key):
                    yield _Place("a", request_id, name)

    async def _members(self, scan: str, key: str) -> AsyncIterator[str]:
        root = key[: key.index("}:") + 2]
        command: list[Argument] = [scan, key, 0, "COUNT", _KEYS_PER_SCAN]
        async for found in self._scanned(root, command):
            for member in found:
                # ZSCAN returns pairs of a member and its score.
                yield (member[0] if scan == "ZSCAN" else member).decode()

    async def _scanned(self, server: str, command: list[Argument]) -> AsyncIterator[list[Any]]:
        at = command.index(0)
        while True:
            [(cursor, found)] = await self._shards.run_commands(
                "audit", Command(server, tuple(command))
            )
            yield found
            command[at] = cursor
            if int(cursor) == 0:
                return

    async def _examine(self, places: Iterable[_Place]) -> list[Item]:
        by_shard: dict[int, list[_Place]] = {}
        for place in places:
            shard = self._shards.of(place.request_id) if place.kind != "c" else place.shard
            by_shard.setdefault(shard, []).append(place)
        found: list[Item] = []
        for shard, places_of_shard in by_shard.items():
            for batch in _batches(places_of_shard, _PLACES_PER_CALL):
                arguments = [field for place in batch for field in place[:3]]
                answers = await self._shards.run(scripts.AUDIT, shard, *arguments)
                for place, answer in zip(batch, answers, strict=True):
                    if answer is not None:
                        found.append(_item(place, answer))
        return found


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _place(item: Item) -> _Place:
    match item:
        case Audited():
            return _Place("r", item.request_id)
        case Stray():
            return _Place("s", item.request_id, item.key)
        case Claim():
            return _Place("o", item.request_id, item.gateway)
        case Listed():
            name = f"arrivals:{item.tenant}" if item.tenant else f"session:{item.session}"
            return _Place("a", item.request_id, name)
        case Chunk():
            return _Place("c", item.name, "", item.shard)


def _item(place: _Place, answer: Any) -> Item:
    if place.kind == "s":
        return Stray(place.request_id, place.name)
    if place.kind == "o":
        state, owner = (field.decode() for field in answer)
        return Claim(place.request_id, place.name, State(state) if state else None, owner)
    if place.kind == "a":
        kind, _, whose = place.name.partition(":")
        tenant, session = ("", whose) if kind == "session" else (whose, "")
        return Listed(place.request_id, tenant, answer == 1, session)
    if place.kind == "c":
        return Chunk(place.shard, place.request_id, is_linked=answer == 1)
    fields, max_tokens, finished_by, owned, listed, events, immortal, missing = answer
    return Audited(
        entry=codec.entry(place.request_id, fields),
        max_tokens=int(max_tokens),
        finished_by=int(finished_by),
        events=tuple(map(codec.event, events)),
        owned=owned == 1,
        listed=listed == 1,
        immortal=tuple(name.decode() for name in immortal),
        missing=tuple(name.decode() for name in missing),
    )
