"""Limits of a tenant. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from everlift.checks import check_range
from everlift.errors import OutOfRange
from everlift.messages import MAX_PRIORITY, Submission

#: More than any cluster does; the ledger's scripts count exactly up to there.
_MOST = 10**9
_RANGES = {"max_priority": (-MAX_PRIORITY, MAX_PRIORITY), "weight": (1, 1000)}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant; None is no limit."""

    #: requests that may begin in a minute; as many at once, then evenly
    requests_per_minute: int | None = None
    #: tokens of prompts and outputs in a minute; as many at once, then evenly
    tokens_per_minute: int | None = None
    #: requests that are not at their end, those that wait counted in
    max_concurrent: int | None = None
    #: output tokens that a request may ask for, of all its choices
    max_tokens: int | None = None
    #: the highest class that a request may be of
    max_priority: int | None = None
    #: of what tenants that wait are served, this one gets so many shares
    weight: int = 1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            least, most = _RANGES.get(name, (1, _MOST))
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} must be from {least} to {most}, not {value}")

    @property
    def is_metered(self) -> bool:
        """Return whether a limit applies to all requests together."""
        together = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in together)

    def fitted(self, submission: Submission) -> Submission:
        """Return the same within these limits: tokens that it does not limit are.

        Raises OutOfRange.
        """
        if self.max_priority is not None and submission.priority > self.max_priority:
            raise OutOfRange(
                f"priority {submission.priority} is above this tenant's max_priority, "
                f"{self.max_priority}"
            )
        if self.max_tokens is None:
            return submission
        each = self.max_tokens // submission.n
        if submission.max_tokens is not None or each == 0:
            asked = (submission.max_tokens or 1) * submission.n
            check_range("max_tokens of all choices", asked, 1, self.max_tokens, field="max_tokens")
            return submission
        return replace(submission, max_tokens=each, clamp_max_tokens=True)


NO_LIMITS = Limits()
