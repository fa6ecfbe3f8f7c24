"""Slots of an engine for LoRA adapters that are loaded and unloaded between steps. Pure.

Rank 0 orders a load with ``AdapterLoad``. Every rank then reads its share of the adapter in a
thread. Rank 0, once it has read its own share, orders all ranks to fill the slot. Rank 0 repeats
this second order until all ranks have read their shares; the slot is filled then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from everlift.errors import EverliftError
from everlift.v1 import session_pb2


def first_digests(adapters: Mapping[str, str], num_slots: int) -> list[str]:
    """Return the digests of the adapters that fill the slots at the start, in order of the slots.

    ``adapters`` maps the name of each adapter in the setting ``adapters`` to the digest of its
    files. Adapters with the same digest share a slot. The result has at most ``num_slots`` digests.
    """
    return [*dict.fromkeys(adapters.values())][:num_slots]


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Order to empty slot ``slot``, counted from 1, and to read an adapter for it.

    ``source`` is an ``AdapterSource`` as text: NAME=DIRECTORY, NAME=ID or NAME=ID@REVISION,
    where ID is a hub id. ``digest`` is the digest that the adapter's files must have. An order
    without a source only empties the slot.
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
    """Result of an order to load an adapter: the slot is filled, or empty because of ``error``.

    ``load`` is the order. ``began`` is the time when the rank received it and began to read the
    adapter, ``ended`` the time of this result. Times are in seconds of the monotonic clock.
    """

    load: AdapterLoad
    began: float
    ended: float
    error: EverliftError | None = None


class AdapterSlots(Protocol):
    """Slots of one rank. No sequence of the engine may use a slot that an order names."""

    @property
    def is_reading(self) -> bool:
        """Return whether an adapter is being read, or a slot waits to be filled."""
        ...

    def read(self, load: AdapterLoad) -> None:
        """Empty a slot, and begin to read an adapter for it in a thread; return at once."""
        ...

    def read_slots(self) -> list[int]:
        """Return the slots to fill, whose adapters this rank has read or could not read."""
        ...

    def fill(self, slot: int) -> AdapterLoaded | None:
        """Fill a slot with the adapter read for it; return None if a rank is still reading.

        All ranks must call this method together, for a slot in ``read_slots`` of rank 0. The slot
        stays empty on all ranks, and the result has an error, if any rank could not read or place
        the adapter.
        """
        ...
