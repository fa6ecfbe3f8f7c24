"""Objects of the memory ledger. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from router.ledger.objects import ObjectConflict, StoredObject, check_object, check_object_name


@dataclass(frozen=True, slots=True)
class _Kept:
    object: StoredObject
    ends: float


class ObjectStore:
    """Objects, each of which is deleted ``retention_s`` seconds after it was last put."""

    def __init__(self, clock: Callable[[], float], retention_s: float) -> None:
        self._clock = clock
        self._retention_s = retention_s
        #: in the order in which the objects expire
        self._objects: OrderedDict[str, _Kept] = OrderedDict()
        #: sorted names of objects, by the part before the last slash
        self._names: dict[str, list[str]] = {}
        self._last_version = 0

    def put(self, name: str, data: bytes, version: int) -> int:
        check_object(name, data)
        known = self.get(name)
        known_version = known.version if known else 0
        if known_version != version:
            raise ObjectConflict(known_version)
        if known is None:
            insort(self._names.setdefault(name.rpartition("/")[0], []), name)
        now = self._clock()
        self._last_version = max(round(now * 1e6), self._last_version + 1)
        kept = StoredObject(bytes(data), self._last_version)
        self._objects[name] = _Kept(kept, now + self._retention_s)
        self._objects.move_to_end(name)
        return self._last_version

    def get(self, name: str) -> StoredObject | None:
        check_object_name(name)
        self._drop_expired()
        kept = self._objects.get(name)
        return kept.object if kept else None

    def delete(self, name: str) -> bool:
        if self.get(name) is None:
            return False
        self._remove(name)
        return True

    def names(self, collection: str, after: str, limit: int) -> tuple[str, ...]:
        self._drop_expired()
        names = self._names.get(collection, [])
        end = bisect_left(names, after) if after else len(names)
        return tuple(reversed(names[max(0, end - limit) : end]))

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._objects:
            name, kept = next(iter(self._objects.items()))
            if kept.ends > now:
                return
            self._remove(name)

    def _remove(self, name: str) -> None:
        del self._objects[name]
        collection = name.rpartition("/")[0]
        names = self._names[collection]
        del names[bisect_left(names, name)]
        if not names:
            del self._names[collection]
