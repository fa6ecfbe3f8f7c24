"""Contract of all groups of ranks; here the ranks are threads instead of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count as count_from
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tests.support.worker.tensor_parallel_rank import LOOPBACK, listening
from worker.parallel import collectives
from worker.parallel import group as group_module
from worker.parallel.group import Group, _gloo, create_store, init_group, join_store

CPU = torch.device("cpu")
#: Types that a group sums, with the relative error of one rounding.
ROUNDINGS = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.int64: 0.0}
#: Number of elements, more than a slot of shared memory holds and not a multiple of it.
LONG = 3 * collectives._SLOT_BYTES // 4 + 13
Result = TypeVar("Result")


@pytest.fixture(params=["shared memory", "gloo"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "gloo":
        request.getfixturevalue("gloo")
    return str(request.param)


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable shared memory, as between ranks on different hosts."""
    monkeypatch.setattr(collectives, "init_collectives", lambda *_: None)


def on_ranks(
    size: int,
    act: Callable[[Group], Result],
    hosts: list[str] | None = None,
    device: torch.device = CPU,
) -> list[Result]:
    """Return the result of ``act`` on each rank of one group, rank 0 first."""
    own, address = create_store()
    stores = [own, *(join_store(address) for _ in range(size - 1))]

    def join(rank: int) -> Result:
        group = init_group(stores[rank], rank, size, device, hosts[rank] if hosts else None)
        try:
            return act(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(join, range(size))]


