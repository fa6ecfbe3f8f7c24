"""Copies of KV blocks in host memory: one contract for synchronous and streamed copies.

The streams delay copies as far as their synchronisation permits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Protocol
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.router.lazy_streams import LazyDevice
from worker.device.kv_cache import KVCache
from worker.device.streams import cuda_streams
from worker.engine.plan import BlockCopy
from worker.runner.host_cache import HostCache, PlainHostCache, StreamedHostCache

CPU = torch.device("cpu")
BLOCKS, PLACES, STAGED = 5, 4, 2


class Bench(Protocol):
    """HostCache with PLACES places over ``cache``, and a device that computes meanwhile."""

    cache: KVCache
    host: HostCache

    def compute(self, work: Callable[[], object]) -> None: ...

    def finish(self) -> None: ...


class Plain:
    def __init__(self, cache: KVCache) -> None:
        self.cache, self.host = cache, PlainHostCache(cache, PLACES)

    def compute(self, work: Callable[[], object]) -> None:
        work()

    def finish(self) -> None:
        pass


class Lazy:
    def __init__(
        self, cache: KVCache, seed: int = 0, ignored: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        self._device = LazyDevice(Random(seed), ignored)
        self.cache = cache
        self.host = StreamedHostCache(cache, PLACES, STAGED, self._device.streams)
        self.compute, self.finish = self._device.compute.run, self._device.finish

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Make loads fail after their first block."""
        into = self._device.streams.into
        copy = into.copy

        def copy_and_break_off(target: Tensor, source: Tensor) -> None:
            copy(target, source)
            raise RuntimeError("it broke off")

        with patch.object(into, "copy", copy_and_break_off):
            yield


class OnGpu:
    def __init__(self, cache: KVCache) -> None:
        device = cache.tensor.device
        self.cache = cache
        self.host = StreamedHostCache(cache, PLACES, STAGED, cuda_streams(device))

    def compute(self, work: Callable[[], object]) -> None:
        work()

    def finish(self) -> None:
        torch.cuda.synchronize()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CONTRACT = [
    pytest.param(Plain, CPU, id="at once"),
    pytest.param(Lazy, CPU, id="put off"),
    pytest.param(OnGpu, torch.device("cuda"), id="cuda", marks=needs_gpu),
]


def small_cache(device: torch.device, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(BLOCKS, 3, 2, 8, dtype, device)
    cache.tensor.normal_()
    return cache


@pytest.mark.parametrize(("bench", "device"), CONTRACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_host_cache_restores_blocks_bit_for_bit(
    bench: Callable[[KVCache], Bench], device: torch.device, dtype: torch.dtype
) -> None:
    cache = small_cache(device, dtype)
    cache.tensor[1, 0, 0, 0, 0, :2] = torch.tensor([torch.nan, -0.0])
    bits = cache.tensor.view(torch.int16).clone()
    this = bench(cache)
    assert this.host.num_blocks == PLACES

    this.host.save([BlockCopy(1, 2), BlockCopy(3, 0)])
    this.compute(lambda: cache.tensor.index_fill_(0, torch.tensor([1, 3], device=device), 7.0))
    this.host.load([BlockCopy(3, 2), BlockCopy(0, 0)])
    this.finish()

    now = cache.tensor.view(torch.int16)
    assert torch.equal(now[3], bits[1]) and torch.equal(now[0], bits[3])
    assert torch.equal(now[2], bits[2]) and (cache.tensor[1] == 7.0).all()


@pytest.mark.parametrize(("bench", "device"), CONTRACT)
def test_host_cache_orders_copies_with_computation(
    bench: Callable[[KVCache], Bench], device: torch.device
) -> None:
    this = bench(small_cache(device))
    tensor, read = this.cache.tensor, list[Tensor]()
    this.compute(lambda: tensor[0].fill_(1.0))
    this.host.save([BlockCopy(0, 3)])
    this.compute(lambda: tensor[0].fill_(2.0))
    this.host.load([BlockCopy(4, 3)])
    this.compute(lambda: read.append(tensor[4].clone()))
    this.compute(lambda: tensor[4].fill_(3.0))
    this.finish()
    assert (read[0] == 1.0).all() and (tensor[0] == 2.0).all() and (tensor[4] == 3.0).all()


def history(this: Bench, seed: int) -> tuple[list[float], list[float]]:
    """Run random steps that save, load, read and write up to three blocks each.

    Return the values that were read, and the final content of the cache.
    """
    rng, read, kept = Random(seed), list[float](), set[int]()
    tensor, fresh = this.cache.tensor, float(BLOCKS)
    for _ in range(8):
        places = rng.sample(range(PLACES), rng.randint(0, 3))
        saves = [*map(BlockCopy, rng.sample(range(BLOCKS), len(places)), places)]
        kept.update(places)
        this.host.save(saves)
        places = rng.sample(sorted(kept), rng.randint(0, min(3, len(kept))))
        this.host.load([*map(BlockCopy, rng.sample(range(BLOCKS), len(places)), places)])
        for block in rng.sample(range(BLOCKS), 3):
            this.compute(lambda block=block: read.append(float(tensor[block].flatten()[0])))
        for block in rng.sample(range(BLOCKS), 2):
            fresh += 1
            this.compute(lambda block=block, value=fresh: tensor[block].fill_(value))
    this.finish()
    return read, tensor.flatten(1)[:, 0].tolist()


def counted_cache() -> KVCache:
    """Return a cache in which each block contains its number."""
    cache = KVCache(BLOCKS, 1, 1, 1, torch.float32, CPU)
    for block, tensor in enumerate(cache.tensor):
        tensor.fill_(block)
    return cache


SEEDS = range(60)


def test_host_cache_parallel_copies_equal_immediate_copies() -> None:
    for seed in SEEDS:
        expected = history(Plain(counted_cache()), seed)
        assert history(Lazy(counted_cache(), seed), seed) == expected, seed


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(("compute", "out"), id="staged blocks are overwritten"),
        pytest.param(("out", "compute"), id="blocks are sent before they are staged"),
        pytest.param(("into", "compute"), id="blocks are overwritten that are read still"),
        pytest.param(("into", "out"), id="places are read before they are written"),
        pytest.param(("compute", "into"), id="blocks are read before they are loaded"),
    ],
)
def test_host_cache_needs_every_wait(pair: tuple[str, str]) -> None:
    assert any(
        history(Lazy(counted_cache(), seed, frozenset({pair})), seed)
        != history(Plain(counted_cache()), seed)
        for seed in SEEDS
    )


def test_host_cache_failed_load_waits_for_begun_copies() -> None:
    """The block may belong to another sequence in the next step."""
    for seed in SEEDS:
        this = Lazy(counted_cache(), seed)
        this.host.save([BlockCopy(0, 0)])
        with this.breaking_off(), pytest.raises(RuntimeError):
            this.host.load([BlockCopy(2, 0), BlockCopy(3, 0)])
        this.compute(partial(this.cache.tensor[2].fill_, 9.0))
        this.finish()
        assert (this.cache.tensor[2] == 9.0).all(), seed
