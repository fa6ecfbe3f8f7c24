"""Number of KV blocks of a rank: configured, fit to a configured size, or from a memory profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from everlift import logs
from everlift.hashes import BLOCK_SIZE
from everlift.sampling import MAX_LOGPROBS, SamplingParams
from worker.attention.choice import cache_dtype
from worker.config import WorkerConfig
from worker.device.device import kind_of
from worker.device.gpu import CudaMemory, DeviceMemory
from worker.device.kv_cache import block_bytes
from worker.engine.limits import blocks_for
from worker.engine.plan import Admission, Plan, Row, Rows, Runner
from worker.model.layers import Placement
from worker.parallel.group import Group
from worker.runner.assembly import Assembly, KvShape, LoadedModel
from worker.runner.swap import num_staged

#: Sampling parameters with which the sampler computes the most.
_EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=MAX_LOGPROBS,
)


def largest_steps(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_drafts: int,
    adapter: str = "",
) -> tuple[Plan, Plan]:
    """Return the plans of the two largest steps: one of prompts, and one of decodes with drafts.

    Both have one row for each of ``max_num_seqs`` sequences, which have the LoRA adapter
    with the digest ``adapter``. All rows have the same block table, which begins with block 0.
    """
    num_drafts = min(num_drafts, max_num_batched_tokens // max_num_seqs - 1, max_model_len - 2)
    longest = max_model_len - 1 - num_drafts
    share, more = divmod(max_num_batched_tokens, max_num_seqs)
    lengths = [min(longest, share + (slot < more)) for slot in range(max_num_seqs)]
    table = tuple(range(blocks_for(max(lengths) + 1 + num_drafts)))
    prompts = [Row(slot, (0,) * n, 0, table, samples=True) for slot, n in enumerate(lengths)]
    drafted = (0,) * (1 + num_drafts)
    decodes = [
        Row(slot, drafted, n, table, samples=True, num_drafts=num_drafts)
        for slot, n in enumerate(lengths)
    ]
    admissions = tuple(_admission(row, adapter) for row in prompts)
    return Plan(1, Rows.of(prompts), admissions), Plan(2, Rows.of(decodes))


def num_blocks(plans: tuple[Plan, ...]) -> int:
    """Return the number of blocks of the smallest KV cache in which ``plans`` can run."""
    return max(int(plan.rows.tables.shape[1]) for plan in plans)


def _admission(row: Row, adapter: str) -> Admission:
    return Admission(
        row.slot,
        row.tokens,
        len(row.tokens),
        _EVERYTHING,
        frozenset(),
        choice=0,
        adapter=adapter,
    )


def profile_run(
    memory: DeviceMemory,
    runner: Runner,
    plans: Iterable[Plan],
    capture: Callable[[], object],
    scratch_bytes: int,
) -> MemoryUse:
    """Run ``plans``, and return the memory that they use except for the KV cache.

    The ``runner`` has a small KV cache of ``scratch_bytes`` bytes. The weights must be loaded.
    ``capture`` captures the decode steps and returns an object that owns the graphs. All ranks must
    do this at the same time. Raises ValueError if there is too little memory for the steps.
    """
    memory.release()
    _execute(runner, plans)
    step = memory.peak_reserved - scratch_bytes
    graphs = _graph_bytes(memory, capture)
    memory.release()
    return MemoryUse(memory.total, memory.used - memory.reserved, step, graphs)


def _execute(runner: Runner, plans: Iterable[Plan]) -> None:
    for plan in plans:
        try:
            runner.execute(plan)
        except MemoryError as error:
            raise ValueError(
                f"besides the weights the GPU has too little memory for a step of "
                f"{plan.num_tokens} tokens of {len(plan.rows)} sequences: reduce "
                f"max_num_batched_tokens or max_num_seqs, or increase tensor_parallel ({error})"
            ) from error


def _graph_bytes(memory: DeviceMemory, capture: Callable[[], object]) -> int:
    memory.release()
    before = memory.used
    graphs = capture()
    memory.release()
    num_bytes = memory.used - before
    del graphs
    return max(0, num_bytes)


def use_of_tightest_rank(
    group: Group, use: MemoryUse, utilization: float, device: torch.device
) -> MemoryUse:
    """Return the memory use of the rank with the least memory left for its KV cache.

    A collective: all ranks must call it, and it returns the same result on all. ``use`` is this
    rank's memory use, and ``utilization`` the fraction of a GPU's memory that may be used.
    """
    gathered = group.gather_to_first(torch.tensor(use, device=device))
    chosen = use
    if gathered is not None:
        ranks = (MemoryUse(*numbers) for numbers in gathered.view(group.size, -1).tolist())
        chosen = min(ranks, key=lambda rank: rank.free_bytes(utilization))
    return MemoryUse(*group.broadcast(torch.tensor(chosen, device=device)).tolist())


_MIB = 1 << 20
#: Maximum number of blocks, 8 million tokens. Far more blocks of a very small model fit on a GPU,
#: but they would never be used and still need bookkeeping.
_MOST_BLOCKS = 1 << 18


class MemoryUse(NamedTuple):
    """Memory of one GPU in bytes: the total, and the parts that are not KV cache.

    ``outside`` is used by other processes, and by this one apart from its tensors: CUDA itself,
    code, buffers of collectives. ``step`` is used by the weights and the largest step, ``graphs``
    by captured decode steps.
    """

    total: int
    outside: int
    step: int
    graphs: int

    def free_bytes(self, utilization: float) -> int:
        """Return the bytes left for the KV cache; negative if memory is too short.

        ``utilization`` is the fraction of the GPU's memory that may be used.
        """
        return int(self.total * utilization) - self.outside - self.step - self.graphs


def count_blocks(use: MemoryUse, config: WorkerConfig, block_bytes: int, num_extra: int) -> int:
    """Return the number of blocks of the KV cache, leaving memory for ``num_extra`` more blocks.

    The result is at most _MOST_BLOCKS. ``block_bytes`` is the size of a block in bytes. Raises
    ValueError if fewer blocks fit than a sequence of ``config.max_model_len`` tokens needs. One
    block is enough if ``config.max_model_len`` is None.
    """
    needed = blocks_for(config.max_model_len or 1)
    free = use.free_bytes(config.gpu_memory_utilization)
    num_blocks = free // block_bytes - num_extra
    if num_blocks < needed:
        lacking = (needed + num_extra) * block_bytes - free
        raise ValueError(_too_little(use, config, needed, lacking))
    return min(num_blocks, _MOST_BLOCKS)


def _too_little(use: MemoryUse, config: WorkerConfig, needed: int, lacking: int) -> str:
    part = config.gpu_memory_utilization
    allowed = _mib(int(use.total * part))
    total, outside, step, graphs = map(_mib, use)
    tokens = needed * BLOCK_SIZE
    shorter = ", a smaller max_model_len" if config.max_model_len is not None else ""
    return (
        f"the GPU lacks {_mib(lacking)} MiB for a KV cache of {tokens} tokens: of its {total} MiB "
        f"gpu_memory_utilization {part:g} allows {allowed}, of which the weights and the largest "
        f"step take {step}, captured decoding {graphs}, and memory outside this worker's tensors "
        f"{outside}. Less is needed with a smaller max_num_batched_tokens or max_num_seqs{shorter}"
        f", or with a larger tensor_parallel. A larger gpu_memory_utilization allows more. Workers "
        f"that share a GPU need kv_cache_mib"
    )


def _mib(size: int) -> int:
    return -(-size // _MIB)


log = logs.get_logger(__name__)


def kv_blocks(config: WorkerConfig, loaded: LoadedModel, place: Placement) -> int:
    """Return the number of KV blocks, which is equal on all ranks.

    A collective: all ranks must call it. Raises ValueError if there is too little memory or the
    configured size is less than one block.
    """
    configured = configured_blocks(config, loaded.kv_shape, place)
    if configured is not None:
        return configured
    use = _profiled(config, loaded, place)
    size = block_bytes(*loaded.kv_shape, cache_dtype(config, place.dtype))
    return count_blocks(use, config, size, num_staged(config))


def configured_blocks(config: WorkerConfig, kv_shape: KvShape, place: Placement) -> int | None:
    """Return the configured number of KV blocks of a rank; None if it must be measured on a GPU.

    Raises ValueError if the configured size is less than one block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_mib is None and place.device.type == "cuda":
        return None
    mib = config.cpu_kv_cache_mib
    size = block_bytes(*kv_shape, cache_dtype(config, place.dtype))
    count = (mib << 20) // place.group.size // size
    if count < 1:
        raise ValueError(f"kv_cache_mib {mib} is less than one KV block of this model on each rank")
    return count


def _profiled(config: WorkerConfig, loaded: LoadedModel, place: Placement) -> MemoryUse:
    use = profile(config, loaded, place, CudaMemory(place.device))
    use = use_of_tightest_rank(place.group, use, config.gpu_memory_utilization, place.device)
    mib = {f"{part}_mib": size >> 20 for part, size in use._asdict().items()}
    log.info("memory profiled", rank=place.group.rank, **mib)
    return use


def profile(
    config: WorkerConfig, loaded: LoadedModel, place: Placement, memory: DeviceMemory
) -> MemoryUse:
    adapters = loaded.adapters
    plans = largest_steps(
        config.max_num_seqs,
        config.batched_tokens(kind_of(place.device)),
        loaded.max_model_len,
        config.speculation.num_draft_tokens,
        "" if adapters is None else next(iter(adapters.numbers), ""),
    )
    scratch = Assembly.of(config, loaded, place, num_blocks(plans))
    scratch_bytes = scratch.cache.tensor.nbytes
    use = profile_run(memory, scratch.runner(), plans, scratch.capture, scratch_bytes)
    reserved = 0 if adapters is None else adapters.reserved_bytes(config.max_adapter_rank)
    return use._replace(step=use.step + reserved)
