"""Measurement of swapping: the time to copy a block to the host and back, or to recompute it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from everlift import logs
from everlift.hashes import BLOCK_SIZE
from worker.config import WorkerConfig
from worker.device.kv_cache import KVCache
from worker.device.streams import cuda_streams
from worker.engine.limits import blocks_for
from worker.engine.plan import BlockCopy, Plan, Row, Rows, Runner
from worker.parallel.group import Group
from worker.runner.host_cache import HostCache, PlainHostCache, StreamedHostCache

log = logs.get_logger(__name__)

#: Number of timed runs of each measurement, after one that is not timed.
_ROUNDS = 5
#: Number of blocks that are copied at once in a measurement, like the few blocks of a preempted
#: sequence.
_BLOCKS = 8
#: Maximum number of blocks that are copied from a GPU to the host at the same time.
_STAGED = 8


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Time in seconds to copy one block to the host and back, and to recompute it in a chunk.

    ``load_s`` is the part of ``copy_s`` for the way back.
    """

    copy_s: float
    load_s: float
    compute_s: float

    @property
    def pays(self) -> bool:
        return self.copy_s < self.compute_s


def build_host_cache(
    config: WorkerConfig, cache: KVCache, group: Group, runner: Runner
) -> HostCache | None:
    """Build the host cache of ``config.swap_mib`` MiB, split evenly over the ranks.

    Returns None if swapping is disabled, if the size is less than one block, or if copying is not
    faster than recomputing. A collective: all ranks must call it, and rank 0's measurement decides.
    The measurement runs ``runner``, whose KV cache is ``cache``, and overwrites the cache.
    """
    if config.preemption == "recompute":
        return None
    num_blocks = (config.swap_mib << 20) // group.size // cache.tensor[0].nbytes
    if not num_blocks:
        log.warning("swap_mib is smaller than one block: using recompute", swap_mib=config.swap_mib)
        return None
    host = _host_cache(cache, num_blocks)
    longest = min(runner.max_model_len, runner.num_blocks * BLOCK_SIZE)
    chunk = _prefill(min(config.batched_tokens(runner.device_kind), longest))
    cost = measure(cache, host, lambda: runner.execute(chunk), chunk.num_tokens)
    pays = _broadcast_flag(group, cost.pays, cache.tensor.device)
    log.info(
        "swap measured",
        rank=group.rank,
        copy_us_per_block=round(cost.copy_s * 1e6, 1),
        compute_us_per_block=round(cost.compute_s * 1e6, 1),
        preemption="swap" if pays else "recompute",
        host_blocks=num_blocks if pays else 0,
    )
    host.load_s = cost.load_s
    return host if pays else None


def num_staged(config: WorkerConfig) -> int:
    """Return the number of blocks that swapping needs on a GPU in addition to the KV cache.

    The result is 0 unless ``config.preemption`` is "swap".
    """
    return _STAGED if config.preemption == "swap" else 0


def _host_cache(cache: KVCache, num_blocks: int) -> HostCache:
    device = cache.tensor.device
    if device.type != "cuda":
        return PlainHostCache(cache, num_blocks)
    return StreamedHostCache(cache, num_blocks, _STAGED, cuda_streams(device))


def _broadcast_flag(group: Group, flag: bool, device: torch.device) -> bool:
    return bool(group.broadcast(torch.tensor([int(flag)], device=device)).item())


def measure(
    cache: KVCache, host: HostCache, forward: Callable[[], object], num_tokens: int
) -> SwapCost:
    """Measure the time to copy a block to the host and back, and the time to recompute a block.

    ``forward`` must run a step of ``num_tokens`` tokens; the time to recompute a block is the
    block's share of that step. The blocks in ``host`` are overwritten.
    """
    count = min(_BLOCKS, cache.num_blocks, host.num_blocks)
    copies = [BlockCopy(block, block) for block in range(count)]

    def out_and_back() -> None:
        host.save(copies)
        host.load(copies)

    copied = _seconds(out_and_back, cache) / count
    loaded = _seconds(lambda: host.load(copies), cache) / count
    return SwapCost(copied, loaded, _seconds(forward, cache) / num_tokens * BLOCK_SIZE)


def _prefill(num_tokens: int) -> Plan:
    table = tuple(range(blocks_for(num_tokens)))
    return Plan(0, Rows.of([Row(0, (0,) * num_tokens, 0, table, samples=False)]))


def _seconds(work: Callable[[], object], cache: KVCache) -> float:
    times = []
    for _ in range(1 + _ROUNDS):
        start = time.perf_counter()
        work()
        if cache.tensor.is_cuda:
            torch.cuda.synchronize(cache.tensor.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
