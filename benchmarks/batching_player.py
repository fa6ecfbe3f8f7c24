"""Driver of one engine, without threads or sockets: requests at given times, and token times.

The clock is a parameter, so that a runner in virtual time can be used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort
from worker.engine.plan import Runner
from worker.engine.sequence import Sequence as EngineSequence

_GREEDY = SamplingParams(temperature=0.0).to_proto()


@dataclass(frozen=True, slots=True)
class Request:
    """Request that arrives ``at`` seconds after the start."""

    prompt_tokens: int
    output_tokens: int
    at: float = 0.0


@dataclass(slots=True)
class Stream:
    """Arrival time of a request, and the times of its output tokens, in seconds from the start."""

    at: float
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.at

    @property
    def gaps(self) -> list[float]:
        """Times between consecutive tokens, in seconds."""
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a run.

    ``useful_share`` is the share of batch slots that computed something, over all steps.
    """

    seconds: float
    steps: int
    output_tokens: int
    preemptions: int
    useful_share: float
    streams: tuple[Stream, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    def ttfts(self) -> list[float]:
        return [stream.ttft for stream in self.streams if stream.times]

    def gaps(self) -> list[float]:
        return [gap for stream in self.streams for gap in stream.gaps]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that about ``share`` of all values do not exceed."""
    if len(values) < 2:
        return values[0]
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Player:
    """New engine with ``runner``, which runs one list of requests."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = Engine(runner, limits)
        self._limits = limits
        self._clock = clock
        self._sleep = sleep

    def play(self, requests: Sequence[Request], enough: int | None = None) -> RunResult:
        """Run until all requests have ended, or ``enough`` output tokens have been generated.

        In the latter case, abort the remaining requests.
        """
        streams = {epoch: Stream(request.at) for epoch, request in enumerate(requests, 1)}
        coming = deque(enumerate(requests, 1))
        began = self._clock()
        while self._is_going(coming, enough):
            now = self._clock() - began
            while coming and coming[0][1].at <= now:
                self._start(*coming.popleft())
            if not self._engine.has_work:
                self._sleep(max(0.0, coming[0][1].at - now))
                continue
            outcomes = self._engine.step(now=now)
            now = self._clock() - began
            for outcome in outcomes:
                streams[outcome.key.epoch].times.extend([now] * len(outcome.tokens))
        seconds = self._clock() - began
        for epoch in streams:
            self._engine.abort(Abort(epoch))
        return self._played(seconds, tuple(streams.values()))

    def _is_going(self, coming: deque[tuple[int, Request]], enough: int | None) -> bool:
        if enough is not None and self._engine.load().output_tokens >= enough:
            return False
        return bool(coming) or self._engine.has_work

    def _start(self, epoch: int, request: Request) -> None:
        self._engine.add(EngineSequence.from_start(self._message(epoch, request), self._limits))

    def _message(self, epoch: int, request: Request) -> session_pb2.Start:
        """Return the message that starts the request, with a prompt of its own.

        The true output length is also its prediction.
        """
        numbers = _pseudo_random(epoch, self._limits.vocab_size)
        return session_pb2.Start(
            epoch=epoch,
            request_id=f"request-{epoch}",
            prompt_ids=[next(numbers) for _ in range(request.prompt_tokens)],
            max_tokens=request.output_tokens,
            predicted_tokens=request.output_tokens,
            sampling=_GREEDY,
            salt=epoch.to_bytes(8, "big"),
        )

    def _played(self, seconds: float, streams: tuple[Stream, ...]) -> RunResult:
        load = self._engine.load()
        return RunResult(
            seconds,
            load.step,
            load.output_tokens,
            load.preemptions,
            load.counters.slot_steps / (load.step * self._limits.max_num_seqs),
            streams,
        )


def _pseudo_random(seed: int, below: int) -> Iterator[int]:
    """Yield pseudo-random numbers from 0 to ``below`` - 1 (Lehmer generator)."""
    state = seed * 7919 + 1
    while True:
        state = state * 48271 % 2147483647
        yield state % below
