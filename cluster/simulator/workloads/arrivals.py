"""Requests of a synthetic workload: when they arrive, and which prompts they share. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, inf, log1p, sqrt
from random import Random


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request of a workload at ``at`` seconds.

    ``output_tokens`` is the length of its output without a limit, of which it gets at most
    ``max_tokens``.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    #: what kind of request it is: chat, code, ...
    application: str = ""
    #: seconds after ``at``
    ttft_target_s: float = inf
    deadline_s: float = inf
    #: names of what its prompt begins with, part by part: two prompts whose first n names agree
    #: share that many parts of ``prefix_part_tokens`` tokens
    prefix: tuple[int, ...] = ()
    prefix_part_tokens: int = 512
    #: how long its output was expected to become when it came; None: nobody said
    foreseen_tokens: float | None = None
    #: that was by a predictor whose order was worth nothing
    is_distrusted: bool = False


#: Steps in which the rate drifts, in each ``drift_s``.
_STEPS = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """Gaps between requests are Gamma-distributed, at a rate that drifts.

    With the coefficient of variation ``cv`` the Gamma distribution has the shape 1 / cv²; with 1
    this is a Poisson process. The rate is ``rate`` (requests a second) times exp(z - var(z) / 2)
    with z an Ornstein-Uhlenbeck process that forgets in ``drift_s`` seconds; ``drift`` is the
    standard deviation of that factor. The index of dispersion of the requests in w seconds, as long
    as w is short against ``drift_s``, is about cv² + rate * w * drift².
    """

    rate: float
    cv: float = 1.0
    drift: float = 0.0
    drift_s: float = 120.0

    def times(self, rng: Random) -> Iterator[float]:
        """Yield arrival times in seconds, without end."""
        shape = 1 / self.cv**2
        scale = 1 / (shape * self.rate)
        factors = self._factors(Random(rng.random()))
        now, factor, step = 0.0, next(factors), self.drift_s / _STEPS
        end = step
        while True:
            # in seconds of the average rate
            gap = rng.gammavariate(shape, scale)
            while gap > (end - now) * factor:
                gap -= (end - now) * factor
                now, end, factor = end, end + step, next(factors)
            now += gap / factor
            yield now

    def _factors(self, rng: Random) -> Iterator[float]:
        variance = log1p(self.drift**2)
        kept = exp(-1 / _STEPS)
        fresh = sqrt(variance * (1 - kept**2))
        z = rng.gauss(0.0, sqrt(variance))
        while True:
            yield exp(z - variance / 2)
            z = kept * z + rng.gauss(0.0, fresh)


#: Conversations that may go on.
_OPEN = 512


class Conversations:
    """Conversations, in which each prompt extends the previous one.

    A prompt is the names of its parts; a part that occurred before has the same name. With
    probability ``share`` a prompt extends the longest open conversation that is not longer than
    itself; else it begins a new one in the place of another. So the lengths are the same as without
    conversations.
    """

    def __init__(self, share: float, names: Iterator[int], rng: Random) -> None:
        """Create the parts; ``names`` are those of new ones."""
        self._share = share
        self._names = names
        self._rng = rng
        #: by the number of their parts; a name occurs once as a last one
        self._open: list[tuple[int, int, tuple[int, ...]]] = []

    def prompt(self, parts: int) -> tuple[int, ...]:
        """Return the names of a prompt of ``parts`` whole parts."""
        begun = self._taken(parts) if self._rng.random() < self._share else ()
        prompt = (*begun, *(next(self._names) for _ in range(parts - len(begun))))
        if prompt:
            self._leave_open(prompt)
        return prompt

    def _taken(self, parts: int) -> tuple[int, ...]:
        place = bisect_right(self._open, parts, key=lambda each: each[0])
        return self._open.pop(place - 1)[2] if place else ()

    def _leave_open(self, prompt: tuple[int, ...]) -> None:
        if len(self._open) == _OPEN:
            self._open.pop(self._rng.randrange(_OPEN))
        insort(self._open, (len(prompt), prompt[-1], prompt))
