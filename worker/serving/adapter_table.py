"""Slots of a worker for LoRA adapters: which adapter each has, and which sequences use it. Pure.

The digest of an adapter's files identifies a version of the adapter. A sequence uses the slot of
its version from its arrival at the worker until its end, and the slot keeps the version meanwhile.
A version without a slot takes an empty slot, or replaces the unused version whose last use is
longest ago. The version waits if all slots are in use; waiting versions get slots in the order in
which they began to wait.

One slot is closed for each waiting version. New sequences for the version in a closed slot wait as
well, and their version queues behind the versions that already wait. The closed slot becomes unused
when its present sequences have ended. No version thus waits forever while others are in constant
use. New sequences that lack the version's source are an exception: they use the closed slot and
prolong its use, because the version could not be loaded again for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from everlift.adapters import AdapterSource
from everlift.v1 import session_pb2
from worker.engine.adapter_slots import AdapterLoad, AdapterLoaded
from worker.engine.outcome import SequenceKey

#: Weight of the last load in the mean time of a load.
_NEW_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """Version of an adapter; ``source`` is where it is loaded from.

    A version whose source is unknown (empty) can be used only while it is loaded.
    """

    name: str
    digest: str
    source: str = ""


@dataclass(slots=True)
class _Slot:
    number: int
    version: AdapterVersion | None = None
    is_loading: bool = False
    #: the slot is emptied when no sequence uses it
    is_leaving: bool = False
    is_closed: bool = False
    last_use: int = 0
    users: set[SequenceKey] = field(default_factory=set)

    @property
    def is_unused(self) -> bool:
        return not self.users and not self.is_loading

    def assign(self, version: AdapterVersion | None, users: Iterable[SequenceKey] = ()) -> None:
        self.version, self.users = version, {*users}
        self.is_loading = version is not None
        self.is_leaving = self.is_closed = False


@dataclass(slots=True)
class _Waiting:
    version: AdapterVersion
    users: set[SequenceKey] = field(default_factory=set)


class AdapterTable:
    """Slots of one worker; ``loaded`` are the versions that fill the first slots at the start.

    Methods that change a slot add orders for the engine to ``orders``, and sequences whose version
    is loaded now to ``ready``. The caller takes both.
    """

    def __init__(self, num_slots: int, loaded: Iterable[AdapterVersion] = ()) -> None:
        self._slots = [_Slot(number) for number in range(1, num_slots + 1)]
        for slot, version in zip(self._slots, loaded, strict=False):
            slot.version = version
        self._waiting: dict[str, _Waiting] = {}
        self._num_uses = 0
        self._load_s = 0.0
        self._loads = self._unloads = 0
        self.orders: list[AdapterLoad] = []
        self.ready: list[SequenceKey] = []

    def has(self, digest: str) -> bool:
        """Return whether a version is loaded, or is about to be."""
        return self._slot_of(digest) is not None or digest in self._waiting

    def use(self, key: SequenceKey, version: AdapterVersion) -> bool:
        """Count a new sequence as a user of a version; return whether the version is loaded.

        Otherwise the sequence must not start before ``ready`` has it.
        """
        slot = self._slot_of(version.digest)
        if slot is not None and not (slot.is_closed and version.source):
            slot.users.add(key)
            return not slot.is_loading
        self._waiting.setdefault(version.digest, _Waiting(version)).users.add(key)
        self._assign()
        if key in self.ready:
            self.ready.remove(key)
            return True
        return False

    def release(self, key: SequenceKey) -> None:
        """Stop counting a sequence, which has ended or was aborted; ignore an unknown one."""
        self._num_uses += 1
        for slot in self._slots:
            if key in slot.users:
                slot.users.remove(key)
                slot.last_use = self._num_uses
        for digest, waiting in [*self._waiting.items()]:
            waiting.users.discard(key)
            if not waiting.users:
                del self._waiting[digest]
        self._assign()

    def preload(self, version: AdapterVersion) -> None:
        """Load a version that no sequence uses yet, unless all slots are in use.

        A loaded version stays in its slot, even if ``unload`` was called before.
        """
        if (own := self._slot_of(version.digest)) is not None:
            own.is_leaving = False
        elif version.digest not in self._waiting and (slot := self._vacant()) is not None:
            self._load(slot, version, ())

    def unload(self, digest: str) -> None:
        """Empty the slot of a version as soon as no sequence uses it."""
        if (slot := self._slot_of(digest)) is not None:
            slot.is_leaving = True
            self._assign()

    def finish(self, loaded: AdapterLoaded) -> list[SequenceKey]:
        """Note the result of a load; return the keys of the sequences that cannot start.

        The list has all sequences that use the slot if the load failed, and is empty otherwise.
        """
        slot = self._slots[loaded.load.slot - 1]
        slot.is_loading = False
        users = sorted(slot.users)
        if loaded.error is not None:
            slot.assign(None)
            self._assign()
            return users
        seconds = loaded.ended - loaded.began
        share = _NEW_SHARE if self._loads else 1.0
        self._load_s += share * (seconds - self._load_s)
        self._loads += 1
        self.ready += users
        self._assign()
        return []

    def to_proto(self) -> session_pb2.LoadedAdapters:
        return session_pb2.LoadedAdapters(
            adapters=[
                session_pb2.LoadedAdapter(
                    name=slot.version.name,
                    digest=slot.version.digest,
                    sequences=len(slot.users),
                    loading=slot.is_loading,
                )
                for slot in self._slots
                if slot.version is not None
            ],
            load_s=self._load_s,
            loads=self._loads,
            unloads=self._unloads,
        )

    def _slot_of(self, digest: str) -> _Slot | None:
        return next((it for it in self._slots if it.version and it.version.digest == digest), None)

    def _vacant(self) -> _Slot | None:
        """Return the slot to load a version into; None if all are in use."""
        unused = [slot for slot in self._slots if slot.is_unused]
        return min(unused, key=lambda it: (it.version is not None, it.last_use), default=None)

    def _assign(self) -> None:
        """Empty the unused slots that ``unload`` marked, then give slots to waiting versions.

        Slots are closed or reopened afterwards, for the versions that still wait.
        """
        for slot in self._slots:
            if slot.is_leaving and slot.is_unused:
                self._unloads += 1
                slot.assign(None)
                self.orders.append(AdapterLoad(slot.number))
        while self._waiting:
            digest, waiting = next(iter(self._waiting.items()))
            if (own := self._slot_of(digest)) is not None:
                own.is_closed = False
                own.users |= waiting.users
                self.ready += [] if own.is_loading else sorted(waiting.users)
            elif (vacant := self._vacant()) is not None:
                self._load(vacant, waiting.version, waiting.users)
            else:
                break
            del self._waiting[digest]
        self._close()

    def _load(self, slot: _Slot, version: AdapterVersion, users: Iterable[SequenceKey]) -> None:
        self._unloads += slot.version is not None
        slot.assign(version, users)
        source = AdapterSource.parse(version.source)
        self.orders.append(AdapterLoad(slot.number, str(source), version.digest))

    def _close(self) -> None:
        """Close one slot for each waiting version, or reopen all slots if no version waits.

        Slots that are already closed are included in the count. Open slots with the fewest
        sequences are closed first.
        """
        closed = [slot for slot in self._slots if slot.is_closed]
        if not self._waiting:
            for slot in closed:
                slot.is_closed = False
        others = sorted(
            (slot for slot in self._slots if not slot.is_closed and slot.version),
            key=lambda it: (len(it.users), it.last_use),
        )
        for slot in others[: max(0, len(self._waiting) - len(closed))]:
            slot.is_closed = True
