"""Mutants of prefix-cache-aware dispatch that its tests must detect."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.admission.model_queue import ModelQueue
from router.admission.parking import Parking
from router.admission.prefix_index import PrefixIndex
from tests.unit.router.admission import test_locality, test_prefix_index


@pytest.mark.parametrize(
    ("part", "method", "wrong", "test"),
    [
        pytest.param(
            Parking,
            "expire",
            lambda self, now: iter(()),
            test_locality.test_wait_for_a_prefix_ends_at_its_saving,
            id="no expiry",
        ),
        pytest.param(
            Parking,
            "expire",
            lambda self, now: iter(()),
            test_locality.test_credit_is_never_idle_after_a_wait_has_ended,
            id="no expiry, in any history",
        ),
        pytest.param(
            ModelQueue,
            "_place_parked",
            lambda self, now, ledger_now, limit, make_epoch: [],
            test_locality.test_credit_is_never_idle_after_a_wait_has_ended,
            id="waiting requests are not placed",
        ),
        pytest.param(
            Parking,
            "ahead",
            lambda self, worker_id: (0, 0),
            test_locality.test_wait_for_a_prefix_includes_earlier_waits,
            id="no count of the requests that wait",
        ),
        pytest.param(
            PrefixIndex,
            "settle",
            lambda self, worker_id, epoch: None,
            test_prefix_index.test_prefix_index_expects_chunks_until_prefilled,
            id="no confirmation",
        ),
    ],
)
def test_locality_fault_is_noticed(
    part: type,
    method: str,
    wrong: Callable[..., object],
    test: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test()
    monkeypatch.setattr(part, method, wrong)
    with pytest.raises(AssertionError):
        test()
