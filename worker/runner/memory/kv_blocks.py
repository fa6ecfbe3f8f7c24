"""How many blocks a rank's KV cache has: as many as it was told, as a size holds, or as a GPU has
room for beside all else, which is tried with a cache that is thrown away."""

from __future__ import annotations

from everlift import logs
from worker.config import WorkerConfig
from worker.device.device import kind_of
from worker.device.device_memory import CudaMemory, DeviceMemory
from worker.device.kv_cache import block_bytes
from worker.model.layers import Placement
from worker.runner.assembly import Assembly, KvShape, Loaded
from worker.runner.memory.largest_steps import largest_steps, num_blocks
from worker.runner.memory.memory_use import MemoryUse, count_blocks
from worker.runner.memory.profile_run import profile_run, scarcest
from worker.runner.swap import num_staged

log = logs.get(__name__)


def kv_blocks(config: WorkerConfig, loaded: Loaded, place: Placement) -> int:
    """The same on each rank. Raises ValueError where there is no room. A collective."""
    told = told_blocks(config, loaded.kv_shape, place)
    if told is not None:
        return told
    use = _profiled(config, loaded, place)
    size = block_bytes(*loaded.kv_shape, place.dtype)
    return count_blocks(use, config, size, num_staged(config))


def told_blocks(config: WorkerConfig, kv_shape: KvShape, place: Placement) -> int | None:
    """None on a GPU that is to be tried. Raises ValueError where there is no room."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_mib is None and place.device.type == "cuda":
        return None
    mib = config.cpu_kv_cache_mib
    count = (mib << 20) // place.group.size // block_bytes(*kv_shape, place.dtype)
    if count < 1:
        raise ValueError(f"kv_cache_mib {mib} holds not one block of this model")
    return count


def _profiled(config: WorkerConfig, loaded: Loaded, place: Placement) -> MemoryUse:
    """Of the rank with the least room."""
    use = profile(config, loaded, place, CudaMemory(place.device))
    use = scarcest(place.group, use, config.gpu_memory_utilization, place.device)
    mib = {f"{part}_mib": size >> 20 for part, size in use._asdict().items()}
    log.info("memory profiled", rank=place.group.rank, **mib)
    return use


def profile(
    config: WorkerConfig, loaded: Loaded, place: Placement, memory: DeviceMemory
) -> MemoryUse:
    plans = largest_steps(
        config.max_num_seqs,
        config.batched_tokens(kind_of(place.device)),
        loaded.max_model_len,
        config.speculation.num_draft_tokens,
    )
    scratch = Assembly.of(config, loaded, place, num_blocks(plans))
    scratch_bytes = scratch.cache.tensor.nbytes
    return profile_run(memory, scratch.runner(), plans, scratch.capture, scratch_bytes)
