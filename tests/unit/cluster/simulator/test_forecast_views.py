"""Views of a forecast."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from itertools import cycle
from pathlib import Path

from matplotlib import image
from rich.console import Console

from cluster.simulator import pictures, tables
from cluster.simulator.as_json import forecast_as_json
from cluster.simulator.forecast import Forecast, Sample
from cluster.simulator.summary import Slo
from tests.support import forecasts


def printed(*parts: object) -> str:
    return within(160, *parts)


def within(width: int, *parts: object) -> str:
    written = StringIO()
    Console(width=width, file=written).print(*parts)
    return written.getvalue()


def test_forecast_tables_show_all_requests_and_each_group() -> None:
    forecast = forecasts.some()
    slo = Slo(ttft_s=0.5)
    requests = tables.requests_table(forecast, slo, by_group=True)
    text = printed(requests, tables.cluster_table(forecast, slo))
    rows = {line[:12].strip(): line.split() for line in text.splitlines()}
    assert rows["all"][1:5] == ["10", "90.0%", "0.500", "0.900"]
    assert rows["all"][-1] == "50.0%"
    assert {"class 0", "class 1", "tenant t0", "tenant t1", "tenant t2"} <= rows.keys()
    assert "application chat" not in text
    assert "of good requests: finished, TTFT at most 500.0 ms" in text
    assert "ended with queue_full" in text and "3 requests" in text


def test_forecast_table_has_one_row_without_groups() -> None:
    text = printed(tables.requests_table(forecasts.some(), Slo()))
    assert "all" in text and "class 0" not in text and "tenant t0" not in text


def test_forecast_table_truncates_no_number_for_a_long_name() -> None:
    records = [
        replace(record, arrival=replace(record.arrival, application=f"{name} log of a long name"))
        for record, name in zip(forecasts.some().records, cycle(("API", "Chat")), strict=False)
    ]
    forecast = replace(forecasts.some(), records=tuple(records))
    text = within(80, tables.requests_table(forecast, Slo(), by_group=True))
    assert "…" not in text and "90.0%" in text


def test_forecast_json_has_only_finite_numbers() -> None:
    content = forecast_as_json(forecasts.some(), Slo(ttft_s=0.5))
    again = json.loads(json.dumps(content, allow_nan=False))
    assert again["slo"] == {"ttft_s": 0.5, "tpot_s": None}
    assert again["all"]["refused"] == {"queue_full": 1}
    assert again["all"]["ttft_s"]["p50"] == 0.5
    assert again["by_class"].keys() == {"0", "1"}
    assert again["samples"][3]["queued"] == 3


def test_forecast_pictures_are_drawn(tmp_path: Path) -> None:
    drawn = pictures.draw(forecasts.some(), Slo(ttft_s=0.5), tmp_path / "new")
    assert [path.name for path in drawn] == ["latency.png", "over_time.png", "occupancy.png"]
    for path in drawn:
        assert image.imread(path).std() > 0.05


def test_forecast_without_finished_requests_is_shown(tmp_path: Path) -> None:
    idle = Sample(0.0, 0, 0, 0, 1, 8, 0, 200)
    nothing = Forecast((forecasts.refused(0, 0.0),), (idle,), 0, 0, 0.0)
    text = printed(tables.requests_table(nothing, Slo()), tables.cluster_table(nothing, Slo()))
    assert "finished, no limits: see --slo" in text
    json.dumps(forecast_as_json(nothing, Slo()), allow_nan=False)
    assert len(pictures.draw(nothing, Slo(), tmp_path)) == 3
