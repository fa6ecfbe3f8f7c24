"""What a step draws, from when the device is told to until the host knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from worker.device.download import Arriving
from worker.engine.plan import Ints, RowResult
from worker.parallel.agreement import from_tokens
from worker.runner.logprobs import ArrivingScores
from worker.runner.sampled_row import SampledRow, plain_results

Concluded = Iterable[tuple[SampledRow, RowResult]]


class Drawn(Protocol):
    def results(self) -> list[RowResult]:
        """One for each ask. Waits for the device."""
        ...


class Drawing:
    """What this rank draws. ``tokens`` int64 [sites] are on the device, those of ask i from
    ``firsts`` [n] on. ``rows`` has, by ask, those that are not plain, and ``logprobs`` by site what
    is told. ``take_in`` hears what became of ``rows``."""

    def __init__(
        self,
        tokens: Tensor,
        firsts: Ints,
        rows: Mapping[int, SampledRow],
        logprobs: ArrivingScores | None,
        take_in: Callable[[Concluded], None],
    ) -> None:
        self.tokens = tokens
        self._firsts = firsts
        self._rows = rows
        self._logprobs = logprobs
        self._take_in = take_in
        self._arriving = Arriving(tokens)

    def results(self) -> list[RowResult]:
        """One for each ask. Waits for the device."""
        drawn = self._arriving.wait()
        has_drafts = len(drawn) > len(self._firsts)
        first = [drawn[i] for i in self._firsts.tolist()] if has_drafts else drawn
        results = plain_results(first)
        logprobs = {} if self._logprobs is None else self._logprobs.wait()
        for i, row in self._rows.items():
            results[i] = row.conclude(drawn, logprobs)
        self._take_in((row, results[i]) for i, row in self._rows.items())
        return results


class Hearing:
    """What rank 0 draws. ``tokens`` int64 [asks], none of which has drafts, are on the device."""

    def __init__(self, tokens: Tensor) -> None:
        self._arriving = Arriving(tokens)

    def results(self) -> list[RowResult]:
        return from_tokens(self._arriving.wait())
