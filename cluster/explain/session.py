"""Explanation of a session: its turns, and the time between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from everlift import explanation as explanations
from everlift.v1 import inference_pb2 as pb

#: Columns of the table that show time, each with the kinds of span that it adds up.
_COLUMNS: Mapping[str, frozenset[int]] = {
    "queue": frozenset({pb.SPAN_KIND_QUEUE, pb.SPAN_KIND_NO_WORKER, pb.SPAN_KIND_WORKER_WAIT}),
    "prefix": frozenset({pb.SPAN_KIND_PREFIX_WAIT}),
    "prefill": frozenset({pb.SPAN_KIND_PREFILL, pb.SPAN_KIND_RECOMPUTE}),
    "decode": frozenset({pb.SPAN_KIND_DECODE, pb.SPAN_KIND_INTERFERENCE}),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """Request of a session.

    ``arrived`` is the request's arrival time by the ledger's clock, in seconds since 1970.
    """

    arrived: float
    explanation: pb.Explanation

    @property
    def ended(self) -> float:
        return self.arrived + self.explanation.total_s

    @property
    def cached_tokens(self) -> int:
        """Return the number of prompt tokens that the first attempt found in the prefix cache."""
        attempts = self.explanation.attempts
        return attempts[0].cached_tokens if attempts else 0

    def seconds(self, kinds: frozenset[int]) -> float:
        return sum(span.seconds for span in self.explanation.spans if span.kind in kinds)


def tables(session_id: str, turns: Sequence[Turn]) -> Iterator[str | Table]:
    """Yield a session's explanation as lines and tables; ``turns`` are in order of arrival."""
    served_s = sum(turn.explanation.total_s for turn in turns)
    between_s = sum(gap for gap in _gaps(turns) if gap is not None)
    yield (
        f"[bold]session {escape(session_id)}[/]: {len(turns)} turns, {served_s:.3f} s; "
        f"{between_s:.3f} s between them, in tools or with the user"
    )
    table = Table(
        "turn", "request", "prompt", "cached", "output", *_COLUMNS, "other", "total, s", "then, s",
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in (table.columns[0], *table.columns[2:]):
        column.justify = "right"
    for number, (turn, gap) in enumerate(zip(turns, _gaps(turns), strict=True), 1):
        its = turn.explanation
        parts = [turn.seconds(kinds) for kinds in _COLUMNS.values()]
        times = (*parts, max(0.0, its.total_s - sum(parts)), its.total_s)
        table.add_row(
            str(number),
            escape(its.request_id),
            str(its.prompt_tokens),
            str(turn.cached_tokens),
            str(its.output_tokens),
            *(f"{each:.3f}" for each in times),
            "" if gap is None else f"{gap:.3f}",
        )
    yield table


def as_json(session_id: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return a session's explanation for programs; ``turns`` are in order of arrival.

    ``then_s`` is the time between the end of all turns so far and the arrival of the next one, in
    seconds. The value is null for the last turn, and if any turn still runs when the next one
    arrives.
    """
    return {
        "session_id": session_id,
        "turns": [
            {
                "arrived": turn.arrived,
                "cached_tokens": turn.cached_tokens,
                "then_s": gap,
                **explanations.as_json(turn.explanation),
            }
            for turn, gap in zip(turns, _gaps(turns), strict=True)
        ],
    }


def _gaps(turns: Sequence[Turn]) -> Iterator[float | None]:
    """Yield for each turn the seconds between the end of all turns so far and the next arrival.

    The value is None for the last turn, and if any turn still runs when the next one arrives.
    """
    # Turns of parallel agents may end after later turns.
    ends = accumulate((turn.ended for turn in turns), max)
    for ended, after in zip(ends, turns[1:], strict=False):
        yield after.arrived - ended if after.arrived > ended else None
    if turns:
        yield None
