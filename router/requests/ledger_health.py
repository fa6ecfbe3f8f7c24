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
        #: this generation has; and that was found since the last beat
        self._has_lost = self._has_just_lost = False
        self._unfit = ""
        self.memory_used = 0.0
        self.is_away = False
        #: times that it came back without what it had acknowledged
        self.rollbacks = 0

    def answered(self, membership: Membership) -> None:
        self.is_away = False
        self.memory_used = membership.memory_used
        self._unfit = membership.unfit
        if membership.generation != self._generation:
            # What was found before the new one was heard of is its loss already.
            self._generation, self._has_lost = membership.generation, self._has_just_lost
        self._has_just_lost = False

    def failed(self) -> None:
        self.is_away = True

    def lost(self) -> None:
        """It lacks something that it had acknowledged."""
        if not self._has_lost:
            self.rollbacks += 1
            self._has_lost = self._has_just_lost = True

    @property
    def is_fit(self) -> bool:
        """It answers, and promises what it has to."""
        return not self.is_away and not self._unfit

    def check_room(self) -> None:
        """Raises LedgerUnavailable, LedgerFull, where a request cannot begin."""
        if self.is_away:
            raise LedgerUnavailable("the ledger does not answer")
        if self._unfit:
            raise LedgerUnavailable(self._unfit)
        if self.memory_used > self._memory_limit:
            raise LedgerFull(
                f"the ledger uses {self.memory_used:.0%} of its memory", retry_after_s=1.0
            )
