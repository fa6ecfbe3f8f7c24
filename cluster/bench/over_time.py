"""What happened when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from cluster.bench.outcome import Outcome

#: Points of a curve over time, at most about twice as many.
_POINTS = 60
_WIDTHS = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class OverTime:
    """In slices of ``width_s``, from the load's begin on: what was due and what ended in each (a
    second's), tokens (a second's), and requests that were due and not ended, at its end."""

    width_s: float
    due_per_s: Sequence[float]
    ended_per_s: Sequence[float]
    failed_per_s: Sequence[float]
    tokens_per_s: Sequence[float]
    in_flight: Sequence[int]
    #: the median of those that were due in a slice; None where none was, or none was answered
    ttft_ms: Sequence[float | None]


def over_time(outcomes: Sequence[Outcome]) -> OverTime:
    duration = max((each.ended for each in outcomes), default=0.0)
    width = _width(duration)
    slices = int(duration / width) + 1
    came = _counted(((each.due, 1) for each in outcomes), width, slices)
    went = _counted(((each.ended, 1) for each in outcomes), width, slices)
    failed = _counted(((each.ended, 1) for each in outcomes if not each.is_complete), width, slices)
    tokens = _counted(_tokens(outcomes), width, slices)
    return OverTime(
        width,
        [number / width for number in came],
        [number / width for number in went],
        [number / width for number in failed],
        [number / width for number in tokens],
        [round(a - b) for a, b in zip(accumulate(came), accumulate(went), strict=True)],
        _first_pieces(outcomes, width, slices),
    )


def _first_pieces(outcomes: Iterable[Outcome], width: float, slices: int) -> list[float | None]:
    found: list[list[float]] = [[] for _ in range(slices)]
    for each in outcomes:
        if each.is_complete:
            found[_slice(each.due, width, slices)].append(1e3 * (each.pieces[0] - each.due))
    return [median(times) if times else None for times in found]


def most_tokens_in_a_second(outcomes: Sequence[Outcome]) -> float:
    duration = max((each.ended for each in outcomes), default=0.0)
    return max(_counted(_tokens(outcomes), 1.0, int(duration) + 1), default=0.0)


def most_at_once(outcomes: Iterable[Outcome]) -> int:
    """Requests that were sent and not ended."""
    moves = sorted(move for each in outcomes for move in ((each.sent, 1), (each.ended, -1)))
    return max(accumulate(step for _, step in moves), default=0)


def _tokens(outcomes: Iterable[Outcome]) -> Iterator[tuple[float, float]]:
    """A piece's share of its output's tokens."""
    for each in outcomes:
        if each.is_complete:
            share = each.output_tokens / len(each.pieces)
            for at in each.pieces:
                yield at, share


def _counted(events: Iterable[tuple[float, float]], width: float, slices: int) -> list[float]:
    found = [0.0] * slices
    for at, number in events:
        found[_slice(at, width, slices)] += number
    return found


def _slice(at: float, width: float, slices: int) -> int:
    return min(slices - 1, int(at / width))


def _width(duration: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are about as many slices as a curve has
    points."""
    wanted = max(duration / _POINTS, 1e-3)
    power = 1e-3
    while power * 10 <= wanted:
        power *= 10
    return next((power * n for n in _WIDTHS if power * n >= wanted), power * 10)
