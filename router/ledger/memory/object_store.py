"""Objects of the memory ledger. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from router.ledger.objects import ObjectConflict, StoredObject, check_object, check_object_name


@dataclass(frozen=True, slots=True)
class _Kept:
    object: StoredObject
    ends: float


class ObjectStore:
    """Objects, each of which is deleted ``retention_s`` seconds after it was last put."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._objects: dict[str, _Kept] = {}
        #: sorted times at which the objects are deleted, with their names
        self._ends: list[tuple[float, str]] = []
        #: sorted names of objects, by the part before the last slash
        self._names: dict[str, list[str]] = {}
        self._last_version = 0

    def put(self, name: str, data: bytes, version: int, retention_s: float) -> int:
        check_object(name, data)
        known = self.get(name)
        known_version = known.version if known else 0
        if known_version != version:
            raise ObjectConflict(known_version)
        if known is not None:
            self._remove(name)
        insort(self._names.setdefault(name.rpartition("/")[0], []), name)
        now = self._clock()
        self._last_version = max(round(now * 1e6), self._last_version + 1)
        kept = StoredObject(bytes(data), self._last_version)
        self._objects[name] = _Kept(kept, now + retention_s)
        insort(self._ends, (now + retention_s, name))
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
        while self._ends and self._ends[0][0] <= now:
            self._remove(self._ends[0][1])

    def _remove(self, name: str) -> None:
        ends = self._objects.pop(name).ends
        del self._ends[bisect_left(self._ends, (ends, name))]
        collection = name.rpartition("/")[0]
        names = self._names[collection]
        del names[bisect_left(names, name)]
        if not names:
            del self._names[collection]