def numbers(rank: int, dtype: torch.dtype, count: int) -> Tensor:
    """Return ``count`` numbers of many magnitudes that depend on the rank."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**61), 2**61, (count,), generator=generator)
    wide = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp()
    return wide.to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduction_over_ranks_sums_in_place(size: int, way: str) -> None:
    def act(group: Group) -> Tensor:
        tensor = torch.full((2, 3), 10.0**group.rank)
        assert group.all_reduce(tensor) is tensor
        return tensor

    total = sum(10.0**rank for rank in range(size))
    assert all((tensor == total).all() for tensor in on_ranks(size, act))


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_reduction_is_bitwise_equal_on_all_ranks(size: int, dtype: torch.dtype, way: str) -> None:
    rng = Random(size)
    counts = [0, 1, 2, 1023, 1024, 1025, LONG, *(rng.randrange(5000) for _ in range(8))]

    def act(group: Group) -> list[Tensor]:
        return [group.all_reduce(numbers(group.rank, dtype, count)) for count in counts]

    first, *others = on_ranks(size, act)
    for other in others:
        assert all(map(torch.equal, first, other))
    exact = torch.int64 if dtype == torch.int64 else torch.float64
    for count, got in zip(counts, first, strict=True):
        parts = torch.stack([numbers(rank, dtype, count).to(exact) for rank in range(size)])
        tolerance = (size - 1) * ROUNDINGS[dtype] * parts.abs().sum(0).double()
        assert ((got.to(exact) - parts.sum(0)).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shared_memory_all_reduce_rounds_half_precision_once(dtype: torch.dtype) -> None:
    """The sums are rounded as by torch, including infinities, NaN and subnormal numbers."""
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 6e-8, -6e-8, 1e-39, 65504.0]
    pairs = torch.tensor([[a, b] for a in special for b in special]).to(dtype)
    columns = torch.cat([pairs.repeat(9, 1), numbers(7, dtype, 40_000).view(-1, 2)]).T

    def act(group: Group) -> Tensor:
        return group.all_reduce(columns[group.rank % 2].contiguous())

    for got in on_ranks(3, act):
        a, b = columns.float()
        expected = ((a + b) + a).to(dtype)
        is_nan = expected.isnan()
        assert torch.equal(got.isnan(), is_nan)
        assert torch.equal(got.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])


def test_shared_memory_all_reduce_supports_strided_tensors() -> None:
    def act(group: Group) -> list[list[float]]:
        tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T
        assert group.all_reduce(tensor) is tensor
        result: list[list[float]] = tensor.tolist()
        return result

    assert on_ranks(2, act) == [[[2.0, 6.0], [4.0, 8.0]]] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_concatenates_shards_on_the_first_rank(size: int, way: str) -> None:
    def act(group: Group) -> Tensor | None:
        return group.gather_to_first(torch.tensor([[group.rank, 7], [group.rank, 8]]))

    first, *others = on_ranks(size, act)
    assert first is not None
    assert first.tolist() == [[x for r in range(size) for x in (r, end)] for end in (7, 8)]
    assert others == [None] * (size - 1)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (7, 1001), (2, 3, 5), (3, LONG // 2)])
def test_gather_supports_shards_of_any_shape(shape: tuple[int, ...], way: str) -> None:
    def shard(rank: int) -> Tensor:
        count = torch.Size(shape).numel()
        return numbers(rank, torch.bfloat16, count).view(shape)

    for _ in range(3):
        first, *_ = on_ranks(3, lambda group: group.gather_to_first(shard(group.rank)))
        assert first is not None
        assert torch.equal(first, torch.cat([shard(rank) for rank in range(3)], dim=-1))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcast_copies_the_tensor_of_rank_0(size: int, way: str) -> None:
    def act(group: Group) -> list[list[int]]:
        long = torch.full((LONG,), group.rank)
        tensors = [torch.tensor([group.rank, 40 + group.rank]), long, torch.zeros(0)]
        assert all(group.broadcast(tensor) is tensor for tensor in tensors)
        return [tensor.unique().tolist() for tensor in tensors]

    assert on_ranks(size, act) == [[[0, 40], [0], []]] * size


def test_mixed_collectives_stay_in_order_across_ranks(way: str) -> None:
    """Rank 0 does not wait in a broadcast, and the other ranks do not wait in a gather."""

    def act(group: Group) -> None:
        rng = Random(3)
        for call in range(400):
            count = rng.choice([1, 100, LONG])
            tensor = torch.full((1, count), float(1000 * group.rank + call))
            match rng.randrange(4):
                case 0:
                    total = sum(1000 * rank + call for rank in range(group.size))
                    assert (group.all_reduce(tensor) == total).all()
                case 1:
                    assert (group.broadcast(tensor) == call).all()
                case 2:
                    if (rows := group.gather_to_first(tensor)) is not None:
                        ranks = (rows.view(group.size, count) - call) / 1000
                        assert (ranks == torch.arange(group.size).unsqueeze(1)).all()
                case 3:
                    group.barrier()

    on_ranks(3, act)


def test_groups_of_one_process_are_independent(way: str) -> None:
    def act(factor: int, group: Group) -> float:
        for _ in range(50):
            total = group.all_reduce(torch.full((3000,), float(factor)))
        return float(total[-1])

    with ThreadPoolExecutor(2) as pairs:
        assert [*pairs.map(lambda factor: on_ranks(2, partial(act, factor)), (1, 100))] == [
            [2.0, 2.0],
            [200.0, 200.0],
        ]


@pytest.mark.parametrize("call", ["all_reduce", "gather_to_first", "barrier"])
def test_collective_raises_an_error_when_a_peer_is_lost(call: str, way: str) -> None:
    def act(group: Group) -> None:
        if group.rank == 0:
            arguments = () if call == "barrier" else (torch.zeros(4),)
            with pytest.raises(RuntimeError):
                getattr(group, call)(*arguments)

    on_ranks(2, act)


def test_broadcast_raises_an_error_when_rank_0_is_lost(way: str) -> None:
    def act(group: Group) -> None:
        if group.rank == 1:
            with pytest.raises(RuntimeError):
                group.broadcast(torch.zeros(4))

    on_ranks(2, act)


def test_broadcast_is_delivered_after_the_sender_closed() -> None:
    has_left = Event()

    def act(group: Group) -> int:
        if group.rank == 1:
            has_left.wait()
        received = group.broadcast(torch.tensor(40 + group.rank))
        if group.rank == 0:
            group.close()
            has_left.set()
        return int(received)

    assert on_ranks(2, act) == [40, 40]


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        pytest.param(None, [LOOPBACK] * 2, id="default"),
        pytest.param(["127.0.0.2", "127.0.0.3"], ["0200007F", "0300007F"], id="as configured"),
    ],
)
def test_gloo_listens_on_loopback(hosts: list[str] | None, addresses: list[str]) -> None:
    before = listening()

    def act(group: Group) -> set[tuple[str, str]]:
        group.barrier()
        found = listening()
        group.barrier()
        return found

    for found in on_ranks(2, act, hosts):
        of_store_and_ranks = [LOOPBACK, *addresses]
        assert sorted(address for address, _ in found - before) == sorted(of_store_and_ranks)


def test_closed_group_releases_sockets_and_shared_memory(way: str) -> None:
    before = listening()
    own, address = create_store()
    other = join_store(address)
    with ThreadPoolExecutor(2) as threads:
        groups = [*threads.map(init_group, (own, other), (0, 1), (2, 2), (CPU, CPU))]
    assert [*segments()] == [" (deleted)"] * (2 if way == "shared memory" else 0)
    for group in [*groups, *groups]:
        group.close()
    assert len(listening() - before) == 1  # the store
    assert not [*segments()]
    del own, other
    assert listening() == before


def segments() -> Iterator[str]:
    """Yield the suffix after each shared-memory name that this process has mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/everlift-" in line:
            yield line[line.index("/dev/shm/") + len("/dev/shm/everlift-") + 32 :]


