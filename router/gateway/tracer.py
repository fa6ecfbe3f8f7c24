"""Who makes traces of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from everlift.trace_context import TraceContext

if TYPE_CHECKING:
    from router.gateway.live import LiveRequest


class Tracer(Protocol):
    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        """The span of a request whose call came with this metadata; None: it is in no trace."""
        ...

    def refused(self, trace: TraceContext | None, model: str, elapsed_s: float, slug: str) -> None:
        """A request that was never accepted, so long after its call came. ``model`` is what its
        client called it."""
        ...

    async def ended(self, live: LiveRequest) -> None:
        """A request that has a journal is at its end, in the ledger too."""
        ...


class _Nobody:
    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        return None

    def refused(
        self, trace: TraceContext | None, model: str, elapsed_s: float, slug: str
    ) -> None: ...

    async def ended(self, live: LiveRequest) -> None: ...


#: For a gateway without traces.
NO_TRACES = _Nobody()
