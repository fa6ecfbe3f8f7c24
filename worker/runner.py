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

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Hidden states [T, hidden] of ``tokens`` [T], each at its place of ``positions`` [T]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """fp32 logits [n, vocab] of ``hidden`` [n, hidden] on rank 0, None elsewhere; a tensor of
        the caller's own. A collective."""
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
        hidden = self._forward(plan)
        self._stopwatch.end(Part.MODEL)
        scores = self._score_prompts(plan, hidden)
        results = self._agree(plan, _with_scores(self._sample(plan, hidden), scores))
        self._stopwatch.end(Part.SAMPLE)
        return results

    def close(self) -> None:
        self._group.close()

    def _copy_blocks(self, plan: Plan) -> None:
        if self._host_cache is not None:
            self._host_cache.save(plan.saves)
            self._host_cache.load(plan.loads)

    def _admit(self, admission: Admission) -> None:
        self._slots[admission.slot] = replace(admission, grammar=None)
        if self._sampler is not None:
            self._sampler.admit(admission)

    def _forward(self, plan: Plan) -> Tensor:
        """Hidden states of all of the step's tokens; their keys and values go to the cache."""
        rows = plan.rows
        attention = self._attention.prepare(rows)
        return self._model.forward(
            self._upload(rows.tokens), self._upload(rows.positions), attention
        )

    # tokens

    def _sample(self, plan: Plan, hidden: Tensor) -> list[RowResult]:
        """A result for each row; those that sample are drawn on rank 0, and empty elsewhere."""
        rows = plan.rows
        sites = _sites(rows)
        logits = self._model.logits(hidden[self._upload(sites)]) if len(sites) else None
        if logits is None or self._sampler is None:
            return [NOTHING_DRAWN] * len(rows)
        drawn = self._sampler.sample(logits, self._asks(rows))
        if len(drawn) == len(rows):
            return drawn
        results = iter(drawn)
        return [next(results) if samples else NOTHING_DRAWN for samples in rows.samples.tolist()]

    def _asks(self, rows: Rows) -> Asks:
        sampling = np.flatnonzero(rows.samples)
        slots = rows.slots[sampling]
        num_prompt = np.array([self._slots[slot].num_prompt for slot in slots.tolist()])
        drafted = np.flatnonzero(rows.num_drafts[sampling])
        drafts = {i: rows.drafts(sampling[i]) for i in drafted.tolist()}
        return Asks(slots, rows.known_ends[sampling] - num_prompt, drafts)

    def _agree(self, plan: Plan, results: list[RowResult]) -> list[RowResult]:
        """Rank 0's ``results``, as far as the other ranks have to know them there."""
        if self._group.size == 1:
            return results
        told = np.flatnonzero(plan.rows.samples | plan.rows.scores_prompt).tolist()
        if not told:
            return results
        width = 1 + int(plan.rows.num_drafts.max())
        lines = self._group.broadcast(self._upload(to_lines([results[i] for i in told], width)))
        if self._group.rank == 0:
            return results
        heard = dict(zip(told, from_lines(lines.tolist()), strict=True))
        return [heard.get(i, result) for i, result in enumerate(results)]

    # prompts

    def _score_prompts(self, plan: Plan, hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """By row, the log probabilities of the prompt's tokens that it scores; none but on rank 0.

        Piece by piece, since a chunk's logits may be larger than all of the model.
        """
        wanted = list(self._scored(plan))
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

    def _scored(self, plan: Plan) -> Iterator[_Scored]:
        for i in np.flatnonzero(plan.rows.scores_prompt).tolist():
            row, slot = plan.rows[i], self._slots[plan.rows[i].slot]
            last = min(row.start + len(row.tokens), slot.num_prompt - 1)
            tokens = slot.tokens[row.start + 1 : last + 1]
            for at, token in enumerate(tokens, int(plan.rows.firsts[i])):
                yield _Scored(i, at, token, slot.sampling.prompt_logprobs or 0)

    def _upload(self, values: Sequence[object] | Ints) -> Tensor:
        return upload(values, self._device)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """On a CPU torch has no class of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _sites(rows: Rows) -> Ints:
    """Which of the step's tokens have the logits to draw from: of a row that samples, the last
    known one and the drafts."""
    is_last = rows.positions >= rows.spread(rows.known_ends - 1)
    return np.flatnonzero(is_last & np.repeat(rows.samples, rows.counts))


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
