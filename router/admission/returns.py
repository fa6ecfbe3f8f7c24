"""What those find who were refused and come again when they were told to. Pure.

    refused --told a moment--> comes at it --let in, and the leader does not object--> room
                                   |
                                   +--refused again, here or by the leader-----------> none

Whoever is told a moment is told that by then so many requests will have left the queue that there
is room for it. By how much the moment was off is when they had. Whether it finds room is another
question: who comes for the first time may have been quicker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from router.admission.retrying import GIVEN_UP_S, SLACK_S, Told
from router.admission.rooms import Rooms

#: By then the leader has objected to who was let in, if it does, and told of rooms that came since.
_ANSWERED_S = 1.0


class Return(NamedTuple):
    """Who was refused with this slug, and told to come after so long, did so. The moment was off by
    ``off_s``."""

    slug: str
    found_room: bool
    told_s: float
    off_s: float


@dataclass(slots=True)
class _Coming:
    """``moment`` is when it is known what it found."""

    request_id: str
    told: Told
    rooms: float
    moment: float
    is_refused: bool = False


class Returns:
    """``note`` is called with each. ``now`` is in seconds and never goes back."""

    def __init__(self, rooms: Rooms, note: Callable[[Return], None]) -> None:
        self._rooms = rooms
        self._note = note
        self._coming: deque[_Coming] = deque()
        #: by request id, of those that are not refused
        self._let_in: dict[str, _Coming] = {}

    def come(self, request_id: str, told: Told, now: float) -> None:
        """Who comes too soon does not count; neither does who comes late: the queue is another one
        by then."""
        self.look(now)
        if told.rooms is not None and told.due - SLACK_S <= now <= told.due + GIVEN_UP_S:
            coming = _Coming(request_id, told, told.rooms, now + _ANSWERED_S)
            self._coming.append(coming)
            self._let_in[request_id] = coming

    def refused(self, request_id: str) -> None:
        """Here, or by the leader."""
        if (coming := self._let_in.pop(request_id, None)) is not None:
            coming.is_refused = True

    def look(self, now: float) -> None:
        """Whether it is known what those found that came."""
        while self._coming and self._coming[0].moment <= now:
            coming = self._coming.popleft()
            if not coming.is_refused:
                del self._let_in[coming.request_id]
            self._note(self._return(coming, now))

    def _return(self, coming: _Coming, now: float) -> Return:
        slug, at, due, _ = coming.told
        off_s = abs(self._rooms.moment(coming.rooms, at, now) - due)
        return Return(slug, not coming.is_refused, due - at, off_s)
