"""Operations of the ledger that are timed."""

from __future__ import annotations

from router.ledger.base import Ledger
from router.observability.metrics.catalogue import LEDGER_OPERATIONS


def test_timed_operations_are_methods_of_the_ledger() -> None:
    assert [name for name in LEDGER_OPERATIONS if not hasattr(Ledger, name)] == []
