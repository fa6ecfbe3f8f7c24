"""Choice of the attention backend: compiled on CPUs, Triton on GPUs, else torch."""

from __future__ import annotations

import torch

from worker.attention.backend import AttentionBackend
from worker.attention.cpu import CpuAttention, compiled_kernel
from worker.attention.prompt_choice import choose_prompt_kernels
from worker.attention.reference import ReferenceAttention
from worker.device.kv_cache import KVCache
from worker.kernels.trial import kernels_work

#: Largest head dimension of the Triton kernels. Tiles of larger heads need more memory than a
#: multiprocessor has.
_LARGEST_HEAD = 256


def choose_attention(cache: KVCache) -> AttentionBackend:
    """Return the fastest attention backend that works on the device of ``cache``.

    The first call on a machine compiles the kernel, which takes some seconds.
    """
    device, head_dim = cache.tensor.device, cache.tensor.shape[-1]
    if device.type == "cuda":
        if head_dim > _LARGEST_HEAD or not kernels_work(device):
            return ReferenceAttention(cache)
        return _gpu_attention(cache, device)
    kernel = compiled_kernel(head_dim, cache.tensor.dtype) if device.type == "cpu" else None
    return ReferenceAttention(cache) if kernel is None else CpuAttention(cache, kernel)


def _gpu_attention(cache: KVCache, device: torch.device) -> AttentionBackend:
    # Imported only for a GPU, because Triton may not be installed elsewhere.
    from worker.attention.gpu import GpuAttention

    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return GpuAttention(cache, multiprocessors, choose_prompt_kernels(cache))
