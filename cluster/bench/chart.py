"""Curves as inline SVG, in colours that the page around them sets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

#: Of colours and dashes that the page has.
STYLES = 4
_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 44
_TICKS = 6
_STEPS = (1, 2, 5, 10)
#: Of an entry in the key: its line with what is around it, and about what a letter takes.
_KEY_WIDTH, _LETTER_WIDTH = 44, 7


@dataclass(frozen=True, slots=True)
class Line:
    """``style`` counts from 0; lines of one style belong together."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """``is_log``: of the horizontal axis, on which only what is above 0 is drawn."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    is_log: bool = False
    #: the vertical axis ends there; None: where the highest point is
    top: float | None = None


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where a value is on the paper."""

    ticks: Sequence[float]
    place: Callable[[float], float]


def svg(chart: Chart) -> str:
    """Empty where there is nothing to draw."""
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
    """From 0 or below to a whole tick above all."""
    low, high = min(0.0, *values), max(values)
    step = _step((high - low) or 1.0)
    ticks = [step * n for n in range(floor(low / step), max(1, ceil(high / step)) + 1)]
    return _Axis(ticks, _placing(ticks[0], ticks[-1], begin, end, lambda value: value))


def _log_axis(values: Sequence[float], begin: float, end: float) -> _Axis:
    """From a tick below all to one above."""
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
    """Above the curves, on the right."""
    if len(lines) < 2:
        return
    at = _WIDTH - _RIGHT - sum(map(_key_width, lines))
    for line in lines:
        yield f'<path class="line style-{line.style % STYLES}" d="M{at} 11h22"/>'
        yield f'<text x="{at + 28}" y="15" class="key">{escape(line.name)}</text>'
        at += _key_width(line)


def _key_width(line: Line) -> int:
    return _KEY_WIDTH + _LETTER_WIDTH * len(line.name)
