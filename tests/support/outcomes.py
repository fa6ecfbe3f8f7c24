"""Outcomes of requests, for tests of reports."""

from __future__ import annotations

from cluster.bench.report import CountedBy, Outcome


def outcome(
    due: float = 0.0,
    ttft_s: float = 0.5,
    gap_s: float = 0.1,
    tokens: int = 5,
    *,
    lag_s: float = 0.0,
    error: str = "",
    counted_by: CountedBy = CountedBy.USAGE,
) -> Outcome:
    """Return an outcome with one token per piece; ``ttft_s`` counts from the time of sending."""
    sent = due + lag_s
    pieces = [sent + ttft_s + number * gap_s for number in range(tokens)]
    ended = pieces[-1] if pieces else sent
    return Outcome(due, due, sent, ended, pieces, 10, tokens, counted_by, error)
