"""Tokens that occurred in a sequence, and the penalties on their logits.

    repetition   every token of prompt and output: logit / penalty, or logit * penalty if negative
    frequency    every token of the output: logit - penalty * (occurrences in the output)
    presence     every token of the output: logit - penalty

Definitions and order are those of transformers, vLLM and OpenAI's API. Two tables on the device
have one row per slot, with one entry per distinct token that occurred. For a sequence without a
repetition penalty, only tokens of the output are stored:

    tokens  int64  [slots, entries]   |-- known, in the order of occurrence --|-- drafted --|
    counts  fp32   [slots, entries]   |-- occurrences in the output ----------|-- zeros ----|

A step uploads only what it adds, and touches only tokens that occurred, not the whole vocabulary.
The number of its torch calls does not depend on the number of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from everlift.sampling import SamplingParams
from worker.device.upload import upload
from worker.engine.plan import Admission


class PenalisedRow(NamedTuple):
    """Row with penalties, which has one row of logits, and one more for each of ``drafts``.

    Row ``first`` of the logits is followed by one row per draft, for the token after the draft.
    """

    slot: int
    first: int
    sampling: SamplingParams
    drafts: tuple[int, ...] = ()


class _Cell(NamedTuple):
    slot: int
    place: int
    token: int


class _Site(NamedTuple):
    """Row ``row`` of the logits, and the tokens to penalise in it.

    These are the first ``length`` entries of the slot's row in the tables. ``drafted`` has the
    entry index of each draft that precedes this row in its sequence; each draft counts as one more
    occurrence in the output.
    """

    row: int
    slot: int
    length: int
    drafted: list[int]
    sampling: SamplingParams


class Histories:
    """Tokens that occurred in the sequences with penalties, by slot (number in the batch)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[int, dict[int, int]] = {}
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, 0, dtype=torch.float32, device=device)

    def admit(self, admission: Admission) -> None:
        """Assign the slot to a sequence; store the sequence's tokens so far if it has penalties."""
        slot = admission.slot
        self.release(slot)
        if not admission.sampling.has_penalties:
            return
        counts = _counts(admission)
        self._places[slot] = {token: place for place, token in enumerate(counts)}
        self._reserve(slot + 1, len(counts))
        self._tokens[slot, : len(counts)] = self._upload(list(counts))
        self._counts[slot] = 0
        times = self._upload(list(counts.values()), torch.float32)
        self._counts[slot, : len(counts)] = times

    def release(self, slot: int) -> None:
        self._places.pop(slot, None)

    def advance(self, sampled: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Store sampled tokens as output, given as pairs (slot, its new tokens).

        Every slot must have been admitted with penalties.
        """
        cells = [cell for slot, tokens in sampled for cell in self._append(slot, tokens)]
        if cells:
            slots, places = self._write(cells)
            once = torch.ones(len(cells), device=self._device)
            self._counts.index_put_((slots, places), once, accumulate=True)

    def penalise(self, logits: Tensor, rows: Sequence[PenalisedRow]) -> None:
        """Apply the penalties of ``rows`` to ``logits`` fp32 [n, vocab] in place.

        There must be at least one row, and each must be of a slot admitted with penalties.
        """
        cells = [self._draft_cells(row) for row in rows]
        # Reserve the memory for the sampled tokens now: ``advance`` must not run out of memory.
        longest = (len(self._places[row.slot]) + len(row.drafts) for row in rows)
        self._reserve(0, 1 + max(longest))
        self._write([cell for of_row in cells for cell in of_row])
        sites = [
            site
            for row, of_row in zip(rows, cells, strict=True)
            for site in self._sites(row, [cell.place for cell in of_row])
        ]
        self._penalise(logits, sites)

    def _penalise(self, logits: Tensor, sites: Sequence[_Site]) -> None:
        lengths = [site.length for site in sites]
        *starts, total = accumulate(lengths, initial=0)
        lines = [site.slot * self._tokens.shape[1] for site in sites]
        rows = [site.row * logits.stride(0) for site in sites]
        counts, start, line, row = self._upload([lengths, starts, lines, rows])
        spread = partial(torch.repeat_interleave, repeats=counts, output_size=total)
        place = torch.arange(total, device=self._device) + spread(line - start)
        draft_indices = [
            begin + p for s, begin in zip(sites, starts, strict=True) for p in s.drafted
        ]
        times = self._times(place, draft_indices)
        penalties = [spread(column) for column in self._penalties(sites)]
        at = self._tokens.flatten().index_select(0, place) + spread(row)
        flat = _flat(logits)
        flat[at] = _penalised(flat.index_select(0, at), times, *penalties)

    def _times(self, place: Tensor, draft_indices: list[int]) -> Tensor:
        """Return how often the token of each of n table entries occurred in the output, fp32 [n].

        ``place`` [n] are the indices of the entries in the flattened tables. ``draft_indices`` are
        indices in ``place``, one per draft that counts as output; each adds one occurrence.
        """
        times = self._counts.flatten().index_select(0, place)
        return times.index_add_(0, self._upload(draft_indices), times.new_ones(len(draft_indices)))

    def _penalties(self, sites: Sequence[_Site]) -> Tensor:
        samplings = [site.sampling for site in sites]
        columns = [
            [sampling.repetition_penalty for sampling in samplings],
            [sampling.frequency_penalty for sampling in samplings],
            [sampling.presence_penalty for sampling in samplings],
        ]
        return self._upload(columns, torch.float32)

    def _draft_cells(self, row: PenalisedRow) -> list[_Cell]:
        known, fresh = self._places[row.slot], dict[int, int]()
        cells = []
        for token in row.drafts:
            place = known.get(token)
            if place is None:
                place = fresh.setdefault(token, len(known) + len(fresh))
            cells.append(_Cell(row.slot, place, token))
        return cells

    def _sites(self, row: PenalisedRow, places: list[int]) -> Iterator[_Site]:
        length = len(self._places[row.slot])
        yield _Site(row.first, row.slot, length, [], row.sampling)
        for i, place in enumerate(places, 1):
            length = max(length, place + 1)
            yield _Site(row.first + i, row.slot, length, places[:i], row.sampling)

    def _append(self, slot: int, tokens: Iterable[int]) -> Iterator[_Cell]:
        known = self._places[slot]
        for token in tokens:
            yield _Cell(slot, known.setdefault(token, len(known)), token)

    def _write(self, cells: Sequence[_Cell]) -> tuple[Tensor, Tensor]:
        self._reserve(0, max((cell.place + 1 for cell in cells), default=0))
        slots, places, tokens = self._upload(cells).view(-1, 3).unbind(dim=1)
        self._tokens[slots, places] = tokens
        return slots, places

    def _reserve(self, slots: int, places: int) -> None:
        have_slots, have_places = self._tokens.shape
        if slots > have_slots or places > have_places:
            more_slots = max(_doubled(slots), have_slots) - have_slots
            more_places = max(_doubled(places), have_places) - have_places
            padding = (0, more_places, 0, more_slots)
            # Both tensors are allocated before either is assigned, because there may be too little
            # memory for the second one.
            tokens = functional.pad(self._tokens, padding)
            self._counts = functional.pad(self._counts, padding)
            self._tokens = tokens

    def _upload(self, values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        return upload(values, self._device, dtype)


def _counts(admission: Admission) -> Counter[int]:
    counts = Counter[int]()
    if admission.sampling.repetition_penalty != 1:  # the other penalties ignore the prompt
        counts.update(dict.fromkeys(admission.tokens[: admission.num_prompt], 0))
    counts.update(admission.tokens[admission.num_prompt :])
    return counts


def _doubled(size: int) -> int:
    """Return ``size`` rounded up to a power of two, so that growth rarely copies the data."""
    return 1 << (size - 1).bit_length() if size else 0


def _flat(logits: Tensor) -> Tensor:
    rows, columns = logits.shape
    assert logits.stride(1) == 1
    return logits.as_strided(((rows - 1) * logits.stride(0) + columns,), (1,))


def _penalised(
    logits: Tensor, times: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return ``logits`` [n] with penalties, given each token's occurrences in the output.

    ``times``, ``repetition``, ``frequency`` and ``presence`` are [n].
    """
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    return repeated - frequency * times - presence * (times > 0)
