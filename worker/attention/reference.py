"""Attention in plain torch, on any device: gather a few rows' blocks, then torch's own attention.

Rows with the same number of new tokens and of blocks share a call. A decoding row's blocks are
first padded to a power of two: many rows then share, and the padding at most doubles their work.
Since a row's shape depends on the row alone, so does its result: in any batch the same, bit for
bit (on a CPU in fp32).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from everlift.blockhash import BLOCK_SIZE
from worker.kv_cache import KVCache
from worker.limits import blocks_for
from worker.plan import Row

#: Gathered in one go; copies so large that the allocator maps new pages were 2.5 times slower.
_MAX_GATHERED_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Span:
    """A row, and the index of its first token among the step's tokens."""

    row: Row
    first: int

    @property
    def end(self) -> int:
        """The position after the row's last token."""
        return self.row.start + len(self.row.tokens)

    @property
    def shape(self) -> tuple[int, int]:
        """New tokens, and blocks to attend to."""
        blocks = blocks_for(self.end)
        new = len(self.row.tokens)
        return (new, blocks) if new > 1 else (1, 1 << (blocks - 1).bit_length())

    def padded_table(self, blocks: int) -> list[int]:
        """Its block table, cut or filled to ``blocks``; what fills it is masked out."""
        table = list(self.row.block_table[:blocks])
        return table + table[:1] * (blocks - len(table))


@dataclass(frozen=True, slots=True)
class _Bundle:
    """n rows of one shape, attended in one call.

    ``tokens`` [n * new] are their tokens' indices in the step; ``runs`` [2 * kv_heads * n * blocks]
    what they read of layer 0, as indices of KVCache.runs; ``bias`` [n, 1, new, blocks * BLOCK_SIZE]
    is 0 up to each token's own position and -inf after it.
    """

    tokens: Tensor
    runs: Tensor
    bias: Tensor


class ReferenceAttention:
    """The AttentionBackend that needs nothing but torch."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._runs_of_layer = torch.arange(2 * cache.kv_heads, device=cache.tensor.device)

    def prepare(self, rows: Sequence[Row]) -> ReferenceStep:
        places = list(_places(rows))
        # What a block's last owner left would reach its next one: 0 times NaN is NaN.
        begun = [block for block, offset in places if offset == 0]
        self._cache.tensor.index_fill_(0, self._tensor(begun), 0)
        block, offset = self._tensor(places).unbind(dim=1)
        groups = _groups(rows, _MAX_GATHERED_BYTES // self._cache.layer(0)[0].nbytes)
        return ReferenceStep(self._cache, block, offset, [self._bundle(group) for group in groups])

    def _bundle(self, spans: Sequence[_Span]) -> _Bundle:
        new, blocks = spans[0].shape
        device, dtype = self._cache.tensor.device, self._cache.tensor.dtype
        steps = torch.arange(new, device=device)
        first = self._tensor([span.first for span in spans]).unsqueeze(1)
        start = self._tensor([span.row.start for span in spans]).unsqueeze(1)
        tables = self._tensor([span.padded_table(blocks) for span in spans])
        runs = self._runs_of_layer[:, None, None] + tables * self._cache.runs_per_block
        keys = torch.arange(blocks * BLOCK_SIZE, device=device)
        later = keys > (start + steps).unsqueeze(-1)
        bias = torch.zeros_like(later, dtype=dtype).masked_fill_(later, -torch.inf)
        return _Bundle((first + steps).flatten(), runs.flatten(), bias.unsqueeze(1))

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._cache.tensor.device)


class ReferenceStep:
    """StepAttention over one KVCache."""

    def __init__(
        self, cache: KVCache, block: Tensor, offset: Tensor, bundles: Sequence[_Bundle]
    ) -> None:
        self._cache = cache
        self._block = block
        self._offset = offset
        self._bundles = bundles

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        keys, values = self._cache.layer(layer).unbind(dim=1)
        keys[self._block, :, self._offset] = key
        values[self._block, :, self._offset] = value

    def attend(self, layer: int, query: Tensor) -> Tensor:
        first = layer * 2 * self._cache.kv_heads
        out = torch.empty_like(query)
        for bundle in self._bundles:
            gathered = self._cache.runs.index_select(0, bundle.runs + first)
            out[bundle.tokens] = _attend(query[bundle.tokens], gathered, bundle.bias)
        return out


def _attend(query: Tensor, gathered: Tensor, bias: Tensor) -> Tensor:
    """``query`` [n * new, heads, head_dim] over the runs ``gathered``, keys' before values'."""
    rows, _, new, context = bias.shape
    head_dim = query.shape[-1]
    key, value = gathered.view(2, -1, rows, context, head_dim).transpose(1, 2)
    if new == 1:
        # The heads that share a KV head become its queries: no copy of keys for each of them.
        grouped = query.view(rows, key.shape[1], -1, head_dim)
        out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=bias)
        return out.reshape(query.shape)
    heads = query.view(rows, new, -1, head_dim).transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        heads, key, value, attn_mask=bias, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(query.shape)


def _spans(rows: Sequence[Row]) -> Iterator[_Span]:
    first = 0
    for row in rows:
        yield _Span(row, first)
        first += len(row.tokens)


def _places(rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """For each of the step's tokens, its block and its offset in the block."""
    for row in rows:
        for position in range(row.start, row.start + len(row.tokens)):
            yield row.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE


def _groups(rows: Sequence[Row], max_blocks: int) -> Iterator[list[_Span]]:
    """Rows of one shape together, one or as many as have ``max_blocks`` between them."""
    by_shape: dict[tuple[int, int], list[_Span]] = defaultdict(list)
    for span in _spans(rows):
        by_shape[span.shape].append(span)
    for (_, blocks), alike in by_shape.items():
        most = max(1, max_blocks // blocks)
        for i in range(0, len(alike), most):
            yield alike[i : i + most]
