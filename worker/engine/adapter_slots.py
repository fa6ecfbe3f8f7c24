"""Slots of an engine for LoRA adapters that are loaded and unloaded between steps. Pure.

Rank 0 orders a load with ``AdapterLoad``. Every rank then reads its share of the adapter in a
thread. When rank 0 has read its own, it orders all ranks to fill the slot; that happens once all of
them have read theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from everlift.errors import EverliftError
from everlift.v1 import session_pb2


def first_digests(adapters: Mapping[str, str], num_slots: int) -> list[str]:
    """Return the digests of the adapters that fill the slots at the start, in order of the slots.

    ``adapters`` has the digests of the setting ``adapters`` by name. Adapters with the same files
    share a slot.
    """
    return [*dict.fromkeys(adapters.values())][:num_slots]


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Order to empty slot ``slot``, counted from 1, and to read an adapter for it.

    ``source`` is an adapter's name with the directory or hub id of its files (``AdapterSource``),
    and ``digest`` the digest that the files must have. An order without a source only empties the
    slot.
    """

    slot: int
    source: str = ""
    digest: str = ""

    @classmethod
    def from_proto(cls, message: session_pb2.AdapterLoad) -> AdapterLoad:
        return cls(message.slot, message.source, message.digest)

    def to_proto(self) -> session_pb2.AdapterLoad:
        return session_pb2.AdapterLoad(slot=self.slot, source=self.source, digest=self.digest)


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Result of an order: the slot is filled, or is empty because of ``error``.

    ``began`` and ``ended`` are the times of order and result, in seconds of the monotonic clock.
    """

    load: AdapterLoad
    began: float
    ended: float
    error: EverliftError | None = None


class AdapterSlots(Protocol):
    """Slots of one rank. No sequence of the engine may use a slot that an order names."""

    @property
    def is_reading(self) -> bool:
        """Return whether an adapter is read, or waits for its slot to be filled."""
        ...

    def read(self, load: AdapterLoad) -> None:
        """Empty a slot, and begin to read an adapter for it in a thread; return at once."""
        ...

    def read_slots(self) -> list[int]:
        """Return the slots whose adapters this rank has read, or could not read."""
        ...

    def fill(self, slot: int) -> AdapterLoaded | None:
        """Fill a slot, if all ranks have read its adapter; return None if one is still reading.

        A collective: all ranks must call it. If a rank could not read it, the slot stays empty.
        """
        ...
