"""A report, or two of them beside each other, as one HTML file that needs no other. Pure.

It runs no script, loads nothing, and follows the reader's choice of dark or light.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from cluster.bench import wording
from cluster.bench.chart import Chart, svg
from cluster.bench.charts import charts, distributions
from cluster.bench.comparison import Comparison
from cluster.bench.figures import Json
from cluster.bench.report import ours

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2024; --faint: #5c6670;
  --rule: #d9dee3; --card: #f5f7f9; --note: #7a4a00; --note-paper: #fff4e0;
  --line-0: #0068a8; --line-1: #b84a00; --line-2: #a3286d; --line-3: #5c6670; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e6e9ec;
  --faint: #a2acb5; --rule: #343b42; --card: #1d2226; --note: #ffcf87; --note-paper: #3a2a10;
  --line-0: #5fb8f0; --line-1: #f2a25c; --line-2: #e58bc0; --line-3: #a2acb5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 3rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.under { margin: .2rem 0 1rem; color: var(--faint); }
ul.notes { margin: .75rem 0; padding: .5rem .75rem .5rem 1.75rem; border-radius: .4rem;
  color: var(--note); background: var(--note-paper); }
.cards { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem;
  padding: .6rem .8rem; }
.card b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.card span { color: var(--faint); font-size: .85rem; }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule);
  border-radius: .5rem; padding: .6rem; }
figcaption { font-weight: 600; font-size: .95rem; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
svg .y-tick { text-anchor: end; dominant-baseline: middle; }
svg .x-tick { text-anchor: middle; }
svg .x-label { text-anchor: end; }
svg .key { fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; fill: none; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.style-0 { stroke: var(--line-0); }
.style-1 { stroke: var(--line-1); stroke-dasharray: 7 3; }
.style-2 { stroke: var(--line-2); stroke-dasharray: 2 3; }
.style-3 { stroke: var(--line-3); stroke-dasharray: 1 4; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
td { overflow-wrap: anywhere; }
tbody th { font-weight: 400; color: var(--faint); }
"""


def report_page(found: Json) -> str:
    title = f"Load on {found['model_id']}"
    more = ours(found)
    body = [
        *_notes(more.get("marks", ())),
        _cards(found),
        *_section("Latency, in ms from when a request was due", _latencies(found, found)),
        *_section("From when it was sent", _latencies(found, more.get("from_sent", {}))),
        *_stages(more.get("stages", ())),
        *_section("Curves", _figures(charts(found))),
        *_section("Summary", _pairs(wording.summary_rows(found))),
        *_section("Errors", _pairs(wording.error_rows(found))),
        *_section("What was asked", _pairs(wording.setting_rows(found))),
    ]
    return _page(title, _under(found), body)


def comparison_page(a: Json, b: Json, comparison: Comparison) -> str:
    body = [
        *_notes(comparison.warnings),
        *_section("Figures", _compared(comparison)),
        *_section("Curves", _figures(distributions({"A": ours(a), "B": ours(b)}))),
        *_section("A", _pairs(wording.setting_rows(a))),
        *_section("B", _pairs(wording.setting_rows(b))),
    ]
    return _page("Two loads beside each other", f"A: {_under(a)} · B: {_under(b)}", body)


def _under(found: Json) -> str:
    """Not every release of vLLM's says all of it."""
    parts = (found.get(name) for name in ("label", "backend", "date"))
    return " · ".join(str(part) for part in parts if part)


def _page(title: str, under: str, body: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="under">{escape(under)}</p>\n'
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> Iterator[str]:
    if content:
        yield f"<section><h2>{escape(title)}</h2>{content}</section>"


def _notes(texts: Sequence[str]) -> Iterator[str]:
    if texts:
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        yield f'<ul class="notes">{items}</ul>'


def _cards(found: Json) -> str:
    """What is looked for first."""
    shown = {
        "requests a second": found["request_throughput"],
        "output tokens a second": found["output_throughput"],
        "ms to first token, median": found.get("median_ttft_ms"),
        "ms per output token, median": found.get("median_tpot_ms"),
        "ms end to end, median": found.get("median_e2el_ms"),
        "failed": found.get("failed"),
    }
    cards = (
        f'<div class="card"><b>{wording.shown(value)}</b><span>{escape(name)}</span></div>'
        for name, value in shown.items()
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _latencies(found: Json, source: Json) -> str:
    rows = [(name, *cells) for name, cells in wording.latency_rows(found, source)]
    return _table(("latency", *wording.statistics(found)), rows) if rows else ""


def _stages(stages: Sequence[Json]) -> Iterator[str]:
    rows = [wording.stage_row(stage) for stage in stages]
    return _section("Ramp", _table(wording.STAGE_COLUMNS, rows) if rows else "")


def _compared(comparison: Comparison) -> str:
    return _table(wording.COMPARED_COLUMNS, list(comparison.cells()))


def _figures(drawn: Iterable[Chart]) -> str:
    found = [
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{picture}</figure>"
        for chart in drawn
        if (picture := svg(chart))
    ]
    return f'<div class="charts">{"".join(found)}</div>' if found else ""


def _pairs(rows: Iterator[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows
    )
    return (
        f'<div class="wide" tabindex="0"><table><tbody>{cells}</tbody></table></div>'
        if cells
        else ""
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column names its row."""
    first, *others = columns
    head = f'<th scope="col">{escape(first)}</th>' + "".join(
        f'<th scope="col" class="number">{escape(name)}</th>' for name in others
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    return (
        '<div class="wide" tabindex="0"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
