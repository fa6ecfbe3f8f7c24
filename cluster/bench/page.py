"""HTML pages of a report and of a comparison, each in one self-contained file. Pure.

A page runs no script, loads nothing, and follows the reader's choice of dark or light colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from cluster.bench import wording
from cluster.bench.comparison import Comparison
from cluster.bench.report import Json, ours
from cluster.bench.wording import LATENCIES

#: Number of line styles (colour and dashes) in the page's style sheet.
STYLES = 4
_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 44
_TICKS = 6
_STEPS = (1, 2, 5, 10)
#: Widths in the legend: of an entry without its text, and of an average letter.
_KEY_WIDTH, _LETTER_WIDTH = 44, 7


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a chart; ``style`` is the number of its line style, from 0."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart of lines; ``x`` and ``y`` are the titles of the axes.

    With ``is_log`` the horizontal axis is logarithmic, and points whose x is not positive are left
    out.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    is_log: bool = False
    #: upper end of the vertical axis; None: the highest point
    top: float | None = None


@dataclass(frozen=True, slots=True)
class _Axis:
    ticks: Sequence[float]
    place: Callable[[float], float]


def svg(chart: Chart) -> str:
    """Return the chart as an SVG element; an empty text if there are no points to draw."""
    drawn = [(line, _within(line.points, chart.is_log)) for line in chart.lines]
    points = [point for _, found in drawn for point in found]
    if not points:
        return ""
    x = (_log_axis if chart.is_log else _axis)([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    high = [chart.top] if chart.top is not None else [y for _, y in points]
    y = _axis([0.0, *high], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x, y), *_labels(chart)]
    parts += [_curve(line.style, found, x, y) for line, found in drawn if found]
    parts += _key([line for line, found in drawn if found])
    names = ", ".join(line.name for line in chart.lines)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(f"{chart.title}: {names}")}">{"".join(parts)}</svg>'
    )


def _within(points: Sequence[tuple[float, float]], is_log: bool) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if x > 0 or not is_log]


def _axis(values: Sequence[float], begin: float, end: float) -> _Axis:
    low, high = min(0.0, *values), max(values)
    step = _step((high - low) or 1.0)
    ticks = [step * n for n in range(floor(low / step), max(1, ceil(high / step)) + 1)]
    return _Axis(ticks, _placing(ticks[0], ticks[-1], begin, end, lambda value: value))


def _log_axis(values: Sequence[float], begin: float, end: float) -> _Axis:
    marks = [
        10.0**power * n
        for power in range(floor(log10(min(values))), floor(log10(max(values))) + 2)
        for n in (1, 2, 5)
    ]
    first = max(i for i, mark in enumerate(marks) if mark <= min(values) or i == 0)
    last = min(i for i, mark in enumerate(marks) if mark >= max(values) and i > first)
    ticks = marks[first : last + 1]
    if len(ticks) > 2 * _TICKS:
        ticks = [tick for tick in ticks if log10(tick) == round(log10(tick))]
    return _Axis(ticks, _placing(marks[first], marks[last], begin, end, log10))


def _placing(
    low: float, high: float, begin: float, end: float, scale: Callable[[float], float]
) -> Callable[[float], float]:
    a, b = scale(low), scale(high)
    return lambda value: begin + (end - begin) * (scale(value) - a) / (b - a)


def _step(width: float) -> float:
    power = 10.0 ** floor(log10(width / _TICKS))
    return next(power * n for n in _STEPS if power * n * _TICKS >= width)


def _grid(x: _Axis, y: _Axis) -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    for tick in y.ticks:
        at = f"{y.place(tick):.1f}"
        yield f'<path class="grid" d="M{_LEFT} {at}H{_WIDTH - _RIGHT}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at}" class="y-tick">{tick:g}</text>'
    for tick in x.ticks:
        at = f"{x.place(tick):.1f}"
        yield f'<path class="grid" d="M{at} {_TOP}V{bottom}"/>'
        yield f'<text x="{at}" y="{bottom + 16}" class="x-tick">{tick:g}</text>'


def _labels(chart: Chart) -> Iterator[str]:
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" class="x-label">{escape(chart.x)}</text>'
    yield f'<text x="4" y="14" class="y-label">{escape(chart.y)}</text>'


def _curve(style: int, points: Sequence[tuple[float, float]], x: _Axis, y: _Axis) -> str:
    top = y.ticks[-1]
    places = (f"{x.place(a):.1f} {y.place(min(b, top)):.1f}" for a, b in points)
    return f'<path class="line style-{style % STYLES}" d="M{"L".join(places)}"/>'


def _key(lines: Sequence[Line]) -> Iterator[str]:
    if len(lines) < 2:
        return
    at = _WIDTH - _RIGHT - sum(map(_key_width, lines))
    for line in lines:
        yield f'<path class="line style-{line.style % STYLES}" d="M{at} 11h22"/>'
        yield f'<text x="{at + 28}" y="15" class="key">{escape(line.name)}</text>'
        at += _key_width(line)


def _key_width(line: Line) -> int:
    return _KEY_WIDTH + _LETTER_WIDTH * len(line.name)


def charts(found: Json) -> Iterator[Chart]:
    """Yield the charts of one report; none for a report of vLLM, which has no data for them."""
    more = ours(found)
    if not more:
        return
    if stages := more.get("stages"):
        yield from _ramp(stages)
    yield from distributions({"": more})
    yield from _time_series_charts(more["over_time"])


def distributions(reports: Mapping[str, Json]) -> Iterator[Chart]:
    """Yield a chart for each latency, with one curve of its cumulative distribution per report.

    ``reports`` has the ``everlift`` section of each report, by the displayed name of the report. An
    empty section has no curve.
    """
    for name, title in LATENCIES.items():
        lines = [
            Line(label or title, _cumulative(more["curves_ms"][name]), style)
            for style, (label, more) in enumerate(reports.items())
            if more
        ]
        yield Chart(title[0].upper() + title[1:], "ms", "% of all", lines, is_log=True, top=100.0)


def _cumulative(curve: Sequence[float]) -> list[tuple[float, float]]:
    return [(value, float(percent)) for percent, value in enumerate(curve)]


def _time_series_charts(found: Json) -> Iterator[Chart]:
    def line(name: str, key: str, style: int = 0) -> Line:
        width = found["width_s"]
        return Line(
            name,
            [
                ((slot + 0.5) * width, value)
                for slot, value in enumerate(found[key])
                if value is not None
            ],
            style,
        )

    requests = [line("due", "due_per_s"), line("ended", "ended_per_s", 1)]
    if any(found["failed_per_s"]):
        requests.append(line("failed", "failed_per_s", 2))
    yield Chart("Requests", "seconds", "requests a second", requests)
    yield Chart("Unfinished", "seconds", "requests", [line("due and unfinished", "in_flight")])
    yield Chart("Output", "seconds", "tokens a second", [line("output tokens", "tokens_per_s")])
    yield Chart(
        "Time to first token, by due time",
        "seconds",
        "ms, median",
        [line("time to first token", "ttft_ms")],
    )


def _ramp(stages: Sequence[Json]) -> Iterator[Chart]:
    def line(name: str, key: str, style: int) -> Line:
        points = [(stage["rate"], stage[key]) for stage in stages if stage.get(key) is not None]
        return Line(name, points, style)

    last = stages[-1]["rate"]
    yield Chart(
        "Answered requests by arrival rate",
        "arrivals per second",
        "requests a second",
        [
            line("answered", "request_throughput", 0),
            Line("all arrivals", [(0.0, 0.0), (last, last)], 3),
        ],
    )
    yield Chart(
        "Time to first token by arrival rate",
        "arrivals per second",
        "ms",
        [line("median", "median_ttft_ms", 0), line("p99", "p99_ttft_ms", 1)],
    )


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
        *_section("Latency in ms, from the due time", _latencies(found, found)),
        *_section("From the send time", _latencies(found, more.get("from_sent", {}))),
        *_stages(more.get("stages", ())),
        *_section("Curves", _figures(charts(found))),
        *_section("Summary", _pairs(wording.summary_rows(found))),
        *_section("Errors", _pairs(wording.error_rows(found))),
        *_section("Settings", _pairs(wording.setting_rows(found))),
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
    return _page("Comparison of two loads", f"A: {_under(a)} · B: {_under(b)}", body)


def _under(found: Json) -> str:
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
