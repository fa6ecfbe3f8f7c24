"""Sampled tokens of a step that are being computed on the device or copied to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from worker.device.streams import HostCopy
from worker.engine.plan import Ints, RowResult
from worker.parallel.agreement import from_tokens
from worker.runner.logprobs import PendingScores
from worker.runner.sampled_row import SampledRow, plain_results


class LastTokens:
    """Last sampled token of every slot, on the device.

    Steps that are launched before the host knows these tokens read them here.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def write(self, slots: Tensor, tokens: Tensor) -> None:
        """Store the sampled ``tokens`` int64 [n] of ``slots`` int64 [n].

        A negative marker, which stands for a row that could not be sampled, is stored as token 0,
        because everything computed after it is discarded.
        """
        self._tokens.index_copy_(0, slots, tokens.clamp(min=0))

    def fill_in(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Return ``tokens`` int64 [T], with each UNKNOWN replaced by the last token of its slot.

        ``slots`` int64 [T] has the slot of each token.
        """
        return torch.where(tokens < 0, self._tokens[slots], tokens)


ConcludedRows = Iterable[tuple[SampledRow, RowResult]]


class PendingResults(Protocol):
    def results(self) -> list[RowResult]:
        """Wait for the device and return the result of each SamplingRequest, in their order."""
        ...


class SampledTokens:
    """Tokens sampled on this rank, being computed or copied to its host.

    ``tokens`` int64 are the sampled tokens on the device, one per row of logits; those of sampling
    request i begin at index ``firsts[i]``. ``rows`` has, by index of the request, the rows that
    have drafts or whose slot is not plain (SampledSlot.is_plain). ``logprobs`` are the log
    probabilities to report, or None. ``results`` calls ``record_results`` with an iterable of pairs
    (row, result), one for each of ``rows``.
    """

    def __init__(
        self,
        tokens: Tensor,
        firsts: Ints,
        rows: Mapping[int, SampledRow],
        logprobs: PendingScores | None,
        record_results: Callable[[ConcludedRows], None],
    ) -> None:
        self.tokens = tokens
        self._firsts = firsts
        self._rows = rows
        self._logprobs = logprobs
        self._record_results = record_results
        self._copy = HostCopy(tokens)

    def results(self) -> list[RowResult]:
        """Wait for the device and return the result of each SamplingRequest, in their order."""
        tokens = self._copy.wait()
        has_drafts = len(tokens) > len(self._firsts)
        first = [tokens[i] for i in self._firsts.tolist()] if has_drafts else tokens
        results = plain_results(first)
        logprobs = {} if self._logprobs is None else self._logprobs.wait()
        for i, row in self._rows.items():
            results[i] = row.conclude(tokens, logprobs)
        self._record_results((row, results[i]) for i, row in self._rows.items())
        return results


class ReceivedTokens:
    """Tokens that rank 0 sampled for rows without drafts, being copied to this rank's host.

    ``tokens`` int64 [n] are on this rank's device, one per sampling request.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._copy = HostCopy(tokens)

    def results(self) -> list[RowResult]:
        return from_tokens(self._copy.wait())
