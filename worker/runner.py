"""A plan in, tokens out: the step as torch does it, with the same tokens on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from everlift.errors import EngineFailed
from worker.attention.backend import AttentionBackend
from worker.kv_cache import KVCache
from worker.model.decoder import Decoder
from worker.model.layers import Placement
from worker.model.spec import ModelSpec
from worker.plan import Admission, Plan, Row, RowResult
from worker.sampler import NO_TOKEN, Draw, sample


class TorchRunner:
    """One rank's Runner (worker.plan). It owns the model's share, the KV cache and the group."""

    def __init__(
        self,
        spec: ModelSpec,
        max_model_len: int,
        decoder: Decoder,
        cache: KVCache,
        attention: AttentionBackend,
        place: Placement,
    ) -> None:
        self._spec = spec
        self._max_model_len = max_model_len
        self._decoder = decoder
        self._cache = cache
        self._attention = attention
        self._group = place.group
        self._device = place.device
        self._slots: dict[int, Admission] = {}

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def num_host_blocks(self) -> int:
        return 0

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[RowResult]:
        for admission in plan.admissions:
            self._slots[admission.slot] = admission
        hidden = self._forward(plan)
        draws = [self._draw(row) for row in plan.rows if row.samples]
        if not draws:
            return [RowResult() for _ in plan.rows]
        tokens = iter(self._sample(hidden[self._last_tokens(plan)], draws).tolist())
        return [_result(next(tokens)) if row.samples else RowResult() for row in plan.rows]

    def close(self) -> None:
        self._group.close()

    def _forward(self, plan: Plan) -> Tensor:
        """Hidden states of all of the step's tokens; their keys and values go to the cache."""
        tokens = [token for row in plan.rows for token in row.tokens]
        positions = [p for row in plan.rows for p in range(row.start, row.start + len(row.tokens))]
        attention = self._attention.prepare(plan.rows)
        return self._decoder.forward(self._tensor(tokens), self._tensor(positions), attention)

    def _last_tokens(self, plan: Plan) -> Tensor:
        """Where, among the step's tokens, each sampling row ends."""
        ends = accumulate(len(row.tokens) for row in plan.rows)
        last = [end - 1 for row, end in zip(plan.rows, ends, strict=True) if row.samples]
        return self._tensor(last)

    def _draw(self, row: Row) -> Draw:
        slot = self._slots[row.slot]
        return Draw(slot.sampling, slot.choice, row.start + len(row.tokens) - slot.num_prompt)

    def _sample(self, hidden: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Rank 0 draws, the others take its word: rounding must not part the ranks."""
        logits = self._decoder.logits(hidden)
        if logits is None:
            tokens = torch.empty(len(draws), dtype=torch.int64, device=self._device)
        else:
            tokens = sample(logits, draws)
        return self._group.broadcast(tokens)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _result(token: int) -> RowResult:
    if token == NO_TOKEN:
        return RowResult(error=EngineFailed("the model's logits are not finite numbers"))
    return RowResult((token,))
