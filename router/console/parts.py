"""What a console looks at: the parts of a router, as far as it needs them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from everlift.v1 import inference_pb2, session_pb2
from router.admission.workers import WorkerView
from router.console.workers import Link


class Sessions(Protocol):
    @property
    def false_alarms(self) -> int: ...

    @property
    def links(self) -> Sequence[Link]: ...


class Counters(Protocol):
    """Since this router started."""

    completed: int
    failed: int
    migrated: int
    preempted: int
    moved: int
    recomputed_tokens: int


class Requests(Protocol):
    """This router's."""

    @property
    def counters(self) -> Counters: ...

    @property
    def outlook(self) -> session_pb2.Outlook: ...

    def ledger_status(self) -> inference_pb2.LedgerStatus: ...


class Leader(Protocol):
    @property
    def is_leading(self) -> bool: ...

    def view(self, worker_id: str) -> WorkerView | None: ...


class Line(Protocol):
    """To the leader."""

    queued: int

    @property
    def is_quiet(self) -> bool: ...


class Fleet(Protocol):
    leader_id: str


class Holding(Protocol):
    """What holds of the queue, and which of it is not as configured."""

    @property
    def values(self) -> Mapping[str, Any]: ...

    @property
    def overridden(self) -> Iterable[str]: ...


class RuntimePolicy(Protocol):
    @property
    def holding(self) -> Holding: ...


class Measured(Protocol):
    """What this router counted since it started."""

    def bounds(self, name: str) -> Sequence[float]:
        """Of a histogram's buckets, the infinite one last."""
        ...

    def cumulative(self, name: str) -> Sequence[int]:
        """By bucket, of all classes together."""
        ...

    def failures(self) -> Mapping[str, int]:
        """Requests by the slug that they ended with."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Of a router. With ``has_access`` callers show keys; with ``has_template`` the model has
    chats."""

    router_id: str
    model: str
    has_chaos: bool
    has_access: bool
    has_template: bool
