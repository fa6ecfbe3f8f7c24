"""Limits of a tenant. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from everlift.checks import check_range
from everlift.errors import OutOfRange
from everlift.messages import MAX_PRIORITY, Submission

#: Maximum of a limit: more than any cluster serves, and small enough for the ledger's scripts to
#: count exactly.
_MAX_LIMIT = 10**9
_RANGES = {"max_priority": (-MAX_PRIORITY, MAX_PRIORITY), "weight": (1, 1000)}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant; None means no limit."""

    #: requests per minute: size of a token bucket that refills evenly within a minute
    requests_per_minute: int | None = None
    #: prompt and output tokens per minute: size of a bucket of the same kind
    tokens_per_minute: int | None = None
    #: unfinished requests, including queued ones
    max_concurrent: int | None = None
    #: output tokens of a request, over all its choices
    max_tokens: int | None = None
    #: highest priority class of a request
    max_priority: int | None = None
    #: weight of the tenant's share of the served tokens, relative to other tenants with queued
    #: requests
    weight: int = 1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            low, high = _RANGES.get(name, (1, _MAX_LIMIT))
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} must be from {low} to {high}, not {value}")

    @property
    def is_metered(self) -> bool:
        """Return whether a limit applies to the sum of the tenant's requests.

        Such limits are the limits per minute and the limit of concurrent requests.
        """
        together = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in together)

    def fitted(self, submission: Submission) -> Submission:
        """Check a submission against the limits, and return it with the tenant's ``max_tokens``.

        If the submission has ``max_tokens``, or the tenant has no such limit, it is returned
        unchanged. Otherwise ``max_tokens`` becomes the tenant's limit divided by the number of
        choices. ``clamp_max_tokens`` is then set as well, so that ``max_tokens`` is later lowered
        to the tokens that the prompt leaves in the context. Raises OutOfRange if the submission's
        priority or tokens exceed the tenant's limits.
        """
        if self.max_priority is not None and submission.priority > self.max_priority:
            raise OutOfRange(
                f"priority {submission.priority} is above this tenant's max_priority, "
                f"{self.max_priority}"
            )
        if self.max_tokens is None:
            return submission
        max_tokens_each = self.max_tokens // submission.n
        if submission.max_tokens is not None or max_tokens_each == 0:
            total_tokens = (submission.max_tokens or 1) * submission.n
            check_range(
                "max_tokens of all choices", total_tokens, 1, self.max_tokens, field="max_tokens"
            )
            return submission
        return replace(submission, max_tokens=max_tokens_each, clamp_max_tokens=True)


NO_LIMITS = Limits()
