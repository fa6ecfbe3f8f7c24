"""How long a request's clients left unread what they could have read. Pure.

A slow client holds nothing up here: its worker makes tokens on, and the ledger keeps them. So this
is no part of what a request's time went into, and lies beside it.
"""

from __future__ import annotations

from router.gateway.choice import Choice


class Unread:
    """``now`` is the router's clock in seconds. Of several choices any one counts."""

    def __init__(self, earlier_s: float = 0.0) -> None:
        """``earlier_s``: as the gateway before told it."""
        self._seconds = earlier_s
        #: choices with tokens that nobody took, and since when there are any
        self._choices: set[int] = set()
        self._since = 0.0

    def look(self, choice: Choice, now: float) -> None:
        """There is more to read of it, or a client took something."""
        # Twice a token.
        if choice.taken < choice.readable:
            if not self._choices:
                self._since = now
            self._choices.add(choice.index)
        elif choice.index in self._choices:
            self._choices.remove(choice.index)
            if not self._choices:
                self._seconds += now - self._since

    def until(self, now: float) -> float:
        """Seconds in which there was something."""
        going_on_s = max(0.0, now - self._since) if self._choices else 0.0
        return self._seconds + going_on_s
