"""Record of a batch: statuses, times and the form of the API."""

from __future__ import annotations

from typing import Any

import pytest

from everlift.errors import InvalidRequest
from router.api.openai.batches.record import MAX_ERRORS, BatchError, BatchRecord, Counts, window_s

NEW = BatchRecord("/v1/completions", "file-i", "24h", 1000, "file-o", "file-e", {"a": "b"})
ERROR: BatchError = {"code": "c", "line": 1, "message": "m", "param": None}


def test_record_is_restored_from_its_bytes() -> None:
    record = NEW.claimed("r").started(5, "m", 1001).counted(Counts(1, 2, 3, 4, 5, 6))
    assert BatchRecord.from_bytes(record.to_bytes()) == record
    failed = NEW.rejected([ERROR], 1002)
    restored = BatchRecord.from_bytes(failed.to_bytes())
    assert restored.body("batch_1") == failed.body("batch_1")


def test_record_passes_through_its_statuses() -> None:
    record = NEW.started(2, "m", 1001).finalizing(1002).ended(None, 1003.4)
    assert record.status == "completed" and record.is_final
    assert record.times == {"in_progress": 1001, "finalizing": 1002, "completed": 1003}
    body = record.counted(Counts(1, 1, 10, 3, 7, 2)).body("batch_1")
    assert (body["output_file_id"], body["error_file_id"]) == ("file-o", "file-e")
    assert body["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert body["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    }
    assert (body["expires_at"], body["model"], body["metadata"]) == (87400, "m", {"a": "b"})


def test_new_record_has_no_files() -> None:
    body = NEW.body("batch_1")
    assert (body["status"], body["output_file_id"], body["errors"]) == ("validating", None, None)


def test_cancelled_record_stays_cancelled() -> None:
    cancelling = NEW.cancelling(1001)
    assert cancelling.started(3, None, 1002).status == "cancelling"
    assert cancelling.finalizing(1002) is cancelling
    assert cancelling.cancelling(1005) is cancelling
    for ending in (None, "expired", "cancelled"):
        ended = cancelling.ended(ending, 1003)  # type: ignore[arg-type]
        assert ended.status == "cancelled" and ended.cancelling(1004) is ended


@pytest.mark.parametrize("ending", ["expired", "cancelled"])
def test_record_ends_for_the_given_reason(ending: Any) -> None:
    assert NEW.started(1, None, 1001).ended(ending, 1002).status == ending


def test_rejected_record_lists_few_errors() -> None:
    record = NEW.rejected([ERROR] * 1000, 1001)
    errors = record.body("batch_1")["errors"]
    assert record.status == "failed" and errors is not None and len(errors["data"]) == MAX_ERRORS


def test_same_call_ignores_what_the_router_chose() -> None:
    again = BatchRecord("/v1/completions", "file-i", "24h", 2000, "file-p", "file-q", {"a": "b"})
    assert NEW.is_same_call(again.claimed("r").started(1, None, 3))
    for change in ({"endpoint": "/v1/responses"}, {"metadata": {}}, {"output_expires_s": 4000}):
        other = BatchRecord(**{**_fields(again), **change})
        assert not NEW.is_same_call(other)


def _fields(record: BatchRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86400), ("1m", 60), ("7d", 604800)])
def test_window_is_a_number_with_a_unit(window: str, seconds: int) -> None:
    assert window_s(window) == seconds


@pytest.mark.parametrize(
    "window",
    ["", "24", "0h", "8d", "169h", "-1h", "1.5h", "24 h", "24h ", "24h\n", "9" * 5000 + "h"],
)
def test_window_is_rejected(window: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        window_s(window)
    assert error.value.field == "completion_window"


def test_counts_add_each_member() -> None:
    assert Counts(1, 2, 3, 4, 5, 6) + Counts(10, 20, 30, 40, 50, 60) == Counts(
        11, 22, 33, 44, 55, 66
    )
