"""Reports: JSON, HTML pages, and comparisons of two."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from math import inf
from pathlib import Path

import pytest

from cluster.bench.comparison import compare
from cluster.bench.page import Chart, Line, comparison_page, report_page, svg
from cluster.bench.report import (
    Json,
    Outcome,
    RunResult,
    Setting,
    Stage,
    ramp_report,
    read,
    report,
    slo,
    write,
)
from cluster.bench.tables import comparison_table, tables
from cluster.errors import BenchFailed
from tests.support.outcomes import outcome

SETTING = Setting(
    date="20261123-101500",
    label="a <label>",
    backend="openai",
    endpoint_address="http://127.0.0.1:8000/v1",
    model="org/model",
    tokenizer=None,
    rate=2.0,
    burstiness=1.0,
    concurrency=None,
    load={"input tokens": 256, "seed": 0},
    slo=slo(["ttft:550"]),
    percents=(50.0, 90.0, 99.0),
)
SOME = [outcome(at, ttft_s=0.5 + at / 100) for at in range(20)]

#: Keys of `vllm bench serve` besides its figures.
VLLMS_HEAD = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency"),
}


def of(outcomes: Sequence[Outcome], setting: Setting = SETTING, cpu_share: float = 0.2) -> Json:
    return report(setting, RunResult(outcomes, cpu_share))


class Page(HTMLParser):
    """Parser that checks the nesting of elements, and collects tags, links and text."""

    EMPTY = frozenset({"meta", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


# JSON


def test_report_has_vllms_keys_and_round_trips_as_json(tmp_path: Path) -> None:
    found = of(SOME)
    assert found.keys() >= VLLMS_HEAD
    assert len(found["latencies"]) == len(found["queue_times"]) == 20
    path = tmp_path / "new" / "a.json"
    write(found, path)
    assert read(path) == json.loads(json.dumps(found, allow_nan=False))


def test_report_writes_infinite_settings_as_words() -> None:
    found = of(SOME, replace(SETTING, rate=inf, burstiness=inf))
    assert (found["request_rate"], found["burstiness"]) == ("inf", "inf")
    json.dumps(found, allow_nan=False)
    assert of(SOME, replace(SETTING, rate=None))["request_rate"] is None


def test_report_includes_request_details_if_detailed() -> None:
    assert "ttfts" not in of(SOME)
    found = report(SETTING, RunResult(SOME, 0.0), is_detailed=True)
    assert len(found["ttfts"]) == len(found["itls"]) == 20


def test_ramp_report_shows_the_highest_sustained_rate() -> None:
    stages = [
        Stage(1.0, RunResult(SOME[:5], 0.1), True),
        Stage(4.0, RunResult(SOME, 0.1), False),
        Stage(2.0, RunResult(SOME[:10], 0.1), True),
    ]
    found = ramp_report(SETTING, stages)
    assert (found["request_rate"], found["num_prompts"]) == (2.0, 10)
    assert found["everlift"]["saturation"] == {"kept": 2.0, "too_much": 4.0}
    assert [stage["rate"] for stage in found["everlift"]["stages"]] == [1.0, 2.0, 4.0]
    assert "between 2 and 4 requests a second" in "".join(Page(report_page(found)).text)
    nothing_kept = ramp_report(SETTING, stages[1:2])
    assert nothing_kept["everlift"]["saturation"] == {"kept": None, "too_much": 4.0}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "[" * 100_000])
def test_report_read_rejects_a_malformed_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BenchFailed, match=re.escape(str(path))):
        read(path)


# pages


@pytest.mark.parametrize(
    "outcomes",
    [SOME, [], [outcome()], [outcome(error="429 <b>", tokens=0)], [outcome(gap_s=0.0)]],
    ids=["some", "none", "one", "failed", "all at once"],
)
def test_report_page_is_self_contained_and_escaped(outcomes: list[Outcome]) -> None:
    text = report_page(of(outcomes))
    page = Page(text)
    assert "script" not in page.tags and not page.links
    assert "url(" not in text and "@import" not in text and "http-equiv" not in text
    assert "<b>" not in re.sub(r'<div class="card"><b>', "", text), "nothing comes in unescaped"
    assert not re.search(r"\bnan\b|\binf\b", text)


def test_report_page_has_curves_tables_and_settings() -> None:
    page = Page(report_page(of(SOME)))
    assert page.tags.count("svg") >= 8
    said = "".join(page.text)
    for text in ("org/model", "a <label>", "openai at http://127.0.0.1:8000/v1", "ttft:550", "p99"):
        assert text in said
    assert "prefers-color-scheme: dark" in report_page(of(SOME))


def test_report_page_shows_marks_before_tables() -> None:
    text = report_page(of(SOME, cpu_share=0.99))
    assert text.index("the generator fell behind") < text.index("<table")
    assert "fell behind" not in report_page(of(SOME))


def test_report_page_of_vllm_has_no_curves() -> None:
    found = {name: value for name, value in of(SOME).items() if name != "everlift"}
    assert "svg" not in Page(report_page(found)).tags
    assert "everlift" not in comparison_page(found, found, compare(found, found))


@pytest.mark.parametrize(
    "points",
    [
        [(0.0, 0.0)],
        [(1.0, 5.0), (1.0, 5.0)],
        [(1e-6, 1.0), (1e6, 2.0)],
        [(0.3, 0.1), (0.31, 0.2)],
        [(5.0, 1e-9), (7.0, 1e12)],
    ],
)
@pytest.mark.parametrize("is_log", [False, True])
def test_chart_curves_stay_within_the_plot_area(
    points: list[tuple[float, float]], is_log: bool
) -> None:
    drawn = svg(Chart("title", "x", "y", [Line("a", points)], is_log))
    if is_log and points == [(0.0, 0.0)]:
        assert drawn == ""
        return
    (path,) = re.findall(r'class="line style-0" d="M([^"]*)"', drawn)
    for place in path.split("L"):
        x, y = map(float, place.split())
        assert 57 <= x <= 547 and 33 <= y <= 257


def test_chart_limits_the_number_of_ticks() -> None:
    for points in ([(0.0, 0.0), (7.0, 93.0)], [(0.001, 1.0), (90_000.0, 1e6)]):
        for is_log in (False, True):
            drawn = svg(Chart("t", "x", "y", [Line("a", points)], is_log))
            assert 2 <= drawn.count('class="x-tick"') <= 13
            assert 2 <= drawn.count('class="y-tick"') <= 8


# for the terminal


def test_report_tables_cover_summary_latencies_errors_and_notes() -> None:
    shown = list(tables(of([*SOME, outcome(error="timeout", tokens=0)], cpu_share=0.99)))
    assert len(shown) == 5, "summary, from due, from sent, errors, a note"


# comparisons


def test_comparison_gives_ratios_and_verdicts() -> None:
    a = of(SOME)
    b = of([outcome(at, ttft_s=0.25 + at / 200) for at in range(20)])
    rows = {row.title: row for row in compare(a, b).rows}
    ttft = rows["time to first token, median, ms"]
    assert (ttft.ratio, ttft.verdict) == (pytest.approx(0.5), "better")
    assert compare(b, a).rows[0].title == "requests a second"
    back = {row.title: row for row in compare(b, a).rows}["time to first token, median, ms"]
    assert (back.ratio, back.verdict) == (pytest.approx(2.0), "worse")
    assert comparison_table(compare(a, b)).row_count == len(rows)


def test_comparison_with_itself_has_no_verdict() -> None:
    found = compare(of(SOME), of(SOME))
    assert not found.warnings
    assert {row.verdict for row in found.rows} == {""}


def test_comparison_warns_of_different_settings() -> None:
    other = replace(SETTING, rate=3.0, load={"input tokens": 512}, slo=slo([]))
    said = "\n".join(compare(of(SOME), of(SOME[:10], other)).warnings)
    for text in ("request_rate differs: 2 in A, 3 in B", "num_prompts", "input tokens", "goodput"):
        assert text in said
    assert "seed differs: 0 in A, - in B" in said


def test_comparison_warns_of_failures_and_marks() -> None:
    bad = of([*SOME[1:], outcome(error="timeout", tokens=0)], cpu_share=0.99)
    said = compare(of(SOME), bad).warnings
    assert any(text.startswith("1 requests of B failed") for text in said)
    assert any(text.startswith("of B: the generator fell behind") for text in said)


def test_comparison_accepts_a_report_of_another_generator() -> None:
    theirs = {name: value for name, value in of(SOME).items() if name != "everlift"}
    theirs["p99_ttft_ms"] = 1.0
    # Earlier releases of vLLM write fewer keys.
    for name in ("label", "burstiness", "tokenizer_id", "max_concurrent_requests"):
        del theirs[name]
    found = compare(of(SOME), theirs)
    assert any("another generator" in text for text in found.warnings)
    assert any(row.title == "time to first token, p99, ms" for row in found.rows)
    Page(comparison_page(of(SOME), theirs, found))
