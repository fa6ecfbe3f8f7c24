"""What a gateway has seen of the ledger: whether it answers, how full it is, what it lost."""

from __future__ import annotations

from everlift.errors import LedgerFull, LedgerUnavailable
from router.ledger.base import Membership


class LedgerHealth:
    """Told of each beat of this router, which are its probes too."""

    def __init__(self, memory_limit: float) -> None:
        """``memory_limit`` is the part of its memory bound from which on nothing more is begun."""
        self._memory_limit = memory_limit
        self._generation = ""
        self._has_lost = False
        self.memory_used = 0.0
        self.is_away = False
        #: times that it came back without what it had acknowledged
        self.rollbacks = 0

    def answered(self, membership: Membership) -> None:
        self.is_away = False
        self.memory_used = membership.memory_used
        if membership.generation != self._generation:
            self._generation, self._has_lost = membership.generation, False

    def failed(self) -> None:
        self.is_away = True

    def lost(self) -> None:
        """It lacks something that it had acknowledged."""
        self.rollbacks += not self._has_lost
        self._has_lost = True

    def check_room(self) -> None:
        """Raises LedgerUnavailable, LedgerFull, where a request cannot begin."""
        if self.is_away:
            raise LedgerUnavailable("the ledger does not answer")
        if self.memory_used > self._memory_limit:
            raise LedgerFull(
                f"the ledger uses {self.memory_used:.0%} of its memory", retry_after_s=1.0
            )
