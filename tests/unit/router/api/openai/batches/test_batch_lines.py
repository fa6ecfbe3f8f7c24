"""Lines of a batch: input files, and results in the output file."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest

from everlift.errors import InvalidRequest, OutOfRange
from router.api.openai.batches import lines
from router.api.openai.batches.lines import (
    Answer,
    Line,
    Survey,
    answered,
    counts_of,
    parse_line,
    parse_lines,
    unanswered,
)
from router.api.openai.batches.record import MAX_ERRORS, Counts
from router.api.openai.files.record import LineSplitter
from tests.support.router.batch_client import line
from tests.support.router.batch_routers import ENDPOINT, input_lines

LINE = Line(3, "c", {})


def survey(*given: Any) -> Survey:
    survey = Survey(ENDPOINT)
    survey.add(each if isinstance(each, bytes) else json.dumps(each).encode() for each in given)
    survey.finish()
    return survey


def test_parse_line_returns_the_request() -> None:
    data = json.dumps(line("a", prompt="b")).encode()
    parsed = parse_line(7, data, ENDPOINT)
    assert parsed == Line(7, "a", {"prompt": "b"}, len(data))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"custom_id": ""}, "custom_id"),
        ({"custom_id": "é" * 257}, "custom_id"),
        ({"custom_id": 1}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "/v1/chat/completions"}, "url"),
        ({"body": {"stream": True}}, "body.stream"),
        ({"body": {"background": True}}, "body.background"),
        ({"body": [1]}, "body"),
        ({"extra": 1}, "extra"),
    ],
)
def test_parse_line_names_the_invalid_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_line(1, json.dumps(line("a") | change).encode(), ENDPOINT)
    assert error.value.field == field


@pytest.mark.parametrize(
    "data", [b"[]", b"{", b"\xff{}", b'{"a": NaN}', b'{"custom_id": "\\ud800"}', b"[" * 1000]
)
def test_parse_line_rejects_malformed_json(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_line(1, data, ENDPOINT)


def test_parse_lines_numbers_lines_and_omits_some() -> None:
    group = input_lines(["a", "b", "c"]).split(b"\n")
    found = parse_lines(10, [b"", group[0], b" \r", *group[1:]], ENDPOINT, {"b"})
    assert [(it.number, it.custom_id) for it in found] == [(11, "a"), (14, "c")]


def test_survey_counts_lines_and_finds_the_model() -> None:
    found = survey(line("a"), b"", line("b", model="m"), b"  ", line("c", model="n"))
    assert (found.num_lines, found.model, found.errors) == (3, "m", [])


def test_survey_lists_errors_by_line() -> None:
    found = survey(line("a"), b"", b"{", line("b") | {"method": 1}, line("a"), line("c"))
    assert [(it["line"], it["code"], it["param"]) for it in found.errors] == [
        (3, "malformed_body", None),
        (4, "invalid_request", "method"),
        (5, "duplicate_custom_id", "custom_id"),
    ]


def test_survey_stops_after_many_errors() -> None:
    assert len(survey(*[b"{"] * 1000).errors) == MAX_ERRORS


def test_survey_stops_after_too_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 100)
    found = survey(*input_lines(map(str, range(1000))).splitlines())
    [error] = found.errors
    assert (error["code"], error["line"]) == ("too_many_requests", 101)
    assert found.num_lines == 101
    assert not survey(*input_lines(map(str, range(100))).splitlines()).errors


def test_line_of_an_answer_is_one_line_for_all_readers() -> None:
    body = {"text": "a\x85b\u2028c\u2029d\n\x1e", "usage": {}}
    encoded = json.dumps(body, ensure_ascii=False).encode()
    data = answered("batch_7", LINE, Answer(200, encoded, "batch_7-3")).data
    [text] = data.decode().splitlines()
    assert json.loads(text) == {
        "id": "batch_req_7_3",
        "custom_id": "c",
        "response": {"status_code": 200, "request_id": "batch_7-3", "body": body},
        "error": None,
    }


@pytest.mark.parametrize(
    ("status", "body", "counts"),
    [
        (
            200,
            {
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 3,
                    "prompt_tokens_details": {"cached_tokens": 4},
                    "completion_tokens_details": {"reasoning_tokens": 2},
                }
            },
            Counts(1, 0, 5, 4, 3, 2),
        ),
        (
            200,
            {
                "usage": {
                    "input_tokens": 5,
                    "output_tokens": 3,
                    "input_tokens_details": {"cached_tokens": 4},
                    "output_tokens_details": {"reasoning_tokens": 2},
                }
            },
            Counts(1, 0, 5, 4, 3, 2),
        ),
        (200, {"usage": None}, Counts(1)),
        (429, {"error": {}}, Counts(0, 1)),
    ],
)
def test_counts_are_equal_after_a_reload(status: int, body: Any, counts: Counts) -> None:
    result = answered("batch_7", LINE, Answer(status, json.dumps(body).encode(), "r"))
    assert result.counts == counts == counts_of(json.loads(result.data))


def test_line_without_an_answer_counts_as_failed() -> None:
    result = unanswered("batch_7", LINE, "batch_expired", "late")
    assert json.loads(result.data)["error"] == {"code": "batch_expired", "message": "late"}
    assert result.counts == Counts(failed=1) == counts_of(json.loads(result.data))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_splitter_returns_lines_for_every_cut(size: int) -> None:
    content = b"a\nbc\n\n\ndef\r\ng"
    splitter, found = LineSplitter(5), list[bytes]()
    for start in range(0, len(content), size):
        found += splitter.feed(content[start : start + size])
    assert [*found, splitter.rest] == content.split(b"\n")


@pytest.mark.parametrize("size", [1, 4, 100])
def test_splitter_rejects_a_long_line(size: int) -> None:
    content = b"abcde\n" + b"x" * 6
    splitter = LineSplitter(5)
    with pytest.raises(OutOfRange):
        for start in range(0, len(content), size):
            splitter.feed(content[start : start + size])


def test_splitter_is_linear_in_a_long_line() -> None:
    splitter, part = LineSplitter(1 << 30), b"x" * 100
    begun = time.process_time()
    for _ in range(50_000):
        splitter.feed(part)
    assert time.process_time() - begun < 1.0
    assert len(splitter.feed(b"\n")[0]) == 5_000_000


def test_survey_of_an_invalid_file_uses_little_memory() -> None:
    survey = Survey(ENDPOINT)
    tracemalloc.start()
    for _ in range(20):
        survey.add([b"x" * 100] * 10_000)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1 << 20
