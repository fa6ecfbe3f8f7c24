"""Substitute for a rank's part of a step, used if the rank has too little memory for it.

The substitute takes part in the remaining collectives, so that the other ranks are not blocked. The
results are discarded, because no rank commits a step for which one of them has too little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from worker.parallel.group import Group


@dataclass(frozen=True, slots=True)
class ExchangedTensors:
    """Tensors that the ranks of a model exchange, of ``dtype`` unless noted.

    A forward pass of T tokens sums hidden states [T, ``hidden_size``] over the ranks once for the
    embedding and twice for each layer. With ``sums_squares``, each layer first sums the squares of
    queries and of keys, in fp32 [T, 2]. For the logits of n hidden states each rank sends a shard
    [n, ``vocab_share``] to rank 0.
    """

    num_layers: int
    hidden_size: int
    vocab_share: int
    dtype: torch.dtype
    sums_squares: bool = False


class Collective(Protocol):
    def join(self, group: Group, buffer: Tensor) -> None:
        """Take part in the collective, with ``buffer`` as the memory of this rank's tensors.

        ``buffer`` is a uint8 tensor, whose content is undefined before and after.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sum:
    shape: tuple[int, ...]
    dtype: torch.dtype

    def join(self, group: Group, buffer: Tensor) -> None:
        group.all_reduce(_cut(buffer, self.shape, self.dtype))


@dataclass(frozen=True, slots=True)
class Gather:
    shape: tuple[int, ...]
    dtype: torch.dtype

    def join(self, group: Group, buffer: Tensor) -> None:
        shard = _cut(buffer, self.shape, self.dtype)
        num_shards = group.size if group.rank == 0 else 0
        shards = _cut(buffer[shard.nbytes :], (num_shards, *self.shape), self.dtype)
        group.join_gather(shard, shards)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Broadcast of a tensor from rank 0."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def join(self, group: Group, buffer: Tensor) -> None:
        group.broadcast(_cut(buffer, self.shape, self.dtype))


class StandIn:
    """Substitute that takes part in the collectives of a step if its rank has too little memory.

    A buffer for the largest collective is allocated at creation. The buffer's size follows from the
    maximum number of tokens of a step (``most_tokens``), of hidden states whose logits are computed
    (``most_logits``), and of integers that rank 0 broadcasts as a step's results
    (``most_broadcast``).
    """

    def __init__(
        self,
        group: Group,
        exchanged: ExchangedTensors,
        most_tokens: int,
        most_logits: int,
        most_broadcast: int,
        device: torch.device,
    ) -> None:
        self._group = group
        self._exchanged = exchanged
        shards = 1 + (group.size if group.rank == 0 else 0)
        elements = max(
            most_tokens * exchanged.hidden_size, most_logits * exchanged.vocab_share * shards
        )
        most = max(
            elements * exchanged.dtype.itemsize,
            most_tokens * 2 * torch.float32.itemsize,
            most_broadcast * torch.int64.itemsize,
        )
        self._buffer = torch.zeros(most, dtype=torch.uint8, device=device)

    def join(self, collectives: Sequence[Collective]) -> None:
        """Take part in ``collectives``, in order, with undefined data."""
        for collective in collectives:
            collective.join(self._group, self._buffer)

    def forward(self, num_tokens: int) -> list[Collective]:
        """Return the collectives of a forward pass of ``num_tokens`` tokens."""
        exchanged = self._exchanged
        hidden = Sum((num_tokens, exchanged.hidden_size), exchanged.dtype)
        squares = [Sum((num_tokens, 2), torch.float32)] if exchanged.sums_squares else []
        return [hidden, *[*squares, hidden, hidden] * exchanged.num_layers]

    def logits(self, number: int) -> Collective:
        """Return the collective that gathers the logits of ``number`` hidden states."""
        return Gather((number, self._exchanged.vocab_share), self._exchanged.dtype)


def _cut(buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