def test_closed_group_rejects_collectives() -> None:
    def act(group: Group) -> None:
        group.close()
        with pytest.raises(RuntimeError, match="closed"):
            group.all_reduce(torch.zeros(4))

    on_ranks(2, act)


# groups for GPUs, simulated with tensors on CPUs


def all_collectives(group: Group) -> list[object]:
    gathered = group.gather_to_first(torch.full((2, 1), float(group.rank)))
    return [
        group.on_device,
        group.all_reduce(torch.full((2,), 10.0**group.rank)).tolist(),
        None if gathered is None else gathered.tolist(),
        group.broadcast(torch.tensor([group.rank + 7])).tolist(),
        group.num_collectives,
        [group.agree(True), group.agree(group.rank == 0), group.agree(True)],
    ]


def expected_of(rank: int, on_device: bool) -> list[object]:
    gathered = [[0.0, 1.0], [0.0, 1.0]] if rank == 0 else None
    return [on_device, [11.0, 11.0], gathered, [7], 3, [True, False, True]]


@pytest.mark.parametrize("absent", [0, 1])
def test_gather_completes_when_one_rank_only_attends(absent: int, way: str) -> None:
    def act(group: Group) -> object:
        shard = torch.full((2, 3), float(group.rank))
        if group.rank == absent:
            group.join_gather(shard, torch.empty(2, 2, 3))
            gathered = None
        else:
            gathered = group.gather_to_first(shard)
        total = group.all_reduce(torch.ones(1)).item()
        return group.num_collectives, total, None if gathered is None else gathered.tolist()

    whole = [[0.0] * 3 + [1.0] * 3] * 2
    assert on_ranks(2, act) == [(2, 2.0, None if absent == 0 else whole), (2, 2.0, None)]


def test_ranks_that_share_a_gpu_communicate_over_the_host(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(group_module, "_name_of", lambda device: "GPU-1")
    results = on_ranks(2, all_collectives, device=torch.device("cuda"))
    assert results == [expected_of(rank, on_device=False) for rank in (0, 1)]


def test_ranks_with_separate_gpus_communicate_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    names = count_from()
    monkeypatch.setattr(group_module, "_name_of", lambda device: f"GPU-{next(names)}")
    aborted: list[int] = []

    class Nccl:
        def __init__(self, store: Any, rank: int, size: int) -> None:
            self._rank = rank
            self._gloo = _gloo(store, rank, size, "127.0.0.1")

        def __getattr__(self, name: str) -> Any:
            assert name != "shutdown", "it would wait for the others"
            return getattr(self._gloo, name)

        def abort(self) -> None:
            aborted.append(self._rank)
            self._gloo.shutdown()

    monkeypatch.setattr(group_module, "_nccl", Nccl)
    results = on_ranks(2, all_collectives, device=torch.device("cuda"))
    assert results == [expected_of(rank, on_device=True) for rank in (0, 1)]
    assert sorted(aborted) == [0, 1]


def test_collectives_stay_on_the_device_only_for_a_single_rank(way: str) -> None:
    assert on_ranks(1, lambda group: group.on_device) == [True]
    assert on_ranks(2, lambda group: group.on_device) == [False, False]
