"""Attention in plain torch, on any device.

Each call computes rows that have the same number of new tokens and the same number of blocks, from
a gathered copy of their blocks. Blocks to which no new token attends, because of a window, are left
out. The number of blocks of a row with few new tokens is padded to a power of two, so that more
rows share a call; this at most doubles the row's work. The shape to which a row is padded depends
only on the row. The row's result therefore has the same bits in any batch (on a CPU in fp32).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everlift.hashes import BLOCK_SIZE
from worker.attention.backend import AttentionForm
from worker.device.kv_cache import KVCache
from worker.device.upload import Parcel, upload
from worker.engine.plan import Ints, Rows

#: Maximum size of a gathered copy in bytes. Larger copies, for which the allocator maps new pages,
#: took 2.5 times as long.
_MAX_GATHERED_BYTES = 8 << 20
#: The number of blocks is padded for rows with at most this many new tokens (decoding, or verifying
#: drafts).
_FEW = 16
#: Query rows are padded to a multiple of this. torch's attention gives each CPU thread a part of
#: one buffer, with (context + head_dim + 2) numbers for each query row. If the size of a part is
#: not a multiple of 16 bytes, MKL may compute different last bits in different threads, as on a Zen
#: 4, and therefore in different batches.
_ALIGNED_ROWS = 2


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Rows of one shape, whose attention is computed in one call; their number is n.

    Each row has ``new`` new tokens. ``tokens`` [n * new] are the indices of these tokens in the
    step. A run, an item of KVCache.runs, is one head's keys or values of one block in one layer.
    ``runs`` [2 * n * kv_heads * blocks] are the indices, for layer 0, of the runs that the rows
    read. The runs of keys precede those of values. ``bias`` [n, 1, new, blocks * BLOCK_SIZE] is 0
    at positions to which a token attends, and -inf at others.
    """

    tokens: Tensor
    runs: Tensor
    bias: Tensor


class ReferenceAttention:
    """AttentionBackend that needs only torch."""

    name = "ReferenceAttention"

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def prepare(self, rows: Rows, parcel: Parcel | None = None) -> ReferenceStep:
        device = self._cache.tensor.device
        offsets = rows.positions % BLOCK_SIZE
        # Clear blocks that have a new owner. Masked positions have the weight 0, but 0 times a NaN
        # of the previous owner would be NaN.
        begun = rows.blocks[offsets == 0]
        self._cache.tensor.index_fill_(0, upload(begun, device), 0)
        return ReferenceStep(
            self._cache, rows, upload(rows.blocks, device), upload(offsets, device)
        )


class ReferenceStep:
    """StepAttention of ReferenceAttention."""

    def __init__(self, cache: KVCache, rows: Rows, block: Tensor, offset: Tensor) -> None:
        self._cache = cache
        self._rows = rows
        self._block = block
        self._offset = offset
        self._bundles_of: dict[int | None, list[_Bundle]] = {}

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        keys, values = self._cache.layer(layer).unbind(dim=1)
        keys[self._block, :, self._offset] = key
        values[self._block, :, self._offset] = value

    def attend(self, layer: int, query: Tensor, form: AttentionForm) -> Tensor:
        first = layer * 2 * self._cache.kv_heads
        out = torch.empty_like(query)
        for bundle in self._bundles(form.window):
            gathered = self._cache.runs.index_select(0, bundle.runs + first)
            out[bundle.tokens] = _attend(query[bundle.tokens], gathered, bundle.bias, form)
        return out

    def _bundles(self, window: int | None) -> list[_Bundle]:
        if window not in self._bundles_of:
            most = _MAX_GATHERED_BYTES // self._cache.layer(0)[0].nbytes
            spans = _Spans.of(self._rows, window)
            self._bundles_of[window] = [
                _bundle(self._rows, spans, group, self._cache) for group in spans.groups(most)
            ]
        return self._bundles_of[window]


def _attend(query: Tensor, gathered: Tensor, bias: Tensor, form: AttentionForm) -> Tensor:
    """Return the attention of a bundle's ``query`` [n * new, heads, head_dim].

    ``gathered`` has the keys and values that the indices in ``_Bundle.runs`` select. ``bias`` is
    that of the bundle.
    """
    rows, _, new, context = bias.shape
    head_dim = query.shape[-1]
    key, value = gathered.view(2, rows, -1, context, head_dim)
    rowwise = query.view(rows, new, -1, head_dim)
    if form.softcap is None and form.sinks is None:
        out = _attend_plainly(rowwise, key, value, bias, form.scale)
    else:
        out = _attend_in_steps(rowwise, key, value, bias, form)
    return out.reshape(query.shape)


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> Tensor:
    """Return the attention of ``query`` without softcap and sinks, by torch's own function.

    ``query`` and the result are [n, new, heads, head_dim], ``key`` and ``value`` [n, kv_heads,
    context, head_dim]. If ``new`` is 1, the result is [n, kv_heads, heads / kv_heads, head_dim]
    instead, with the heads in the same order. ``bias`` [n, 1, new, context] is 0 at positions to
    which a token attends, and -inf at others.
    """
    if query.shape[1] == 1:
        # Heads that share a KV head become its queries, so that keys are not copied for each head.
        grouped = query.view(len(query), key.shape[1], -1, query.shape[-1])
        size = grouped.shape[2]
        out = functional.scaled_dot_product_attention(
            _aligned(grouped), key, value, attn_mask=bias, scale=scale
        )
        return out[:, :, :size]
    new = query.shape[1]
    out = functional.scaled_dot_product_attention(
        _aligned(query.transpose(1, 2)),
        key,
        value,
        attn_mask=_aligned(bias),
        scale=scale,
        enable_gqa=True,
    )
    return out[:, :, :new].transpose(1, 2)


