"""Interfaces of the parts of a router that a console shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from everlift.v1 import inference_pb2, session_pb2
from router.admission.workers import WorkerView
from router.console.prompts import Prompts
from router.console.workers import Link


class Sessions(Protocol):
    @property
    def false_alarms(self) -> int: ...

    @property
    def links(self) -> Sequence[Link]: ...


class Counters(Protocol):
    """Counters of requests since this router started."""

    @property
    def completed(self) -> int: ...

    @property
    def failed(self) -> int: ...

    migrated: int
    preempted: int
    moved: int
    recomputed_tokens: int


class Requests(Protocol):
    """Requests of this router."""

    @property
    def counters(self) -> Counters: ...

    @property
    def queue_estimates(self) -> Mapping[str, session_pb2.QueueEstimate]: ...

    def ledger_status(self) -> inference_pb2.LedgerStatus: ...


class Leader(Protocol):
    @property
    def is_leading(self) -> bool: ...

    def view(self, worker_id: str) -> WorkerView | None: ...


class LeaderClient(Protocol):
    """Connection to the leader."""

    queued: int

    @property
    def is_quiet(self) -> bool: ...


class Heartbeat(Protocol):
    leader_id: str


class EffectiveSettings(Protocol):
    """Runtime policy in effect, and names of its settings that differ from the configuration."""

    @property
    def values(self) -> Mapping[str, Any]: ...

    @property
    def overridden(self) -> Iterable[str]: ...


class RuntimePolicy(Protocol):
    @property
    def effective_settings(self) -> EffectiveSettings: ...


class Measured(Protocol):
    """Measurements of this router since its start."""

    def bounds(self, name: str) -> Sequence[float]:
        """Return the upper bounds of the histogram ``name``'s buckets; the last is infinite."""
        ...

    def cumulative(self, name: str) -> Sequence[int]:
        """Return for each bucket of the histogram ``name`` the number of values up to its bound.

        The numbers are cumulative, and summed over all values of the histogram's label: priority
        class or operation of the ledger.
        """
        ...

    def failures(self) -> Mapping[str, int]:
        """Map the slugs (names) of errors to the numbers of requests that ended with them here.

        This includes rejected requests, and requests that continue on another router.
        """
        ...

    def tenant_prompts(self) -> Mapping[str, Prompts]:
        """Return each tenant's prompt tokens and cache hits, as in this router's metrics."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a router, and its features.

    ``models`` are the names of all models, the main one first, and ``chats`` those that have a chat
    template. ``has_chaos``: faults can be injected. ``has_access``: callers need API keys.
    """

    router_id: str
    models: Sequence[str]
    has_chaos: bool
    has_access: bool
    chats: Sequence[str]
