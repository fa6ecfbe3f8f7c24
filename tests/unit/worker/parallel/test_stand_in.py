"""Collectives in which a rank with too little memory still takes part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from worker.parallel.group import Group
from worker.parallel.stand_in import ExchangedTensors, StandIn


class GatheringGroup(Group):
    """Rank of two, which records the tensors of its gathers."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gathered: list[tuple[Tensor, Tensor]] = []

    def join_gather(self, shard: Tensor, buffer: Tensor) -> None:
        self.gathered.append((shard, buffer))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("num_logits", [1, 128])
def test_stand_in_gathers_logits_on_each_rank(rank: int, num_logits: int) -> None:
    group, exchanged = GatheringGroup(rank), ExchangedTensors(3, 64, 5000, torch.float32)
    stand_in = StandIn(group, exchanged, 128, 128, 128, torch.device("cpu"))
    stand_in.join([stand_in.logits(num_logits)])
    [(shard, shards)] = group.gathered
    assert shard.shape == (num_logits, 5000) and shard.dtype == torch.float32
    if rank == 0:
        assert shards.shape == (2, num_logits, 5000) and shards.is_contiguous()
