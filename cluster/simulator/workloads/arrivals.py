"""Requests of a workload: arrival times, and prompts with shared prefixes. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, inf, log1p, sqrt
from random import Random


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request of a workload that arrives at ``at`` seconds.

    ``output_tokens`` is the length that the model would generate without a limit; the request gets
    at most ``max_tokens`` of them.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    #: type of request: chat, code, ...
    application: str = ""
    #: this target and the deadline are in seconds after ``at``
    ttft_target_s: float = inf
    deadline_s: float = inf
    #: names of the parts with which the prompt begins: two prompts whose first n names are equal
    #: share n parts of ``prefix_part_tokens`` tokens
    prefix: tuple[int, ...] = ()
    prefix_part_tokens: int = 512
    #: number of the session to which the request belongs; 0: none. A prompt begins with all tokens
    #: of its session's previous prompt and output.
    session: int = 0
    #: output length in tokens that a router predicted at its arrival; None: not recorded
    predicted_tokens: float | None = None
    #: whether the router's queue ignored that prediction, because its predictor was not accurate
    is_distrusted: bool = False


#: Number of times that the rate changes within ``drift_s`` seconds.
_STEPS = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrival process with Gamma-distributed gaps and a rate that drifts.

    The gaps have the coefficient of variation ``cv``, so the Gamma distribution has the shape 1 /
    cv²; with a ``cv`` of 1 this is a Poisson process. The rate in requests per second is ``rate``
    times exp(z - var(z) / 2), where z is an Ornstein-Uhlenbeck process with a correlation time of
    ``drift_s`` seconds. ``drift`` is the standard deviation of this exponential factor. The index
    of dispersion of the requests in w seconds is about cv² + rate * w * drift², as long as w is
    short compared with ``drift_s``.
    """

    rate: float
    cv: float = 1.0
    drift: float = 0.0
    drift_s: float = 120.0

    def times(self, rng: Random) -> Iterator[float]:
        """Yield arrival times in seconds, endlessly."""
        shape = 1 / self.cv**2
        scale = 1 / (shape * self.rate)
        factors = self._factors(Random(rng.random()))
        now, factor, step = 0.0, next(factors), self.drift_s / _STEPS
        end = step
        while True:
            # The gap is in seconds at the average rate.
            gap = rng.gammavariate(shape, scale)
            while gap > (end - now) * factor:
                gap -= (end - now) * factor
                now, end, factor = end, end + step, next(factors)
            now += gap / factor
            yield now

    def _factors(self, rng: Random) -> Iterator[float]:
        variance = log1p(self.drift**2)
        decay = exp(-1 / _STEPS)
        noise = sqrt(variance * (1 - decay**2))
        z = rng.gauss(0.0, sqrt(variance))
        while True:
            yield exp(z - variance / 2)
            z = decay * z + rng.gauss(0.0, noise)


#: Maximum number of conversations that can still be extended.
_OPEN = 512


class Conversations:
    """Conversations, in which each prompt extends the previous one.

    A prompt is a sequence of part names; two prompts that begin with the same names share a prefix.
    A prompt extends, with probability ``share``, the longest known conversation that is not longer
    than the prompt. Any other prompt, or one that finds no such conversation, begins a new one. The
    prompt has the requested length in both cases. At most ``_OPEN`` conversations are known; a
    further one replaces a random one.
    """

    def __init__(self, share: float, names: Iterator[int], rng: Random) -> None:
        """Begin without conversations; ``names`` yields unused names for the parts of prompts."""
        self._share = share
        self._names = names
        self._rng = rng
        #: (number of parts, last name, names), sorted; no two conversations have the same last name
        self._open: list[tuple[int, int, tuple[int, ...]]] = []

    def prompt(self, parts: int) -> tuple[int, ...]:
        """Return the part names of a new prompt of ``parts`` parts, and record the conversation."""
        earlier = self._pop_longest(parts) if self._rng.random() < self._share else ()
        prompt = (*earlier, *(next(self._names) for _ in range(parts - len(earlier))))
        if prompt:
            self._add(prompt)
        return prompt

    def _pop_longest(self, parts: int) -> tuple[int, ...]:
        place = bisect_right(self._open, parts, key=lambda each: each[0])
        return self._open.pop(place - 1)[2] if place else ()

    def _add(self, prompt: tuple[int, ...]) -> None:
        if len(self._open) == _OPEN:
            self._open.pop(self._rng.randrange(_OPEN))
        insort(self._open, (len(prompt), prompt[-1], prompt))
