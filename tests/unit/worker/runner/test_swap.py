"""Decision of rank 0, for all ranks, whether swapping is faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from worker.config import FakeModel, WorkerConfig
from worker.device.kv_cache import KVCache
from worker.engine.plan import Plan, RowResult
from worker.parallel.group import Group
from worker.runner import swap
from worker.runner.fake_runner import FakeRunner
from worker.runner.swap import SwapCost, build_host_cache

#: Cache with blocks of 1 MiB.
CACHE = KVCache(4, 4, 8, 128, torch.float32, torch.device("cpu"))
SWAP = WorkerConfig(model="fake", preemption="swap", swap_mib=3)


class Clock:
    """Clock that advances only by assignment."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(FakeRunner):
    """Runner whose steps take ``seconds``."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(4, FakeModel(max_model_len=100))
        self._clock = clock
        self._seconds = seconds
        self.plans: list[Plan] = []

    def execute(self, plan: Plan) -> list[RowResult]:
        self.plans.append(plan)
        self._clock.now += self._seconds
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock which each copy of a block, in each direction, advances by 1 s."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    for name in ("save", "load"):
        copy: Callable[..., None] = getattr(swap.PlainHostCache, name)

        def timed(self: object, copies: list[object], copy: Callable[..., None] = copy) -> None:
            clock.now += len(copies)
            copy(self, copies)

        monkeypatch.setattr(swap.PlainHostCache, name, timed)
    return clock


def test_host_cache_is_built_if_copying_is_faster(clock: Clock) -> None:
    runner = Timed(clock, seconds=100 / 32 * 2.01)
    host = build_host_cache(SWAP, CACHE, Group.single(), runner)
    assert host is not None and host.num_blocks == 3
    assert {plan.num_tokens for plan in runner.plans} == {100}, "as many as a step may have here"


def test_host_cache_is_not_built_if_computing_is_faster(clock: Clock) -> None:
    runner = Timed(clock, seconds=100 / 32 * 1.99)
    assert build_host_cache(SWAP, CACHE, Group.single(), runner) is None


class Follower(Group):
    """Rank 1 of two, which receives ``word`` from rank 0."""

    rank, size = 1, 2

    def __init__(self, word: int) -> None:
        self._word = word

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(self._word)


@pytest.mark.parametrize("word", [0, 1])
def test_host_cache_decision_is_made_by_rank_0(clock: Clock, word: int) -> None:
    runner = Timed(clock, seconds=0.0 if word else 1000.0)
    host = build_host_cache(SWAP, CACHE, Follower(word), runner)
    assert (host is not None) == bool(word)
    assert host is None or host.num_blocks == 1, "the ranks share the memory"


@pytest.mark.parametrize("changes", [{"preemption": "recompute"}, {"swap_mib": 0}])
def test_swap_cost_is_not_measured_if_disabled(clock: Clock, changes: dict[str, object]) -> None:
    runner = Timed(clock, seconds=1000.0)
    config = replace(SWAP, **changes)  # type: ignore[arg-type]
    assert build_host_cache(config, CACHE, Group.single(), runner) is None
    assert not runner.plans


def test_swap_cost_tie_does_not_pay() -> None:
    assert SwapCost(copy_s=1.0, load_s=0.5, compute_s=1.1).pays
    assert not SwapCost(copy_s=1.0, load_s=0.5, compute_s=1.0).pays
