"""Memory of a worker besides its KV cache, on a device that only counts allocations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from worker.config import Speculation, WorkerConfig
from worker.device.gpu import CudaMemory
from worker.engine.plan import Plan, RowResult
from worker.model.layers import Placement
from worker.parallel.group import Group
from worker.runner.assembly import LoadedModel
from worker.runner.build import _explain_out_of_memory, _load
from worker.runner.fake_runner import FakeRunner
from worker.runner.kv_blocks import (
    MemoryUse,
    kv_blocks,
    largest_steps,
    profile,
    profile_run,
    use_of_tightest_rank,
)

DEMO_MODEL = Path(__file__).parents[4] / "cluster" / "demo_model"
CPU = torch.device("cpu")
WEIGHTS, SCRATCH, CODE = 5_000, 300, 70
#: Temporary memory per token of a step; lasting memory of decode graphs in and outside tensors.
TOKEN, POOL, GRAPHS = 10, 400, 33


class CountedMemory:
    """DeviceMemory that keeps freed memory for other tensors, as torch does."""

    def __init__(self, total: int = 100_000, outside: int = 1_000) -> None:
        self.total = total
        self.outside = outside
        self.tensors = WEIGHTS + SCRATCH
        self.kept = 2_000
        self._most = self.reserved

    @property
    def reserved(self) -> int:
        return self.tensors + self.kept

    @property
    def used(self) -> int:
        return self.outside + self.reserved

    @property
    def peak_reserved(self) -> int:
        return self._most

    def release(self) -> None:
        self.kept = 0
        self._most = self.reserved

    def borrow(self, size: int) -> None:
        self.kept = max(self.kept, size)
        self._most = max(self._most, self.reserved)


class Counted(FakeRunner):
    """Runner whose first step loads code, and which runs out of memory above ``most`` tokens."""

    def __init__(self, memory: CountedMemory, most: int = 1_000) -> None:
        super().__init__(4, model=WorkerConfig().fake)
        self._memory = memory
        self._most = most
        self._code = CODE

    def execute(self, plan: Plan) -> list[RowResult]:
        if plan.num_tokens > self._most:
            raise MemoryError("tried to allocate 3.00 GiB")
        self._memory.outside += self._code
        self._code = 0
        self._memory.borrow(TOKEN * plan.num_tokens)
        return []


class Graphs:
    """Memory of captured decode steps, held while the object exists."""

    def __init__(self, memory: CountedMemory) -> None:
        self._memory = memory
        memory.borrow(5_000)
        memory.tensors += POOL
        memory.outside += GRAPHS

    def __del__(self) -> None:
        self._memory.tensors -= POOL
        self._memory.kept += POOL
        self._memory.outside -= GRAPHS


PLANS = largest_steps(2, 90, 4096, num_drafts=0)


def test_profile_run_separates_outside_step_and_graphs() -> None:
    memory = CountedMemory()
    use = profile_run(memory, Counted(memory), PLANS, lambda: Graphs(memory), SCRATCH)
    assert use == MemoryUse(
        total=100_000, outside=1_000 + CODE, step=WEIGHTS + TOKEN * 90, graphs=POOL + GRAPHS
    )
    assert memory.reserved == WEIGHTS + SCRATCH, "the graphs are gone, and nothing is kept"


def test_profile_run_without_capture_counts_no_graphs() -> None:
    memory = CountedMemory()
    assert profile_run(memory, Counted(memory), PLANS, lambda: None, SCRATCH).graphs == 0


def test_profile_run_of_too_large_step_names_remedy() -> None:
    memory = CountedMemory()
    with pytest.raises(ValueError, match=r"90 tokens of 2 .*max_num_batched_tokens.*3\.00 GiB"):
        profile_run(memory, Counted(memory, most=50), PLANS, lambda: None, SCRATCH)


class Rank(Group):
    """Rank of two; the other one reports ``other``."""

    size = 2

    def __init__(self, rank: int, other: MemoryUse) -> None:
        self.rank = rank
        self._other = torch.tensor(other)

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        return None if self.rank else torch.cat([shard, self._other], dim=-1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._other) if self.rank else tensor


ROOMY, TIGHT = MemoryUse(1_000, 0, 100, 0), MemoryUse(900, 100, 150, 20)


@pytest.mark.parametrize(
    ("group", "own"),
    [(Rank(0, TIGHT), ROOMY), (Rank(0, ROOMY), TIGHT), (Rank(1, TIGHT), ROOMY)],
)
def test_tightest_rank_decides_memory_use(group: Group, own: MemoryUse) -> None:
    assert use_of_tightest_rank(group, own, 0.9, CPU) == TIGHT


def test_scarcest_of_single_rank_is_its_own_use() -> None:
    assert use_of_tightest_rank(Group.single(), ROOMY, 0.9, CPU) == ROOMY


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_profile_computes_largest_steps_of_model(num_drafts: int) -> None:
    config = WorkerConfig(
        model=str(DEMO_MODEL),
        max_num_seqs=4,
        max_num_batched_tokens=150,
        speculation=Speculation(num_drafts),
    )
    place = Placement(Group.single(), torch.float32, CPU)
    loaded = _load(config, DEMO_MODEL, place)
    memory = CountedMemory()
    use = profile(config, loaded, place, memory)
    scratch = 2 * 32 * 4 * torch.Size(loaded.kv_shape).numel() * 2
    assert use.step == WEIGHTS + SCRATCH - scratch, "it knows nothing of torch's own memory"


def test_kv_blocks_follow_settings() -> None:
    def kv(**settings: Any) -> int:
        return kv_blocks(WorkerConfig(**settings), loaded, place)

    place = Placement(Group.single(), torch.float32, CPU)
    loaded = LoadedModel(None, 0, 4096, (3, 2, 64), 0)  # type: ignore[arg-type]
    assert kv(num_blocks=7) == 7
    assert kv(kv_cache_mib=512) // 2 == kv(kv_cache_mib=256) == kv()


def test_kv_blocks_of_gpu_use_rest_and_reserve_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kv(**settings: Any) -> int:
        return kv_blocks(WorkerConfig(**settings), loaded, place)

    place = Placement(Group.single(), torch.float16, torch.device("cuda"))
    loaded = LoadedModel(None, 0, 4096, (32, 8, 128), 0)  # type: ignore[arg-type]
    use = MemoryUse(80 << 30, 1 << 30, 20 << 30, 1 << 30)
    monkeypatch.setattr("worker.runner.kv_blocks._profiled", lambda *_: use)
    assert kv() == 50 * 256, "blocks of 4 MiB"
    assert kv(preemption="swap") == kv() - 8
    assert kv(gpu_memory_utilization=0.5) == 18 * 256
    assert (kv(num_blocks=7), kv(kv_cache_mib=512)) == (7, 128)
    assert kv(kv_cache_dtype="fp8") == 2 * kv()
    assert kv(kv_cache_dtype="fp8", kv_cache_mib=512) == 256


def test_gpu_out_of_memory_names_purpose_and_remedy() -> None:
    with (
        pytest.raises(ValueError, match=r"for the weights: CUDA .* \(more ranks\)"),
        _explain_out_of_memory("the weights", "more ranks"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_memory_reads_bytes_held_by_torch() -> None:
    memory = CudaMemory(torch.device("cuda"))
    memory.release()
    before, used = memory.reserved, memory.used
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert memory.reserved - before == tensor.nbytes <= memory.used - used
    del tensor
    assert memory.peak_reserved - before == 64 << 20
    memory.release()
    assert memory.reserved == before <= memory.used < memory.total
