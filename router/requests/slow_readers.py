"""How long a request's clients left unread what they could have read. Pure.

A slow client holds nothing up here: its worker makes tokens on, and the ledger keeps them. So this
is no part of what a request's time went into, and lies beside it.

Who has read all when more comes is as quick as need be. So nothing is noted of most tokens: a
choice is late when more comes of it, or when somebody asks, and a client has not taken all.
"""

from __future__ import annotations

from math import inf


class Unread:
    """Times are the router's clock in seconds. Of several choices any one counts."""

    def __init__(self, earlier_s: float = 0.0) -> None:
        """``earlier_s``: as the gateway before told it."""
        self._seconds = earlier_s
        #: up to which nothing more can be added to them
        self._counted = -inf
        #: choices that are late, and since when there are any
        self._choices: set[int] = set()
        self._since = inf

    def begin(self, index: int, since: float) -> None:
        """A choice is late, with tokens that could be read since then."""
        self._choices.add(index)
        self._since = min(self._since, max(since, self._counted))

    def end(self, index: int, now: float) -> None:
        """Its client has taken all."""
        self._choices.discard(index)
        if not self._choices:
            self._seconds += max(0.0, now - self._since)
            self._counted, self._since = now, inf

    def until(self, now: float) -> float:
        """Seconds in which there was something."""
        return self._seconds + max(0.0, now - self._since)
