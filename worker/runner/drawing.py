"""Sampled tokens of a step that are being computed on the device or copied to the host."""

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
        """Store the sampled ``tokens`` int64 [n] of ``slots`` int64 [n].

        A negative marker, which stands for a row that could not be sampled, is stored as token 0,
        because everything computed after it is discarded.
        """
        self._tokens.index_copy_(0, slots, tokens.clamp(min=0))

    def fill_in(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Return ``tokens`` int64 [T]; if one is UNKNOWN, the last token of its slot replaces it.

        ``slots`` [T] has the slot of each token.
        """
        return torch.where(tokens < 0, self._tokens[slots], tokens)


Concluded = Iterable[tuple[SampledRow, RowResult]]


class Drawn(Protocol):
    def results(self) -> list[RowResult]:
        """Wait for the device and return one result per sampling request."""
        ...


class Drawing:
    """Sampling in progress on this rank.

    ``tokens`` int64 are the sampled tokens on the device, one per row of logits; those of sampling
    request i begin at index ``firsts[i]``. ``rows`` has, by index of the request, the rows that
    have drafts, log probabilities, penalties or a grammar. ``logprobs`` are the log probabilities
    to report, or None. Once the results exist, ``take_in`` is called with pairs of each of ``rows``
    and its result.
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
        """Wait for the device and return one result per sampling request."""
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
    """Tokens that rank 0 sampled for rows without drafts, being copied to this rank's host.

    ``tokens`` int64 [n] are on this rank's device, one per sampling request.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._arriving = Arriving(tokens)

    def results(self) -> list[RowResult]:
        return from_tokens(self._arriving.wait())
