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

    #: requests per minute: a bucket of this size, which refills evenly within a minute
    requests_per_minute: int | None = None
    #: prompt and output tokens per minute, as a bucket of the same kind
    tokens_per_minute: int | None = None
    #: unfinished requests, including queued ones
    max_concurrent: int | None = None
    #: output tokens of a request, over all its choices
    max_tokens: int | None = None
    #: highest priority class of a request
    max_priority: int | None = None
    #: weight of its share of the served tokens, among the tenants with queued requests
    weight: int = 1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            low, high = _RANGES.get(name, (1, _MAX_LIMIT))
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} must be from {low} to {high}, not {value}")

    @property
    def is_metered(self) -> bool:
        """Return whether any limit applies to the tenant's requests together.

        These are the limits per minute and the limit of concurrent requests.
        """
        together = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in together)

    def fitted(self, submission: Submission) -> Submission:
        """Check a submission against the limits, and return it with ``max_tokens`` set.

        If the submission has no ``max_tokens``, it is the tenant's limit divided by the number of
        choices, and ``clamp_max_tokens`` is set, so that it is lowered to what the context leaves.
        A submission that has it, or whose tenant has no such limit, is returned unchanged. Raises
        OutOfRange if its priority or tokens exceed the tenant's limits.
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
            total_tokens = (submission.max_tokens or 1) * submission.n
            check_range(
                "max_tokens of all choices", total_tokens, 1, self.max_tokens, field="max_tokens"
            )
            return submission
        return replace(submission, max_tokens=each, clamp_max_tokens=True)


NO_LIMITS = Limits()