def _aligned(tensor: Tensor) -> Tensor:
    """Pad ``tensor`` [..., rows, columns] with rows of zeros to a multiple of _ALIGNED_ROWS.

    Only a tensor on a CPU is padded; any other one is returned unchanged.
    """
    missing = -tensor.shape[-2] % _ALIGNED_ROWS
    if not missing or tensor.device.type != "cpu":
        return tensor
    return functional.pad(tensor, (0, 0, 0, missing))


def _attend_in_steps(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, form: AttentionForm
) -> Tensor:
    rows, new, _, head_dim = query.shape
    grouped = query.view(rows, new, key.shape[1], -1, head_dim).permute(0, 2, 3, 1, 4)
    products = torch.matmul(grouped.flatten(2, 3), key.transpose(-1, -2)).float()
    scores = products.view(*grouped.shape[:-1], -1).mul_(form.scale)
    if form.softcap is not None:
        scores.div_(form.softcap).tanh_().mul_(form.softcap)
    scores.add_(bias.unsqueeze(2))
    if form.sinks is not None:
        sinks = form.sinks.float().view(key.shape[1], -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    out = torch.matmul(weights.flatten(2, 3).to(value.dtype), value)
    return out.view(grouped.shape).permute(0, 3, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Ranges of the blocks to which the new tokens of n rows attend under ``window``.

    Row i reads the blocks from ``first_blocks[i]`` to before ``last_blocks[i]`` of its block table.
    If ``window`` is None, these are all blocks of its sequence. ``shapes`` [n, 2] has each row's
    number of new tokens, and the number of blocks that it reads, including those added as padding.
    """

    window: int | None
    first_blocks: Ints
    last_blocks: Ints
    shapes: Ints

    @classmethod
    def of(cls, rows: Rows, window: int | None) -> _Spans:
        first_blocks = np.zeros_like(rows.starts)
        if window is not None:
            first_blocks = np.maximum(0, rows.starts - window + 1) // BLOCK_SIZE
        last_blocks = -(-(rows.starts + rows.counts) // BLOCK_SIZE)
        blocks = last_blocks - first_blocks
        _, bits = np.frexp(blocks - 1)
        blocks = np.where(rows.counts > _FEW, blocks, 1 << bits.astype(np.int64))
        shapes = np.stack((rows.counts, blocks), axis=1)
        return cls(window, first_blocks, last_blocks, shapes)

    def groups(self, max_blocks: int) -> Iterator[Ints]:
        """Yield groups of row indices; all rows of a group have the same values in ``shapes``.

        A group has at most ``max_blocks`` blocks in total, unless it is a single row.
        """
        shapes, kinds = np.unique(self.shapes, axis=0, return_inverse=True)
        for kind, (_, blocks) in enumerate(shapes.tolist()):
            alike = np.flatnonzero(kinds == kind)
            most = max(1, max_blocks // blocks)
            for i in range(0, len(alike), most):
                yield alike[i : i + most]

    def blocks(self, group: Ints) -> Ints:
        """Return the indices, in the rows' block tables, of the blocks that ``group`` reads.

        The result is [rows of the group, blocks]. Padding repeats the first block that the row
        reads: padding is masked out but still read, and any other block might contain NaN.
        """
        first, last = self.first_blocks[group, np.newaxis], self.last_blocks[group, np.newaxis]
        blocks = first + np.arange(self.shapes[group[0], 1])
        return np.where(blocks < last, blocks, first)


def _bundle(rows: Rows, spans: _Spans, group: Ints, cache: KVCache) -> _Bundle:
    new, blocks = spans.shapes[group[0]].tolist()
    device, dtype = cache.tensor.device, cache.tensor.dtype
    steps = torch.arange(new, device=device)
    first = upload(rows.firsts[group], device).unsqueeze(1)
    start = upload(rows.starts[group], device).unsqueeze(1)
    tables = upload(rows.tables[rows.slots[group, np.newaxis], spans.blocks(group)], device)
    runs_of_layer = torch.arange(2 * cache.kv_heads, device=device).view(2, 1, cache.kv_heads, 1)
    runs = runs_of_layer + tables.unsqueeze(1) * cache.runs_per_block
    left = upload(spans.first_blocks[group] * BLOCK_SIZE, device)
    keys = (left.unsqueeze(1) + torch.arange(blocks * BLOCK_SIZE, device=device)).unsqueeze(1)
    positions = (start + steps).unsqueeze(-1)
    unseen = keys > positions
    if spans.window is not None:
        unseen |= keys <= positions - spans.window
    bias = torch.zeros_like(unseen, dtype=dtype).masked_fill_(unseen, -torch.inf)
    return _Bundle((first + steps).flatten(), runs.flatten(), bias.unsqueeze(1))
