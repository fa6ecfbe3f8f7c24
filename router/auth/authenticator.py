"""Where a caller shows a credential."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from router.auth.caller import ANYONE, Caller


class Door(Protocol):
    def admit(self, headers: Mapping[str, str]) -> Caller:
        """Who comes with these headers; their names are in small letters. Raises
        Unauthenticated."""
        ...


class _OpenDoor:
    def admit(self, headers: Mapping[str, str]) -> Caller:
        return ANYONE


#: Everybody may come in, and do everything.
OPEN: Door = _OpenDoor()
