"""Model over a cache of its own that tests step by hand; needs no transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worker.attention.backend import AttentionBackend
from worker.attention.choice import choose_attention
from worker.device.kv_cache import KVCache
from worker.engine.limits import blocks_for
from worker.engine.plan import Row, Rows
from worker.model import weights
from worker.model.adapter_weights import load_adapters
from worker.model.compiled_pointwise import choose_pointwise
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.layers import Placement
from worker.model.matrix import Packing
from worker.model.sharing import local_kv_heads
from worker.parallel.group import Group
from worker.runner.build import optimize_for_cpu
from worker.runner.runner import Model

CPU = torch.device("cpu")

#: (sequence, number of its tokens) of each row of a step
Step = Sequence[tuple[int, int]]


class SteppedModel:
    """Model of one rank over a cache with the shape ``kv_shape``: num_layers, kv_heads, head_dim.

    Blocks hold NaN where nothing was written.
    """

    def __init__(
        self,
        model: Model,
        kv_shape: tuple[int, int, int],
        place: Placement,
        build_attention: Callable[[KVCache], AttentionBackend] = choose_attention,
    ) -> None:
        self._model = model
        self._kv_shape = kv_shape
        self._place = place
        self._build_attention = build_attention

    @torch.inference_mode()
    def logits(
        self,
        sequences: Sequence[list[int]],
        steps: Sequence[Step],
        adapters: Sequence[int] | None = None,
    ) -> list[Tensor] | None:
        """Return logits [tokens, vocab] after each token of each sequence; None except on rank 0.

        ``steps`` compute the sequences' tokens, each in its order. ``adapters`` are the numbers of
        the sequences' adapters.
        """
        tables = _scattered_tables([len(sequence) for sequence in sequences])
        attention = self._build_attention(self._cache(sum(map(len, tables))))
        done = [0] * len(sequences)
        parts: list[list[Tensor]] = [[] for _ in sequences]
        for step in steps:
            rows = []
            for which, count in step:
                tokens = tuple(sequences[which][done[which] : done[which] + count])
                rows.append(Row(which, tokens, done[which], tables[which], True))
                done[which] += count
            logits = self._step(rows, attention, adapters)
            if logits is not None:
                for row, part in zip(
                    rows, logits.split([len(r.tokens) for r in rows]), strict=True
                ):
                    parts[row.slot].append(part)
        return [torch.cat(part) for part in parts] if all(parts) else None

    @torch.inference_mode()
    def hidden(
        self,
        sequences: Sequence[list[int]],
        sites: list[int] | None,
        adapters: Sequence[int] | None = None,
    ) -> Tensor:
        """Return hidden states at ``sites`` of one step that computes all sequences."""
        tables = _scattered_tables([len(sequence) for sequence in sequences])
        attention = self._build_attention(self._cache(sum(map(len, tables))))
        rows = [Row(i, tuple(s), 0, tables[i], True) for i, s in enumerate(sequences)]
        return self._forward(Rows.of(rows), attention, sites, adapters)

    def opened(self, length: int) -> OpenSequence:
        """Return a sequence of at most ``length`` tokens, which is computed step by step."""
        (table,) = _scattered_tables([length])
        attention = self._build_attention(self._cache(len(table)))
        return OpenSequence(table, lambda row: self._step([row], attention))

    def _step(
        self, rows: list[Row], attention: AttentionBackend, adapters: Sequence[int] | None = None
    ) -> Tensor | None:
        logits = self._model.logits(self._forward(Rows.of(rows), attention, None, adapters))
        return None if logits is None else logits.clone()

    def _forward(
        self,
        step: Rows,
        attention: AttentionBackend,
        sites: list[int] | None,
        adapters: Sequence[int] | None,
    ) -> Tensor:
        return self._model.forward(
            torch.from_numpy(step.tokens),
            torch.from_numpy(step.positions),
            attention.prepare(step),
            None if sites is None else torch.tensor(sites, dtype=torch.int64),
            None if adapters is None else step.spread(np.array(adapters)[step.slots]),
        )

    def _cache(self, num_blocks: int) -> KVCache:
        cache = KVCache(num_blocks, *self._kv_shape, self._place.dtype, self._place.device)
        cache.tensor.fill_(torch.nan)
        return cache


class OpenSequence:
    """Sequence over a cache of its own."""

    def __init__(self, table: tuple[int, ...], step: Callable[[Row], Tensor | None]) -> None:
        self._table = table
        self._step = step
        self._done = 0

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Compute the sequence's new ``tokens``; return the last logits [vocab]."""
        logits = self._step(Row(0, tuple(tokens[self._done :]), self._done, self._table, True))
        assert logits is not None
        self._done = len(tokens)
        return logits[-1]


class SteppedDecoder(SteppedModel):
    """SteppedModel with Everlift's own decoder, in the form in which a worker has it."""

    def __init__(
        self,
        directory: Path | str,
        max_model_len: int,
        group: Group | None = None,
        dtype: torch.dtype = torch.float32,
        build_attention: Callable[[KVCache], AttentionBackend] = choose_attention,
        weights_dtype: torch.dtype | None = None,
        packed: torch.dtype | None = None,
        adapters: Sequence[str] = (),
        packing: Packing | None = None,
        num_slots: int | None = None,
    ) -> None:
        """Load a decoder; with ``packing`` in place of that for CPUs, layers run one by one."""
        pointwise = choose_pointwise(dtype, CPU)
        place = Placement(group or Group.single(), dtype, CPU, pointwise, weights_dtype)
        spec = weights.with_stored_scales(read_spec(directory), directory)
        decoder = Decoder(spec, max_model_len, place)
        weights.load(decoder, directory)
        num_slots = len(adapters) if num_slots is None else num_slots
        load_adapters(decoder, spec, adapters, Path(directory), place, num_slots)
        if packing is None:
            optimize_for_cpu(decoder, spec, dtype, packed)
        else:
            decoder.pack(packing)
        self.decoder, self.spec = decoder, spec
        kv_heads = local_kv_heads(spec.num_kv_heads, place.group.size)
        kv_shape = (spec.num_layers, kv_heads, spec.head_dim)
        super().__init__(decoder, kv_shape, place, build_attention)


def _scattered_tables(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Return a block table for each length in tokens; its blocks are scattered over the cache."""
    counts = [blocks_for(length) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3))
    return [tuple(table.tolist()) for table in order.split(counts)]
