"""A row that is to be drawn: whose it is, where its logits are, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from everlift.errors import EngineFailed, EverliftError
from everlift.sampling import SamplingParams, TokenLogprobs
from worker.engine.plan import RowResult
from worker.native.argmax import NOTHING_LEFT
from worker.runner.token_mask import TokenMask

NOT_FINITE_CAUSE = "the model's logits are not finite numbers"


@dataclass(frozen=True, slots=True)
class SampledSlot:
    """Slot of one sequence.

    ``bias`` has token ids and their additions; ``stop_ids`` are those that min_tokens holds back.
    With an ``error`` nothing can be sampled.
    """

    number: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    bias: tuple[Tensor, Tensor] | None
    stop_ids: Tensor | None
    mask: TokenMask | None
    error: EverliftError | None

    @property
    def is_plain(self) -> bool:
        """Return whether the row only draws one token and reports nothing but that token."""
        edited = self.bias is not None or self.mask is not None or self.stop_ids is not None
        told = self.sampling.logprobs is not None or self.error is not None
        return not (edited or told or self.sampling.has_penalties)


@dataclass(slots=True)
class SampledRow:
    """Sampled row whose logits begin at ``first``; a grammar allows ``num_allowed`` drafts."""

    slot: SampledSlot
    position: int
    drafts: tuple[int, ...]
    first: int
    num_allowed: int
    error: EverliftError | None

    @property
    def sites(self) -> range:
        """Rows of its logits."""
        return range(self.first, self.first + 1 + len(self.drafts))

    @property
    def banned_sites(self) -> range:
        """Sites where no stop token may be drawn."""
        if self.slot.stop_ids is None:
            return range(0)
        return self.sites[: max(0, self.slot.sampling.min_tokens - self.position)]

    @property
    def is_shaped(self) -> bool:
        """Return whether the logits are changed before the temperature."""
        slot = self.slot
        edited = slot.bias is not None or slot.mask is not None or slot.sampling.has_penalties
        return edited or bool(self.banned_sites)

    def fill_mask(self, into: Tensor, began: float) -> None:
        """Write the tokens that the grammar allows into ``into`` int32 [sites, words].

        ``began`` as for a TokenMask.
        """
        assert self.slot.mask is not None
        try:
            self.num_allowed = self.slot.mask.mask(self.drafts, into, began)
        except EverliftError as error:
            self.error = error

    def conclude(self, drawn: Sequence[int], logprobs: Mapping[int, TokenLogprobs]) -> RowResult:
        """Return the result; ``drawn`` has a token per site, ``logprobs`` those to report.

        The grammar goes on by the tokens that the row keeps.
        """
        if self.error is not None:
            return RowResult(error=self.error)
        own = [drawn[site] for site in self.sites]
        tokens = _kept(own, self.drafts[: self.num_allowed], self.slot.stop_token_ids)
        if not tokens:
            return RowResult(error=self._cause(own[0]))
        if self.slot.mask is not None:
            self.slot.mask.accept(tokens)
        told = [logprobs[site] for site in self.sites[: len(tokens)] if site in logprobs]
        return RowResult(tuple(tokens), tuple(told))

    def _cause(self, mark: int) -> EverliftError:
        in_force = ["the grammar"] if self.slot.mask is not None else []
        in_force += ["min_tokens"] if self.banned_sites else []
        if mark == NOTHING_LEFT and in_force:
            return EngineFailed(f"no token is left to sample from by {' and '.join(in_force)}")
        return EngineFailed(NOT_FINITE_CAUSE)


def plain_results(drawn: Sequence[int]) -> list[RowResult]:
    """Return the results of plain slots without drafts, each with a drawn token or a mark."""
    results = [*map(RowResult, zip(drawn, strict=True))]
    if min(drawn) < 0:
        failed = RowResult(error=EngineFailed(NOT_FINITE_CAUSE))
        return [failed if result.tokens[0] < 0 else result for result in results]
    return results


def _kept(drawn: Sequence[int], drafts: Sequence[int], stops: frozenset[int]) -> list[int]:
    """Return ``drawn`` up to the first token that is not its draft or is a stop.

    It also ends before the first site without a token: the next step meets that again, without
    drafts.
    """
    kept: list[int] = []
    for token, draft in zip_longest(drawn, drafts):
        if token < 0:
            break
        kept.append(token)
        if token != draft or token in stops:
            break
    return kept
