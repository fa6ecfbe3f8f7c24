"""Substitute for a rank's part of a step for which its memory was too short.

It takes part in the remaining collectives, so that the other ranks are not blocked. Their results
are discarded: nobody commits a step for which one rank had too little memory.
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
class Exchanged:
    """Collectives of a model.

    A forward makes ``num_sums`` sums of hidden states [T, ``hidden_size``], and each rank
    contributes ``vocab_share`` logits, all of ``dtype``.
    """

    num_sums: int
    hidden_size: int
    vocab_share: int
    dtype: torch.dtype


class Collective(Protocol):
    def attend(self, group: Group, room: Tensor) -> None:
        """Take part with ``room``, bytes of any content."""
        ...


@dataclass(frozen=True, slots=True)
class Sum:
    shape: tuple[int, ...]
    dtype: torch.dtype

    def attend(self, group: Group, room: Tensor) -> None:
        group.all_reduce(_cut(room, self.shape, self.dtype))


@dataclass(frozen=True, slots=True)
class Gather:
    shape: tuple[int, ...]
    dtype: torch.dtype

    def attend(self, group: Group, room: Tensor) -> None:
        shard = _cut(room, self.shape, self.dtype)
        shards = _cut(room[shard.nbytes :], (group.size, *self.shape), self.dtype)
        group.attend_gather(shard, shards)


@dataclass(frozen=True, slots=True)
class Tell:
    """Rank 0's word."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def attend(self, group: Group, room: Tensor) -> None:
        group.broadcast(_cut(room, self.shape, self.dtype))


class StandIn:
    """Memory of the substitute: tokens of a step, rows of logits, and integers of agreement."""

    def __init__(
        self,
        group: Group,
        exchanged: Exchanged,
        most_tokens: int,
        most_logits: int,
        most_told: int,
        device: torch.device,
    ) -> None:
        self._group = group
        self._exchanged = exchanged
        shards = 1 + (group.size if group.rank == 0 else 0)
        elements = max(
            most_tokens * exchanged.hidden_size, most_logits * exchanged.vocab_share * shards
        )
        most = max(elements * exchanged.dtype.itemsize, most_told * torch.int64.itemsize)
        self._room = torch.zeros(most, dtype=torch.uint8, device=device)

    def attend(self, collectives: Sequence[Collective]) -> None:
        for collective in collectives:
            collective.attend(self._group, self._room)

    def forward(self, num_tokens: int) -> list[Collective]:
        """Take part in the collectives of a forward of so many tokens."""
        each = self._exchanged
        return [Sum((num_tokens, each.hidden_size), each.dtype)] * each.num_sums

    def logits(self, number: int) -> Collective:
        """Take part in the collectives of the logits of so many hidden states."""
        return Gather((number, self._exchanged.vocab_share), self._exchanged.dtype)


def _cut(room: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return room[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
