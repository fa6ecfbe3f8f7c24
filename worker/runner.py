"""A plan in, tokens out: the step as torch does it, with the same tokens on every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from everlift.errors import EngineFailed
from everlift.sampling import TokenLogprobs
from worker.agreement import from_lines, to_lines
from worker.attention.backend import AttentionBackend, StepAttention
from worker.host_cache import HostCache
from worker.kv_cache import KVCache
from worker.logprobs import read_score, score
from worker.model.layers import Placement
from worker.plan import NOTHING_DRAWN, Admission, Ints, Plan, RowResult, Rows
from worker.sampled_row import NOT_FINITE_CAUSE
from worker.sampler import Asks, Sampler
from worker.step_times import STOPPED, Part, Stopwatch
from worker.upload import upload

#: Positions of prompts whose logits are in memory at once.
SCORED_AT_ONCE = 64


class Model(Protocol):
    """One rank's share of a model."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        sites: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of ``tokens`` [T], each at its place of ``positions`` [T]: of those at
        ``sites`` [n], which ascend, [n, hidden], or of all."""
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """fp32 logits [n, vocab] of ``hidden`` [n, hidden] on rank 0, None elsewhere. The caller
        may change them; they hold until the next call. A collective."""
        ...


class _Scored(NamedTuple):
    """A prompt's token whose log probability is wanted, ``row``'s, and where among the step's
    tokens the one before it lies."""

    row: int
    at: int
    token: int
    num_top: int


class TorchRunner:
    """One rank's Runner (worker.plan). It owns the model's share, the KV cache and the group.

    The ranks' collectives follow from the plan alone. Only rank 0 has logits: it draws, and the
    others take its word, so that rounding does not part them.
    """

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        model: Model,
        cache: KVCache,
        attention: AttentionBackend,
        place: Placement,
        host_cache: HostCache | None = None,
        stopwatch: Stopwatch = STOPPED,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._model = model
        self._cache = cache
        self._host_cache = host_cache
        self._stopwatch = stopwatch
        self._attention = attention
        self._group = place.group
        self._device = place.device
        self._slots: dict[int, Admission] = {}
        self._sampler = Sampler(vocab_size, place.device) if place.group.rank == 0 else None

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._host_cache.num_blocks if self._host_cache is not None else 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def unready_slots(self) -> frozenset[int]:
        return self._sampler.unready_slots() if self._sampler is not None else frozenset()

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[RowResult]:
        try:
            return self._execute(plan)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            cause = str(error)
        # Here the tensors are free that the error's frames held.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise MemoryError(cause)

    def release(self, slots: Collection[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)
            if self._sampler is not None:
                self._sampler.release(slot)

    def _execute(self, plan: Plan) -> list[RowResult]:
        self._copy_blocks(plan)
        for admission in plan.admissions:
            self._admit(admission)
        results = self._compute(plan.rows)
        self._stopwatch.end(Part.SAMPLE)
        return results

    def close(self) -> None:
        self._group.close()

    def _copy_blocks(self, plan: Plan) -> None:
        if self._host_cache is not None:
            self._host_cache.save(plan.saves)
            self._host_cache.load(plan.loads)

    def _admit(self, admission: Admission) -> None:
        has_grammar = admission.grammar is not None
        self._slots[admission.slot] = replace(admission, grammar=None) if has_grammar else admission
        if self._sampler is not None:
            self._sampler.admit(admission)

    def _compute(self, rows: Rows) -> list[RowResult]:
        sites = _sites(rows)
        if rows.scores_prompt.any():
            hidden = self._forward(rows, None)
            self._stopwatch.end(Part.MODEL)
            scores = self._score_prompts(rows, hidden)
            drawn = self._sample(rows, hidden[self._upload(sites)])
            return self._agree(rows, _with_scores(drawn, scores))
        hidden = self._forward(rows, sites)
        self._stopwatch.end(Part.MODEL)
        return self._agree(rows, self._sample(rows, hidden))

    def _forward(self, rows: Rows, sites: Ints | None) -> Tensor:
        """Hidden states of the step's tokens at ``sites``, or of all; the keys and values of all go
        to the cache."""
        attention = self._attention.prepare(rows)
        return self._model.forward(
            self._upload(rows.tokens),
            self._upload(rows.positions),
            attention,
            None if sites is None or len(sites) == rows.num_tokens else self._upload(sites),
        )

    # tokens

    def _sample(self, rows: Rows, hidden: Tensor) -> list[RowResult]:
        """A result for each row; those that sample are drawn on rank 0, and empty elsewhere.
        ``hidden`` are of their sites."""
        logits = self._model.logits(hidden) if len(hidden) else None
        if logits is None or self._sampler is None:
            return [NOTHING_DRAWN] * len(rows)
        drawn = self._sampler.sample(logits, self._asks(rows))
        if len(drawn) == len(rows):
            return drawn
        results = iter(drawn)
        return [next(results) if samples else NOTHING_DRAWN for samples in rows.samples.tolist()]

    def _asks(self, rows: Rows) -> Asks:
        (sampling,) = rows.samples.nonzero()
        slots = rows.slots[sampling]
        num_prompt = [self._slots[slot].num_prompt for slot in slots.tolist()]
        drafts = {
            i: rows.drafts(sampling[i]) for i in rows.num_drafts[sampling].nonzero()[0].tolist()
        }
        return Asks(slots, rows.known_ends[sampling] - num_prompt, drafts)

    def _agree(self, rows: Rows, results: list[RowResult]) -> list[RowResult]:
        """Rank 0's ``results``, as far as the other ranks have to know them there."""
        if self._group.size == 1:
            return results
        told = np.flatnonzero(rows.samples | rows.scores_prompt).tolist()
        if not told:
            return results
        width = 1 + int(rows.num_drafts.max())
        lines = self._group.broadcast(self._upload(to_lines([results[i] for i in told], width)))
        if self._group.rank == 0:
            return results
        heard = dict(zip(told, from_lines(lines.tolist()), strict=True))
        return [heard.get(i, result) for i, result in enumerate(results)]

    # prompts

    def _score_prompts(self, rows: Rows, hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """By row, the log probabilities of the prompt's tokens that it scores; none but on rank 0.

        Piece by piece, since a chunk's logits may be larger than all of the model.
        """
        wanted = list(self._scored(rows))
        width = max((each.num_top for each in wanted), default=0)
        pieces = range(0, len(wanted), SCORED_AT_ONCE)
        tables = [self._score(wanted[i : i + SCORED_AT_ONCE], hidden, width) for i in pieces]
        lines = [line for table in tables if table is not None for line in table.tolist()]
        scores: dict[int, list[TokenLogprobs]] = {}
        for each, line in zip(wanted, lines, strict=False):  # no lines but on rank 0
            scores.setdefault(each.row, []).append(read_score(line, each.num_top))
        return scores

    def _score(self, piece: Sequence[_Scored], hidden: Tensor, width: int) -> Tensor | None:
        logits = self._model.logits(hidden[self._upload([each.at for each in piece])])
        if logits is None:
            return None
        return score(logits, self._upload([each.token for each in piece]), width)

    def _scored(self, rows: Rows) -> Iterator[_Scored]:
        for i in np.flatnonzero(rows.scores_prompt).tolist():
            row, slot = rows[i], self._slots[rows[i].slot]
            last = min(row.start + len(row.tokens), slot.num_prompt - 1)
            tokens = slot.tokens[row.start + 1 : last + 1]
            for at, token in enumerate(tokens, int(rows.firsts[i])):
                yield _Scored(i, at, token, slot.sampling.prompt_logprobs or 0)

    def _upload(self, values: Sequence[object] | Ints) -> Tensor:
        return upload(values, self._device)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """On a CPU torch has no class of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _sites(rows: Rows) -> Ints:
    """Which of the step's tokens have the logits to draw from: of a row that samples, the last
    known one and the drafts."""
    if len(rows) == rows.num_tokens:
        return rows.samples.nonzero()[0]
    is_last = rows.positions >= rows.spread(rows.known_ends - 1)
    return (is_last & np.repeat(rows.samples, rows.counts)).nonzero()[0]


def _with_scores(
    results: list[RowResult], scores: dict[int, list[TokenLogprobs]]
) -> list[RowResult]:
    if not scores:
        return results
    return [
        _with_prompt_logprobs(result, scores[i]) if i in scores else result
        for i, result in enumerate(results)
    ]


def _with_prompt_logprobs(result: RowResult, scores: Sequence[TokenLogprobs]) -> RowResult:
    if result.error is not None:
        return result
    if any(math.isnan(scored.logprob) for scored in scores):
        return RowResult(error=EngineFailed(NOT_FINITE_CAUSE))
    return result._replace(prompt_logprobs=tuple(scores))
