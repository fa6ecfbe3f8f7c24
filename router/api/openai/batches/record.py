"""Batch as it is stored in the ledger: its states, times and counts. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from typing_extensions import TypedDict

from everlift.errors import InvalidRequest

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
FINAL: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))
#: Status of a batch whose remaining lines are not to run, by its final status.
Ending = Literal["expired", "cancelled"]
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
#: Maximum time in which a batch must be completed.
_MAX_WINDOW_S = 7 * 86400
#: Maximum number of errors of an input file that are listed.
MAX_ERRORS = 100


class BatchError(TypedDict):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchBody(TypedDict):
    """Batch in the form of OpenAI's API."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: dict[str, Any]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of lines with a result, and of the tokens in their results."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.completed + other.completed,
            self.failed + other.failed,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Batch; times are in seconds since 1970.

    ``runner`` is the id of the router that runs the batch; empty if none does. ``times`` are the
    times at which the batch got its statuses. ``output_file_id`` and ``error_file_id`` are reserved
    when the batch is created, but its files exist only once they have a line.
    """

    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    output_file_id: str
    error_file_id: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    output_expires_s: int | None = None
    status: Status = "validating"
    runner: str = ""
    times: Mapping[str, int] = field(default_factory=dict)
    model: str | None = None
    total: int = 0
    counts: Counts = Counts()
    errors: Sequence[BatchError] = ()

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def expires_at(self) -> int:
        return self.created_at + window_s(self.completion_window)

    def is_same_call(self, other: BatchRecord) -> bool:
        """Return whether ``other`` was created by a call with the same body."""
        return self._body_of_call == other._body_of_call

    @property
    def _body_of_call(self) -> tuple[object, ...]:
        metadata = tuple(sorted(self.metadata.items()))
        window, expires = self.completion_window, self.output_expires_s
        return self.endpoint, self.input_file_id, window, expires, metadata

    def claimed(self, runner: str) -> Self:
        """Return the batch with ``runner`` as the router that runs it."""
        return replace(self, runner=runner)

    def started(self, total: int, model: str | None, now: float) -> Self:
        """Return the batch after the check of its input file, which has ``total`` lines.

        ``model`` is the first model that a line names, or None. The status becomes in_progress,
        unless the batch was cancelled meanwhile.
        """
        checked = replace(self, total=total, model=model)
        # It may have been cancelled in the meantime.
        if self.status != "validating":
            return checked
        return checked._with_status("in_progress", now)

    def rejected(self, errors: Sequence[BatchError], now: float) -> Self:
        """Return the batch after its input file was found to be invalid."""
        return replace(self, errors=tuple(errors[:MAX_ERRORS]))._with_status("failed", now)

    def cancelling(self, now: float) -> Self:
        """Return the batch after its client cancelled it. A batch that has ended is unchanged."""
        if self.is_final or self.status == "cancelling":
            return self
        return self._with_status("cancelling", now)

    def finalizing(self, now: float) -> Self:
        """Return the batch after its last line has ended. A cancelled batch is unchanged."""
        if self.status != "in_progress":
            return self
        return self._with_status("finalizing", now)

    def ended(self, ending: Ending | None, now: float) -> Self:
        """Return the batch after its end; ``ending`` is None if all its lines have run."""
        status: Status = "cancelled" if self.status == "cancelling" else ending or "completed"
        return self._with_status(status, now)

    def counted(self, counts: Counts) -> Self:
        return replace(self, counts=counts)

    def _with_status(self, status: Status, now: float) -> Self:
        times = {**self.times, status: round(now)}
        return replace(self, status=status, times=times)

    def body(self, batch_id: str) -> BatchBody:
        counts, at = self.counts, self.times.get
        errors: BatchErrors | None = None
        if self.errors:
            errors = {"object": "list", "data": list(self.errors)}
        return {
            "id": batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if counts.completed else None,
            "error_file_id": self.error_file_id if counts.failed else None,
            "created_at": self.created_at,
            "in_progress_at": at("in_progress"),
            "expires_at": self.expires_at,
            "finalizing_at": at("finalizing"),
            "completed_at": at("completed"),
            "failed_at": at("failed"),
            "expired_at": at("expired"),
            "cancelling_at": at("cancelling"),
            "cancelled_at": at("cancelled"),
            "request_counts": {
                "total": self.total,
                "completed": counts.completed,
                "failed": counts.failed,
            },
            "usage": counts.usage,
            "metadata": dict(self.metadata),
        }

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        stored = json.loads(data)
        counts, errors = Counts(**stored.pop("counts")), tuple(stored.pop("errors"))
        return cls(**stored, counts=counts, errors=errors)


def window_s(window: str) -> int:
    """Return the seconds of a completion window, such as ``24h``, ``30m`` or ``7d``.

    Raises InvalidRequest if it is malformed or longer than 7 days.
    """
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise InvalidRequest(
            "completion_window must be a number with m, h or d, at most 7d, for example 24h",
            field="completion_window",
        )
    return seconds
