"""What of a GPU's memory is left for the KV cache. Pure.

|------------------------------------ total ------------------------------------|
|------------------------ total * gpu_memory_utilization ------------|
| outside | step: weights and the largest step | graphs | KV cache   |
"""

from __future__ import annotations

from typing import NamedTuple

from everlift.blockhash import BLOCK_SIZE
from worker.config import WorkerConfig
from worker.engine.limits import blocks_for

_MIB = 1 << 20
#: 8 million tokens. Of a very small model there is room for many more on a GPU, of which none would
#: be used, and the books of all of them are kept.
_MOST_BLOCKS = 1 << 18


class MemoryUse(NamedTuple):
    """Bytes of one GPU. ``outside`` are other processes', and this one's beside its tensors: CUDA
    itself, code, the buffers of collectives. ``step`` are the weights and what the largest step
    takes beside them, ``graphs`` what captured decoding does."""

    total: int
    outside: int
    step: int
    graphs: int

    def left(self, utilization: float) -> int:
        """For the KV cache; below 0 where there is too little already."""
        return int(self.total * utilization) - self.outside - self.step - self.graphs


def count_blocks(use: MemoryUse, config: WorkerConfig, block_bytes: int, num_beside: int) -> int:
    """Blocks of the KV cache, where ``num_beside`` more of their size are kept beside it. Raises
    ValueError where there is no room for a block, or for a sequence of ``max_model_len``, if that
    is set."""
    needed = blocks_for(config.max_model_len or 1)
    left = use.left(config.gpu_memory_utilization)
    num_blocks = left // block_bytes - num_beside
    if num_blocks < needed:
        lacking = (needed + num_beside) * block_bytes - left
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
        f"step take {step}, captured decoding {graphs}, and what is beside this worker's tensors "
        f"{outside}. Less is needed with a smaller max_num_batched_tokens or max_num_seqs{shorter}"
        f", or more ranks (tensor_parallel); a larger gpu_memory_utilization allows more. Workers "
        f"that share a GPU need kv_cache_mib"
    )


def _mib(size: int) -> int:
    return -(-size // _MIB)
