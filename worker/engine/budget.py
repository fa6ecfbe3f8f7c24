"""How many tokens a step may compute. Pure."""

from __future__ import annotations

#: After so many steps that went well, all that was taken away is given back.
_STEPS_TO_RECOVER = 512


class TokenBudget:
    """What the operator allows, and less for a while after a step for which memory was short: half
    of what that step was to compute, and then slowly more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = most

    @property
    def tokens(self) -> int:
        """At least 1."""
        return self._tokens

    def shrink(self, num_tokens: int) -> None:
        """A step of so many was too large."""
        self._tokens = max(1, num_tokens // 2)

    def recover(self, steps: int = 1) -> None:
        """So many steps went well."""
        more = steps * (1 + self._most // _STEPS_TO_RECOVER)
        self._tokens = min(self._most, self._tokens + more)
