"""What a good request keeps to, as ``ttft:500 tpot:50``: milliseconds. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from cluster.bench import latencies
from cluster.bench.latencies import Begin
from cluster.bench.outcome import Outcome
from cluster.errors import BenchFailed

NAMES = ("ttft", "tpot", "e2el")
_BETWEEN = re.compile(r"[\s,]+")


@dataclass(frozen=True, slots=True)
class Slo:
    """``most_ms`` by name; what it does not name may take any time."""

    most_ms: Mapping[str, float] = field(default_factory=dict)

    def is_good(self, outcome: Outcome, begin: Begin) -> bool:
        """It is whole, and no later than it may be in anything."""
        if not outcome.is_complete:
            return False
        taken = {
            "ttft": latencies.ttft(outcome, begin),
            "tpot": latencies.tpot(outcome),
            "e2el": latencies.e2el(outcome, begin),
        }
        return all(taken[name] * 1e3 <= most for name, most in self.most_ms.items())


def slo(texts: Sequence[str]) -> Slo:
    """Raises BenchFailed."""
    pairs = (pair for text in texts for pair in _BETWEEN.split(text.strip()) if pair)
    return Slo(dict(_pair(pair) for pair in pairs))


def _pair(text: str) -> tuple[str, float]:
    name, _, most = text.partition(":")
    try:
        number = float(most)
    except ValueError:
        number = -1.0
    if name not in NAMES or not 0 <= number < inf:
        raise BenchFailed(
            f"--goodput {text}: must be {', '.join(NAMES)} with milliseconds, as in ttft:500"
        )
    return name, number
