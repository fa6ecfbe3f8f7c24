"""Tables of a report or of a comparison, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cluster.bench import wording
from cluster.bench.comparison import Comparison
from cluster.bench.report import Json, ours


def tables(found: Json) -> Iterator[RenderableType]:
    yield _pairs(wording.summary_rows(found))
    yield _latencies(found, found, "ms, from the due time")
    if sent := ours(found).get("from_sent"):
        yield _latencies(found, sent, "ms, from the send time")
    if stages := ours(found).get("stages"):
        yield _table(wording.STAGE_COLUMNS, map(wording.stage_row, stages))
    if errors := list(wording.error_rows(found)):
        yield _pairs(iter(errors), "errors")
    for mark in ours(found).get("marks", ()):
        yield Text(f"note: {mark}", style="yellow")


def comparison_table(comparison: Comparison) -> Table:
    return _table(wording.COMPARED_COLUMNS, comparison.cells())


def _pairs(rows: Iterator[tuple[str, str]], title: str = "") -> Table:
    table = Table(title, "", show_header=bool(title), box=SIMPLE_HEAD)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _latencies(found: Json, source: Json, title: str) -> Table:
    rows = ((name, *cells) for name, cells in wording.latency_rows(found, source))
    return _table((title, *wording.statistics(found)), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table
