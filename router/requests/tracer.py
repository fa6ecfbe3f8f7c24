"""Who makes traces of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from everlift.trace_context import TraceContext

if TYPE_CHECKING:
    from router.requests.request import LiveRequest


class Tracer(Protocol):
    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        """The span of a request whose call came with this metadata; None: it is in no trace."""
        ...

    def wants(self, trace: TraceContext | None) -> bool:
        """Whether a request of this span is to be told of when it has ended."""
        ...

    def refused(
        self, trace: TraceContext | None, elapsed_s: float, slug: str, x_request_id: str
    ) -> None:
        """A request that was not accepted, so long after its call came."""
        ...

    async def ended(self, live: LiveRequest) -> None:
        """A request that is wanted is at its end, in the ledger too."""
        ...


class _Nobody:
    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        return None

    def wants(self, trace: TraceContext | None) -> bool:
        return False

    def refused(
        self, trace: TraceContext | None, elapsed_s: float, slug: str, x_request_id: str
    ) -> None: ...

    async def ended(self, live: LiveRequest) -> None: ...


#: For a gateway without traces.
NO_TRACES = _Nobody()
