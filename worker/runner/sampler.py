"""Sampler: turns logits into the result of each row, with the features that its sequence requests.

    log probabilities   of the model's unchanged logits         worker.runner.logprobs
    logit_bias          is added
    grammar             -inf for every token that it forbids    worker.runner.token_mask
    allowed_token_ids   -inf for all other tokens
    banned_sequences    -inf for tokens that complete one       worker.runner.banned_tokens
    min_tokens          -inf for stop tokens while the output is shorter
    penalties           repetition, frequency, presence         worker.runner.history
    temperature, top_k, top_p, min_p, one uniform number        worker.runner.sampling_backend

Where the order matters, it is that of transformers and, except for min_p, of vLLM. A penalty
depends on the logit's sign, so the bias is added before the penalties, and both precede the
temperature. The masks could be applied anywhere before the filters, because -inf stays -inf. For
greedy rows, everything applies except filters and uniform numbers. vLLM computes log probabilities
after the grammar's mask; this sampler reports those of the model, even for forbidden tokens.

A row with drafts has 1 + len(drafts) rows of logits ("sites"), which are sampled at once. Each site
is sampled as if the drafts before it were part of the output, with the uniform number of its own
position. Tokens after a draft that differs from the token sampled in its place are dropped, so that
the result is the same as without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor

from everlift.errors import EngineFailed, EverliftError
from everlift.sampling import SamplingParams
from worker.device.upload import Parcel, upload
from worker.engine.plan import Admission, Ints, RowResult
from worker.native.argmax import NOT_FINITE
from worker.parallel.agreement import FAILED
from worker.runner.banned_tokens import BannedTokens
from worker.runner.history import Histories, PenalisedRow
from worker.runner.logprobs import CopiedLogits
from worker.runner.sampled_row import SampledRow, SampledSlot
from worker.runner.sampled_tokens import ConcludedRows, SampledTokens
from worker.runner.sampling_backend import SamplingTable, choose_sampling_backend
from worker.runner.sampling_metadata import SampleFn, SamplingMetadata
from worker.runner.token_mask import CompiledGrammar, TokenMask, forbidden, mask_words


class SamplingRequest(NamedTuple):
    """Request to sample output tokens of a slot: one at ``position``, and one per accepted draft.

    ``position`` counts output tokens from 0; ``drafts`` are proposals for ``position`` onwards.
    """

    slot: int
    position: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingRequests:
    """Sampling requests of a step, of n sequences, as columns [n].

    ``drafts`` has the draft tokens of the requests that have any, by index of the request.
    """

    slots: Ints
    positions: Ints
    drafts: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, requests: Sequence[SamplingRequest]) -> Self:
        slots, positions = (np.array([one[i] for one in requests], np.int64) for i in (0, 1))
        drafts = {i: one.drafts for i, one in enumerate(requests) if one.drafts}
        return cls(slots, positions, drafts)

    @property
    def num_sites(self) -> Ints:
        """Return the number of rows of logits of each request, [n]."""
        counts = np.ones(len(self.slots), np.int64)
        for i, drafts in self.drafts.items():
            counts[i] += len(drafts)
        return counts


class PreparedSampling(NamedTuple):
    """Sampling requests, with data that can be prepared before the logits exist.

    The rows of logits of request i begin at ``firsts[i]``. ``sample`` samples tokens from logits.
    """

    requests: SamplingRequests
    firsts: Ints
    sample: SampleFn


class Sampler:
    """Sampler for all slots of a worker, on the rank that has the logits."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, SampledSlot] = {}
        #: slots that only need a sampled token (``is_plain``)
        self._plain: set[int] = set()
        self._table = SamplingTable()
        self._backend = choose_sampling_backend(device)
        self._masks: dict[int, TokenMask] = {}
        self._histories = Histories(device)

    def admit(self, admission: Admission) -> None:
        """Assign the slot of ``admission`` to its sequence; a previous sequence is released."""
        self.release(admission.slot)
        mask, error = _token_mask(admission)
        if mask is not None:
            self._masks[admission.slot] = mask
        slot = self._slots[admission.slot] = SampledSlot(
            admission.slot,
            admission.sampling,
            admission.stop_token_ids,
            bias=self._bias(admission.sampling),
            stop_ids=self._stop_ids(admission),
            mask=mask,
            error=error,
            allowed_ids=self._allowed_ids(admission.sampling),
            banned=_banned_tokens(admission),
        )
        if slot.is_plain:
            self._plain.add(admission.slot)
        self._table.write(admission.slot, admission.sampling, admission.choice)
        self._histories.admit(admission)

    def release(self, slot: int) -> None:
        """Release the slot, and with it the memory of its grammar."""
        self._slots.pop(slot, None)
        self._plain.discard(slot)
        self._masks.pop(slot, None)
        self._histories.release(slot)

    def unready_slots(self) -> frozenset[int]:
        """Return the slots in which sampling would have to wait for a grammar's mask."""
        return frozenset(slot for slot, mask in self._masks.items() if not mask.is_ready())

    def sample(self, logits: Tensor, requests: SamplingRequests) -> list[RowResult]:
        """Sample and return one result per request.

        ``logits`` fp32 [n, vocab] have 1 + len(drafts) rows per request, in the order of the
        requests. They are changed in place.
        """
        return self.launch(logits, self.prepare(requests, Parcel(self._device))).results()

    def prepare(self, requests: SamplingRequests, parcel: Parcel) -> PreparedSampling:
        """Prepare sampling before the logits exist; data for the device is added to ``parcel``."""
        num_sites = requests.num_sites
        firsts = num_sites.cumsum() - num_sites
        metadata = self._metadata(requests, firsts, num_sites)
        return PreparedSampling(requests, firsts, self._backend(metadata, parcel))

    def launch(self, logits: Tensor, prepared: PreparedSampling) -> SampledTokens:
        """Begin to sample from ``logits``.

        The host may have to wait for the masks of grammars. The host waits for the device only if
        Triton does not work on the GPU and a row uses top_k, top_p or min_p. ``logits`` have the
        rows that ``sample`` documents, and are changed in place. ``results`` of the returned object
        must be called before the next launch.
        """
        requests, firsts, sample = prepared
        rows = self._rows(requests, firsts)
        num_top = _num_top(rows.values())
        copied = CopiedLogits(logits, num_top) if num_top else None
        broken = self._process_logits(
            logits, [row for row in rows.values() if row.needs_logits_processing]
        )
        tokens = sample(logits)
        if broken is not None:
            tokens = tokens.masked_fill(broken, NOT_FINITE)
        # Errors become markers, because the other ranks only receive tokens.
        if failed := [row.first for row in rows.values() if row.error is not None]:
            tokens = tokens.index_fill(0, self._upload(failed), FAILED)
        logprobs = copied.logprobs(tokens) if copied is not None else None
        return SampledTokens(tokens, firsts, rows, logprobs, self._record_results)

    def _rows(self, requests: SamplingRequests, firsts: Ints) -> dict[int, SampledRow]:
        return {
            i: self._row(
                slot, int(requests.positions[i]), requests.drafts.get(i, ()), int(firsts[i])
            )
            for i, slot in enumerate(requests.slots.tolist())
            if slot not in self._plain or i in requests.drafts
        }

    def _row(self, slot: int, position: int, drafts: tuple[int, ...], first: int) -> SampledRow:
        sampled_slot = self._slots[slot]
        return SampledRow(sampled_slot, position, drafts, first, len(drafts), sampled_slot.error)

    def _metadata(
        self, requests: SamplingRequests, firsts: Ints, num_sites: Ints
    ) -> SamplingMetadata:
        if not requests.drafts:
            return self._table.metadata(requests.slots, requests.positions)
        positions = (requests.positions - firsts).repeat(num_sites) + np.arange(num_sites.sum())
        return self._table.metadata(requests.slots.repeat(num_sites), positions)

    # changes of the logits before the temperature

    def _process_logits(self, logits: Tensor, rows: Sequence[SampledRow]) -> Tensor | None:
        """Apply bias, masks, bans, min_tokens and penalties to the logits of ``rows``, in place.

        ``logits`` are [n, vocab]. Returns bool [n], one item per row of logits, or None if ``rows``
        is empty. An item is True if its row of logits belongs to one of ``rows``, and had a NaN, a
        +inf or only -inf before the changes.
        """
        if not rows:
            return None
        broken = torch.zeros(len(logits), dtype=torch.bool, device=self._device)
        sites = self._upload(_sites(rows))
        broken[sites] = ~logits[sites].amax(dim=-1).isfinite()
        self._add_bias(logits, rows)
        self._apply_masks(logits, [row for row in rows if row.slot.mask is not None])
        self._keep_allowed(logits, [row for row in rows if row.slot.allowed_ids is not None])
        self._ban_tokens(logits, [pair for row in rows for pair in row.banned_tokens()])
        self._ban_stops(logits, rows)
        self._penalise(logits, [row for row in rows if row.slot.sampling.has_penalties])
        return broken

    def _add_bias(self, logits: Tensor, rows: Iterable[SampledRow]) -> None:
        biased = [
            (site, *row.slot.bias)
            for row in rows
            if row.slot.bias is not None
            for site in row.sites
        ]
        if biased:
            cells = self._cells([(site, ids) for site, ids, _ in biased])
            logits[cells] += torch.cat([values for _, _, values in biased])

    def _apply_masks(self, logits: Tensor, rows: Sequence[SampledRow]) -> None:
        if rows:
            lengths = [len(row.sites) for row in rows]
            bits = torch.empty(sum(lengths), mask_words(self._vocab_size), dtype=torch.int32)
            waiting_since = time.monotonic()
            for row, lines in zip(rows, bits.split_with_sizes(lengths), strict=True):
                row.fill_mask(lines, waiting_since)
            sites = self._upload(_sites(rows))
            barred = forbidden(upload(bits, self._device, bits.dtype), self._vocab_size)
            logits[sites] = logits[sites].masked_fill_(barred, -torch.inf)

    def _keep_allowed(self, logits: Tensor, rows: Sequence[SampledRow]) -> None:
        cells = [
            (site, row.slot.allowed_ids)
            for row in rows
            if row.slot.allowed_ids is not None
            for site in row.sites
        ]
        if cells:
            kept = self._cells(cells)
            values = logits[kept]
            logits[self._upload(_sites(rows))] = -torch.inf
            logits[kept] = values

    def _ban_tokens(self, logits: Tensor, banned: Sequence[tuple[int, int]]) -> None:
        pairs = [(site, token) for site, token in banned if token < self._vocab_size]
        if pairs:
            sites, tokens = zip(*pairs, strict=True)
            logits[self._upload(sites), self._upload(tokens)] = -torch.inf

    def _ban_stops(self, logits: Tensor, rows: Iterable[SampledRow]) -> None:
        cells = [
            (site, row.slot.stop_ids)
            for row in rows
            if row.slot.stop_ids is not None
            for site in row.banned_sites
        ]
        if cells:
            logits[self._cells(cells)] = -torch.inf

    def _penalise(self, logits: Tensor, rows: Sequence[SampledRow]) -> None:
        if rows:
            penalised = [
                PenalisedRow(row.slot.number, row.first, row.slot.sampling, row.drafts)
                for row in rows
            ]
            self._histories.penalise(logits, penalised)

    def _record_results(self, concluded: ConcludedRows) -> None:
        """Record sampled tokens for penalties, except for sequences that have left their slots."""
        self._histories.advance(
            (row.slot.number, result.tokens)
            for row, result in concluded
            if row.slot.sampling.has_penalties and self._slots.get(row.slot.number) is row.slot
        )

    # tensors

    def _cells(self, cells: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        lengths = [len(ids) for _, ids in cells]
        sites = self._upload([site for site, _ in cells])
        sites = sites.repeat_interleave(self._upload(lengths), output_size=sum(lengths))
        return sites, torch.cat([ids for _, ids in cells])

    def _bias(self, sampling: SamplingParams) -> tuple[Tensor, Tensor] | None:
        bias = [(token, value) for token, value in sampling.logit_bias if token < self._vocab_size]
        if not bias:
            return None
        ids, values = zip(*bias, strict=True)
        return self._upload(ids), upload(values, self._device, torch.float32)

    def _allowed_ids(self, sampling: SamplingParams) -> Tensor | None:
        ids = [token for token in sampling.allowed_token_ids if token < self._vocab_size]
        return self._upload(ids) if sampling.allowed_token_ids else None

    def _stop_ids(self, admission: Admission) -> Tensor | None:
        ids = [token for token in admission.stop_token_ids if token < self._vocab_size]
        return self._upload(ids) if ids and admission.sampling.min_tokens else None

    def _upload(self, values: Sequence[int]) -> Tensor:
        return upload(values, self._device)


def _token_mask(admission: Admission) -> tuple[TokenMask | None, EverliftError | None]:
    if admission.sampling.grammar is None:
        return None, None
    if admission.grammar is None:
        return None, EngineFailed("the sequence's grammar was not compiled")
    output = admission.tokens[admission.num_prompt :]
    try:
        grammar = cast(CompiledGrammar, admission.grammar)
        return grammar.matcher(admission.stop_token_ids, output), None
    except EverliftError as error:
        return None, error


def _banned_tokens(admission: Admission) -> BannedTokens | None:
    sequences = admission.sampling.banned_sequences
    output = admission.tokens[admission.num_prompt :]
    return BannedTokens(sequences, output) if sequences else None


def _sites(rows: Iterable[SampledRow]) -> list[int]:
    return [site for row in rows for site in row.sites]


def _num_top(rows: Iterable[SampledRow]) -> dict[int, int]:
    return {
        site: row.slot.sampling.logprobs
        for row in rows
        if row.slot.sampling.logprobs is not None
        for site in row.sites
    }
