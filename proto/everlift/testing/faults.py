"""Faults of a fake router's calls. Pure.

A piece is one GenerateResponse of a stream. Without faults, the first piece has no tokens, each
token is a piece of its own, and another piece ends each choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from everlift.errors import EverliftError


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fault with which the next streaming call fails with ``error`` before its first piece.

    A ``call`` is a name such as "Cancel": the next call of this name fails instead. An ``index``
    limits the failure to the request at this index of a GenerateMany.
    """

    error: EverliftError
    call: str = ""
    index: int | None = None


@dataclass(frozen=True, slots=True)
class _AtOffset:
    """Base class of the faults at a position in a choice's output.

    ``offset`` is the offset of a token. For Break, BreakOff and Hold it may also be the number of
    the choice's tokens, which means the end of the choice. A fault at another offset has no effect,
    and neither has an Overlap at the last token. ``choice`` is the index of the choice, and
    ``index`` the index of the request in a GenerateMany.
    """

    offset: int
    choice: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class Break(_AtOffset):
    """Fault that breaks the call, as if the connection were lost, before the piece at ``offset``.

    If ``offset`` is the number of the choice's tokens, the call breaks before the piece that ends
    the choice.
    """


@dataclass(frozen=True, slots=True)
class BreakOff(_AtOffset):
    """Fault that ends the call with status OK before the piece at ``offset``."""


@dataclass(frozen=True, slots=True)
class Hold(_AtOffset):
    """Fault that withholds the piece at ``offset``, and all later pieces of the request's choices.

    The request then fails with Cancelled when a client cancels or forgets it, or with
    DeadlineExceeded when its timeout has passed.
    """


@dataclass(frozen=True, slots=True)
class Repeat(_AtOffset):
    """Fault that sends the token at ``offset`` twice, each time in a piece of its own."""


@dataclass(frozen=True, slots=True)
class Overlap(_AtOffset):
    """Fault that sends the token at ``offset`` again, in one piece with the token after it."""


@dataclass(frozen=True, slots=True)
class Skip(_AtOffset):
    """Fault that leaves out the token at ``offset``."""


Stop = Break | BreakOff | Hold
Fault: TypeAlias = Refuse | Stop | Repeat | Overlap | Skip

#: Names of the calls that take any fault. Other calls take only a Refuse that names them.
STREAMING = frozenset({"Generate", "GenerateMany", "Attach"})


class Script:
    """Faults of the next calls to a fake router, in order.

    A streaming call takes the next element of ``faults``. The call has no fault if this element is
    None, or if no element is left. A Refuse that names a call is taken only by the next call of
    that name, streaming or not. Calls of other names before it have no fault and take no element.
    """

    def __init__(self, faults: Iterable[Fault | None]) -> None:
        self._faults = deque(faults)

    def next(self, call: str) -> Fault | None:
        """Remove and return the fault of a new call with the name ``call``; None if it has none.

        If the fault is a Refuse, raises its error instead, unless its ``index`` is set.
        """
        fault = self._pop(call)
        if isinstance(fault, Refuse) and fault.index is None:
            raise fault.error
        return fault

    def _pop(self, call: str) -> Fault | None:
        if not self._faults:
            return None
        first = self._faults[0]
        named = first.call if isinstance(first, Refuse) else ""
        if call == named or (not named and call in STREAMING):
            return self._faults.popleft()
        return None


def applies_to(fault: Fault | None, index: int) -> bool:
    """Return whether ``fault`` applies to the request at ``index`` of a GenerateMany call."""
    return fault is not None and fault.index == index
