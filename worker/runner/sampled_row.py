"""Row to sample: its slot, the position of its logits, and its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from everlift.errors import EngineFailed, EverliftError
from everlift.sampling import SamplingParams, TokenLogprobs
from worker.engine.plan import RowResult
from worker.native.argmax import NOTHING_LEFT
from worker.runner.banned_tokens import BannedTokens
from worker.runner.token_mask import TokenMask

NOT_FINITE_CAUSE = "the model's logits are not finite numbers"


@dataclass(frozen=True, slots=True)
class SampledSlot:
    """Slot (number in the batch) of one sequence, with the sequence's sampling parameters.

    ``bias`` has token ids and the values to add to their logits. ``stop_ids`` are the stop tokens
    that may not be sampled while the output has fewer than min_tokens. ``mask`` is the sequence's
    state in its grammar. Only ``allowed_ids`` may be sampled, unless it is None, and none of the
    ``banned`` tokens. With an ``error`` nothing can be sampled.
    """

    number: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    bias: tuple[Tensor, Tensor] | None
    stop_ids: Tensor | None
    mask: TokenMask | None
    error: EverliftError | None
    allowed_ids: Tensor | None = None
    banned: BannedTokens | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether only temperature and filters affect sampling, and only tokens are needed.

        The result is False with penalties, bias, a grammar, stop tokens that min_tokens forbids,
        allowed or banned tokens, requested log probabilities or an error.
        """
        edited = self.bias is not None or self.mask is not None or self.stop_ids is not None
        reported = self.sampling.logprobs is not None or self.error is not None
        sampling = self.sampling
        return not (edited or reported or sampling.has_penalties or sampling.has_restrictions)


@dataclass(slots=True)
class SampledRow:
    """Row to sample, whose logits begin at row ``first`` of the step's logits.

    ``position`` is the position of its next token in the output. Of the ``drafts``, only the first
    ``num_allowed`` may be accepted: all, or with a grammar the number that TokenMask.mask returned.
    """

    slot: SampledSlot
    position: int
    drafts: tuple[int, ...]
    first: int
    num_allowed: int
    error: EverliftError | None

    @property
    def sites(self) -> range:
        """Return the indices of this row's logits among the step's rows of logits.

        There is one for the next token, and one more after each draft.
        """
        return range(self.first, self.first + 1 + len(self.drafts))

    @property
    def banned_sites(self) -> range:
        """Return the part of ``sites`` at which min_tokens forbids stop tokens."""
        if self.slot.stop_ids is None:
            return range(0)
        return self.sites[: max(0, self.slot.sampling.min_tokens - self.position)]

    @property
    def needs_logits_processing(self) -> bool:
        """Return whether this row's logits are changed before temperature and filters."""
        slot, sampling = self.slot, self.slot.sampling
        edited = slot.bias is not None or slot.mask is not None or bool(self.banned_sites)
        return edited or sampling.has_penalties or sampling.has_restrictions

    def banned_tokens(self) -> Iterator[tuple[int, int]]:
        """Yield pairs (site, token): the tokens that would complete a banned sequence at each site.

        Only ``slot.banned`` counts: min_tokens, the grammar and ``allowed_ids`` neither add nor
        remove pairs.
        """
        if self.slot.banned is not None:
            for index, site in enumerate(self.sites):
                for token in self.slot.banned.after(self.drafts[:index]):
                    yield site, token

    def fill_mask(self, into: Tensor, waiting_since: float) -> None:
        """Write the grammar's masks to ``into``; store the number of acceptable drafts.

        ``num_allowed`` is set to the number of leading drafts that may be accepted. ``into`` is
        int32 [1 + len(drafts), words]; see TokenMask.mask. An EverliftError of the grammar is not
        raised, but stored as the row's ``error``.
        """
        assert self.slot.mask is not None
        try:
            self.num_allowed = self.slot.mask.mask(self.drafts, into, waiting_since)
        except EverliftError as error:
            self.error = error

    def conclude(self, sampled: Sequence[int], logprobs: Mapping[int, TokenLogprobs]) -> RowResult:
        """Return the row's result, and advance its grammar and bans by the tokens that it keeps.

        ``sampled`` has the sampled token of every row of the step's logits. ``logprobs`` has the
        log probabilities to report, by index of the row of logits. The result has an error if this
        row has an ``error``, or if no token can be sampled.
        """
        if self.error is not None:
            return RowResult(error=self.error)
        own = [sampled[site] for site in self.sites]
        tokens = _accepted_tokens(own, self.drafts[: self.num_allowed], self.slot.stop_token_ids)
        if not tokens:
            return RowResult(error=self._cause(own[0]))
        if self.slot.mask is not None:
            self.slot.mask.accept(tokens)
        if self.slot.banned is not None:
            self.slot.banned.accept(tokens)
        reported = [logprobs[site] for site in self.sites[: len(tokens)] if site in logprobs]
        return RowResult(tuple(tokens), tuple(reported))

    def _cause(self, mark: int) -> EverliftError:
        in_force = ["the grammar"] if self.slot.mask is not None else []
        in_force += ["min_tokens"] if self.banned_sites else []
        in_force += ["allowed_token_ids"] if self.slot.allowed_ids is not None else []
        in_force += ["bad_words"] if self.slot.banned is not None else []
        if mark == NOTHING_LEFT and in_force:
            return EngineFailed(f"no token is left to sample: excluded by {' and '.join(in_force)}")
        return EngineFailed(NOT_FINITE_CAUSE)


def plain_results(sampled: Sequence[int]) -> list[RowResult]:
    """Return the results of rows without drafts, from their sampled tokens alone.

    ``sampled`` has one sampled token or negative marker per row; a marker becomes an error.
    """
    results = [*map(RowResult, zip(sampled, strict=True))]
    if min(sampled) < 0:
        failed = RowResult(error=EngineFailed(NOT_FINITE_CAUSE))
        return [failed if result.tokens[0] < 0 else result for result in results]
    return results


def _accepted_tokens(
    sampled: Sequence[int], drafts: Sequence[int], stops: frozenset[int]
) -> list[int]:
    """Return the tokens of ``sampled`` up to and including the first non-draft or stop token.

    A token is a non-draft if it differs from the draft at its index, or there is no such draft. The
    result ends before a negative marker; the next step samples that position again, as its first.
    """
    accepted: list[int] = []
    for token, draft in zip_longest(sampled, drafts):
        if token < 0:
            break
        accepted.append(token)
        if token != draft or token in stops:
            break
    return accepted
