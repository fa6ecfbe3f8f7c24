"""Batches as they are stored, and the lines of their input."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everlift.errors import InvalidRequest
from router.api.openai.batches.lines import MAX_LINES, Survey, counts_of, parse_line
from router.api.openai.batches.record import MAX_ERRORS, BatchRecord, Counts, window_s
from tests.support.router.batch_support import ENDPOINT, line

NEW = BatchRecord(ENDPOINT, "file-in", "2h", 1000, "file-out", "file-err", {"a": "b"}, 7200)


def encoded(*lines: Any) -> list[bytes]:
    return [json.dumps(each).encode() for each in lines]


def survey(*lines: Any) -> Survey:
    found = Survey(ENDPOINT)
    found.add(encoded(*lines))
    found.finish()
    return found


def test_record_is_stored_unchanged() -> None:
    record = NEW.claimed("r").started(3, "m", 1001.4).counted(Counts(1, 1, 5, 2, 7, 1))
    assert BatchRecord.from_bytes(record.to_bytes()) == record
    failed = NEW.rejected(survey("x").errors, 1002)
    assert BatchRecord.from_bytes(failed.to_bytes()) == failed


def test_body_shows_times_files_and_counts() -> None:
    body = NEW.body("batch_1")
    assert (body["status"], body["expires_at"]) == ("validating", 1000 + 7200)
    assert body["output_file_id"] is body["error_file_id"] is body["errors"] is None
    record = NEW.started(3, "m", 1001.4).counted(Counts(1, 1, 5, 2, 7, 1)).finalizing(1002)
    body = record.ended("completed", 1003).body("batch_1")
    assert (body["in_progress_at"], body["finalizing_at"], body["completed_at"]) == (
        *(1001, 1002, 1003),
    )
    assert (body["output_file_id"], body["error_file_id"]) == ("file-out", "file-err")
    assert body["usage"]["total_tokens"] == 12


def test_cancelled_batch_stays_cancelled() -> None:
    cancelled = NEW.cancelling(1001)
    assert cancelled.status == "cancelling"
    assert cancelled.started(3, None, 1002).status == "cancelling"
    assert cancelled.finalizing(1003) == cancelled
    assert cancelled.cancelling(1004) == cancelled
    ended = NEW.ended("completed", 1002)
    assert ended.cancelling(1003) == ended


@pytest.mark.parametrize(("window", "seconds"), [("1m", 60), ("24h", 86400), ("7d", 604800)])
def test_window_is_read(window: str, seconds: int) -> None:
    assert window_s(window) == seconds


@pytest.mark.parametrize("window", ["", "24", "0h", "-1h", "8d", "1y", "24 h", "99999m", "\u0661h"])
def test_invalid_window_is_refused(window: str) -> None:
    with pytest.raises(InvalidRequest):
        window_s(window)


def test_survey_counts_lines_and_finds_the_model() -> None:
    found = Survey(ENDPOINT)
    found.add([b"", *encoded(line("a", model="m")), b"  ", *encoded(line("b"))])
    found.finish()
    assert (found.num_lines, found.model, found.errors) == (2, "m", [])


def test_survey_lists_errors_with_their_lines() -> None:
    wrong = survey(line("a"), [1], line("a"), line("", x=1), line("b", background=True))
    assert [(it["code"], it["line"]) for it in wrong.errors] == [
        ("malformed_body", 2),
        ("duplicate_custom_id", 3),
        ("invalid_request", 4),
        ("invalid_request", 5),
    ]
    assert len(survey(*["x"] * 1000).errors) == MAX_ERRORS


def test_survey_limits_the_number_of_lines() -> None:
    found = Survey(ENDPOINT)
    found.add(encoded(*(line(f"{number}") for number in range(MAX_LINES + 2))))
    assert [it["code"] for it in found.errors] == ["too_many_requests"]


def test_parsed_line_has_number_and_body() -> None:
    [data] = encoded(line("a", prompt="x"))
    parsed = parse_line(7, data, ENDPOINT)
    assert (parsed.number, parsed.custom_id, parsed.body) == (7, "a", {"prompt": "x"})


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, Counts(1)),
        ({"prompt_tokens": 3, "completion_tokens": 4}, Counts(1, 0, 3, 0, 4, 0)),
        (
            {
                "input_tokens": 3,
                "input_tokens_details": {"cached_tokens": 1},
                "output_tokens": 4,
                "output_tokens_details": {"reasoning_tokens": 2},
            },
            Counts(1, 0, 3, 1, 4, 2),
        ),
    ],
)
def test_counts_follow_from_the_usage(usage: Any, counts: Counts) -> None:
    response = {"status_code": 200, "body": {"usage": usage}}
    assert counts_of({"response": response}) == counts
    assert counts_of({"response": {"status_code": 400, "body": {}}}) == Counts(failed=1)
    assert counts_of({"response": None}) == Counts(failed=1)
