"""Sampled tokens of a step, from the device to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from worker.device.streams import Arriving
from worker.engine.plan import Ints, RowResult
from worker.parallel.agreement import from_tokens
from worker.runner.logprobs import ArrivingScores
from worker.runner.sampled_row import SampledRow, plain_results


class LastTokens:
    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def write(self, slots: Tensor, tokens: Tensor) -> None:
        """Write the drawn ``tokens`` int64 [n] of ``slots`` int64 [n].

        A mark, of a row from which none could be drawn, becomes some token: what follows it is
        thrown away.
        """
        self._tokens.index_copy_(0, slots, tokens.clamp(min=0))

    def fill_in(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Replace UNKNOWN in ``tokens`` int64 [T] by the last draw of ``slots`` int64 [T]."""
        return torch.where(tokens < 0, self._tokens[slots], tokens)


Concluded = Iterable[tuple[SampledRow, RowResult]]


class Drawn(Protocol):
    def results(self) -> list[RowResult]:
        """Return one result for each ask. Waits for the device."""
        ...


class Drawing:
    """Sampling in progress on this rank.

    ``tokens`` int64 [sites] are on the device, those of ask i from ``firsts`` [n] on. ``rows`` has
    the asks that are not plain, ``logprobs`` what is reported by site. ``take_in`` gets the results
    of ``rows``.
    """

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
        """Return one result for each ask. Waits for the device."""
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
    """Tokens sampled by rank 0. ``tokens`` int64 [asks], without drafts, are on the device."""

    def __init__(self, tokens: Tensor) -> None:
        self._arriving = Arriving(tokens)

    def results(self) -> list[RowResult]:
        return from_tokens(self._arriving.wait())
