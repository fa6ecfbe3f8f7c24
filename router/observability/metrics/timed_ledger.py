"""A ledger whose calls are timed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from prometheus_client import Counter, Histogram

from everlift.errors import LedgerUnavailable
from router.event_loop import now
from router.ledger.base import Ledger
from router.observability.metrics.instruments import Instruments


def timed(ledger: Ledger, instruments: Instruments) -> Ledger:
    """The same ledger, of whose calls the instruments hear."""
    return cast("Ledger", _Timed(ledger, instruments))


class _Timed:
    def __init__(self, ledger: Ledger, instruments: Instruments) -> None:
        self._ledger = ledger
        for name, (seconds, failures) in instruments.ledger_calls.items():
            setattr(self, name, partial(self._call, name, seconds, failures))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def _call(
        self, name: str, seconds: Histogram, failures: Counter, *args: object, **kwargs: object
    ) -> object:
        call: Callable[..., Awaitable[object]] = getattr(self._ledger, name)
        began = now()
        try:
            return await call(*args, **kwargs)
        except LedgerUnavailable:
            failures.inc()
            raise
        finally:
            seconds.observe(now() - began)
