"""Sampler: from logits to the result of each row, by the features that its sequence requested.

    log probabilities   of the logits as the model made them    worker.runner.logprobs
    logit_bias          is added
    grammar             -inf for every token that it forbids    worker.runner.token_mask
    min_tokens          -inf for stop tokens before their time
    penalties           repetition, frequency, presence         worker.runner.history
    temperature, top_k, top_p, min_p, one uniform number        worker.runner.draw

Where the order shows, it is that of transformers and vLLM: a penalty scales by the logit's sign, so
the bias comes before it, and both come before the temperature. The masks could stand anywhere,
since -inf stays -inf. A greedy row has all of it except filters and chance. vLLM takes log
probabilities behind the grammar's mask; here they are what the model thinks, whatever is allowed.

A row with drafts is drawn at 1 + len(drafts) sites in one go, each as if the drafts before it were
output already, with the uniform number of its own position. What is drawn behind a draft that was
not drawn itself is dropped, so what remains is what would have been drawn without any drafts.
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
from worker.runner.draw import DrawTable, choose_draw
from worker.runner.drawing import Concluded, Drawing
from worker.runner.draws import DrawFrom, Draws
from worker.runner.history import Histories, PenalisedRow
from worker.runner.logprobs import KeptLogits
from worker.runner.sampled_row import SampledRow, SampledSlot
from worker.runner.token_mask import CompiledGrammar, TokenMask, forbidden, mask_words


class Ask(NamedTuple):
    """Sample the token at ``position`` of the output, and those after accepted ``drafts``."""

    slot: int
    position: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Asks:
    """Parameters of all rows of a step, as columns [n]; ``drafts`` by row."""

    slots: Ints
    positions: Ints
    drafts: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, asks: Sequence[Ask]) -> Self:
        slots, positions = (np.array([ask[i] for ask in asks], np.int64) for i in (0, 1))
        drafts = {i: ask.drafts for i, ask in enumerate(asks) if ask.drafts}
        return cls(slots, positions, drafts)

    @property
    def num_sites(self) -> Ints:
        """Return [n]: the number of sites of each row."""
        counts = np.ones(len(self.slots), np.int64)
        for i, drafts in self.drafts.items():
            counts[i] += len(drafts)
        return counts


class Prepared(NamedTuple):
    """Prepared ``asks``; the sites of ask i begin at ``firsts`` [n]."""

    asks: Asks
    firsts: Ints
    draw: DrawFrom


class Sampler:
    """Draws for all slots of a worker, on the rank that has the logits."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, SampledSlot] = {}
        #: those of them for which nothing is done but to draw
        self._plain: set[int] = set()
        self._table = DrawTable()
        self._draw = choose_draw(device)
        self._masks: dict[int, TokenMask] = {}
        self._histories = Histories(device)

    def admit(self, admission: Admission) -> None:
        """Assign the slot to a sequence."""
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
        )
        if slot.is_plain:
            self._plain.add(admission.slot)
        self._table.write(admission.slot, admission.sampling, admission.choice)
        self._histories.admit(admission)

    def release(self, slot: int) -> None:
        """Free the slot, so that its grammar's memory can be freed."""
        self._slots.pop(slot, None)
        self._plain.discard(slot)
        self._masks.pop(slot, None)
        self._histories.release(slot)

    def unready_slots(self) -> frozenset[int]:
        """Return the slots in which sampling would wait for a grammar."""
        return frozenset(slot for slot, mask in self._masks.items() if not mask.is_ready())

    def sample(self, logits: Tensor, asks: Asks) -> list[RowResult]:
        """Return a result for each ask.

        ``logits`` fp32 [n, vocab] have 1 + len(drafts) rows for each, one ask's behind the other's;
        they are changed.
        """
        return self.launch(logits, self.prepare(asks, Parcel(self._device))).results()

    def prepare(self, asks: Asks, parcel: Parcel) -> Prepared:
        """Prepare ``asks`` before there are logits; the data goes to the device with ``parcel``."""
        num_sites = asks.num_sites
        firsts = num_sites.cumsum() - num_sites
        return Prepared(asks, firsts, self._draw(self._draws(asks, firsts, num_sites), parcel))

    def launch(self, logits: Tensor, prepared: Prepared) -> Drawing:
        """Sample without waiting for the device. Get the results before the next call."""
        asks, firsts, draw = prepared
        rows = self._rows(asks, firsts)
        num_top = _num_top(rows.values())
        kept = KeptLogits(logits, num_top) if num_top else None
        broken = self._shape(logits, [row for row in rows.values() if row.is_shaped])
        tokens = draw(logits)
        if broken is not None:
            tokens = tokens.masked_fill(broken, NOT_FINITE)
        # The other ranks see tokens alone.
        if failed := [row.first for row in rows.values() if row.error is not None]:
            tokens = tokens.index_fill(0, self._upload(failed), FAILED)
        logprobs = kept.logprobs(tokens) if kept is not None else None
        return Drawing(tokens, firsts, rows, logprobs, self._take_in)

    def _rows(self, asks: Asks, firsts: Ints) -> dict[int, SampledRow]:
        return {
            i: self._row(slot, int(asks.positions[i]), asks.drafts.get(i, ()), int(firsts[i]))
            for i, slot in enumerate(asks.slots.tolist())
            if slot not in self._plain or i in asks.drafts
        }

    def _row(self, slot: int, position: int, drafts: tuple[int, ...], first: int) -> SampledRow:
        this = self._slots[slot]
        return SampledRow(this, position, drafts, first, len(drafts), this.error)

    def _draws(self, asks: Asks, firsts: Ints, num_sites: Ints) -> Draws:
        if not asks.drafts:
            return self._table.draws(asks.slots, asks.positions)
        positions = (asks.positions - firsts).repeat(num_sites) + np.arange(num_sites.sum())
        return self._table.draws(asks.slots.repeat(num_sites), positions)

    # what comes before the temperature

    def _shape(self, logits: Tensor, rows: Sequence[SampledRow]) -> Tensor | None:
        """Change the logits of ``rows``, if there are any.

        bool [n]: those that were not finite numbers before.
        """
        if not rows:
            return None
        broken = torch.zeros(len(logits), dtype=torch.bool, device=self._device)
        sites = self._upload(_sites(rows))
        broken[sites] = ~logits[sites].amax(dim=-1).isfinite()
        self._add_bias(logits, rows)
        self._apply_masks(logits, [row for row in rows if row.slot.mask is not None])
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
            began = time.monotonic()
            for row, lines in zip(rows, bits.split_with_sizes(lengths), strict=True):
                row.fill_mask(lines, began)
            sites = self._upload(_sites(rows))
            barred = forbidden(upload(bits, self._device, bits.dtype), self._vocab_size)
            logits[sites] = logits[sites].masked_fill_(barred, -torch.inf)

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

    def _take_in(self, concluded: Concluded) -> None:
        """Record results; some sequences may have left their slots since."""
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

    def _stop_ids(self, admission: Admission) -> Tensor | None:
        ids = [token for token in admission.stop_token_ids if token < self._vocab_size]
        return self._upload(ids) if ids and admission.sampling.min_tokens else None

    def _upload(self, values: Sequence[int]) -> Tensor:
        return upload(values, self._device)


def _token_mask(admission: Admission) -> tuple[TokenMask | None, EverliftError | None]:
    if admission.sampling.grammar is None:
        return None, None
    if admission.grammar is None:
        return None, EngineFailed("its grammar was not compiled")
    output = admission.tokens[admission.num_prompt :]
    try:
        grammar = cast(CompiledGrammar, admission.grammar)
        return grammar.matcher(admission.stop_token_ids, output), None
    except EverliftError as error:
        return None, error


def _sites(rows: Iterable[SampledRow]) -> list[int]:
    return [site for row in rows for site in row.sites]


def _num_top(rows: Iterable[SampledRow]) -> dict[int, int]:
    return {
        site: row.slot.sampling.logprobs
        for row in rows
        if row.slot.sampling.logprobs is not None
        for site in row.sites
    }
