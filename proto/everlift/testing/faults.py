"""Faults of a fake router's calls. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from everlift.errors import EverliftError


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fault: the next streaming call, or the next one named ``call``, fails before its first piece.

    With an ``index`` only that request of several fails.
    """

    error: EverliftError
    call: str = ""
    index: int | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Fault at token ``offset`` or at the end of a choice of the request at ``index``."""

    offset: int
    choice: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class Break(_Place):
    """The call breaks before the token of ``choice`` at ``offset``, or before its end."""


@dataclass(frozen=True, slots=True)
class BreakOff(_Place):
    """The call ends before the token of ``choice`` at ``offset`` as if all were said."""


@dataclass(frozen=True, slots=True)
class Hold(_Place):
    """Fault that holds back all pieces from ``offset`` of ``choice`` until the cancellation."""


@dataclass(frozen=True, slots=True)
class Repeat(_Place):
    """The token of ``choice`` at ``offset`` is sent twice."""


@dataclass(frozen=True, slots=True)
class Overlap(_Place):
    """The token of ``choice`` at ``offset`` is sent again in one piece with the next one."""


@dataclass(frozen=True, slots=True)
class Skip(_Place):
    """The token of ``choice`` at ``offset`` is left out."""


Stop = Break | BreakOff | Hold
Fault: TypeAlias = Refuse | Stop | Repeat | Overlap | Skip

#: Calls that take any fault; the others only a Refuse that names them.
STREAMING = frozenset({"Generate", "GenerateMany", "Attach"})


class Script:
    """Faults in order; None, or no more, is a healthy streaming call."""

    def __init__(self, faults: Iterable[Fault | None]) -> None:
        self._faults = deque(faults)

    def next(self, call: str) -> Fault | None:
        """Apply the faults of the next call. Raises the error with which it is refused."""
        fault = self._take(call)
        if isinstance(fault, Refuse) and fault.index is None:
            raise fault.error
        return fault

    def _take(self, call: str) -> Fault | None:
        if not self._faults:
            return None
        first = self._faults[0]
        named = first.call if isinstance(first, Refuse) else ""
        if call == named or (not named and call in STREAMING):
            return self._faults.popleft()
        return None


def strikes(fault: Fault | None, index: int) -> bool:
    """Return whether the fault is for the request at ``index`` of a call."""
    return fault is not None and fault.index == index
