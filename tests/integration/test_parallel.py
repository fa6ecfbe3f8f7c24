"""Groups of ranks over gloo; here the ranks are threads, which a group does not mind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.tensor_parallel_rank import LOOPBACK, listening
from worker.parallel import Group, create_store, init_group, join_store

CPU = torch.device("cpu")
Result = TypeVar("Result")


def on_ranks(size: int, act: Callable[[Group], Result]) -> list[Result]:
    """What ``act`` returns on each rank of one group, rank 0 first."""
    own, address = create_store()
    stores = [own, *(join_store(address) for _ in range(size - 1))]

    def join(rank: int) -> Result:
        group = init_group(stores[rank], rank, size, CPU)
        try:
            return act(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(join, range(size))]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sum_over_ranks_replaces_the_tensor(size: int) -> None:
    def act(group: Group) -> Tensor:
        tensor = torch.full((2, 3), 10.0**group.rank)
        assert group.all_reduce(tensor) is tensor
        return tensor

    total = sum(10.0**rank for rank in range(size))
    assert all((tensor == total).all() for tensor in on_ranks(size, act))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_come_side_by_side_to_the_first_rank(size: int) -> None:
    def act(group: Group) -> Tensor | None:
        return group.gather_to_first(torch.tensor([[group.rank, 7], [group.rank, 8]]))

    first, *others = on_ranks(size, act)
    assert first is not None
    assert first.tolist() == [[x for r in range(size) for x in (r, end)] for end in (7, 8)]
    assert others == [None] * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_ranks_tensor_replaces_the_others(size: int) -> None:
    def act(group: Group) -> list[int]:
        result: list[int] = group.broadcast(torch.tensor([group.rank, 40 + group.rank])).tolist()
        return result

    assert on_ranks(size, act) == [[0, 40]] * size


def test_a_lost_peer_is_an_error_and_no_hang() -> None:
    def act(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(RuntimeError):
                group.all_reduce(torch.zeros(4))

    on_ranks(2, act)


def test_a_group_listens_on_loopback_only_unless_told_otherwise() -> None:
    before = listening()

    def act(group: Group) -> set[tuple[str, str]]:
        group.barrier()
        found = listening()
        group.barrier()
        return found

    for found in on_ranks(2, act):
        # the store, and each rank
        assert [address for address, _ in found - before] == [LOOPBACK] * 3


def test_nothing_listens_any_more_when_a_group_is_closed() -> None:
    before = listening()
    own, address = create_store()
    other = join_store(address)
    with ThreadPoolExecutor(2) as threads:
        groups = [*threads.map(init_group, (own, other), (0, 1), (2, 2), (CPU, CPU))]
    for group in [*groups, *groups]:
        group.close()
    assert len(listening() - before) == 1  # the store
    del own, other
    assert listening() == before
