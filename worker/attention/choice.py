"""Choice of the attention backend: compiled on CPUs, Triton on GPUs, else torch."""

from __future__ import annotations

import torch

from worker.attention.backend import AttentionBackend
from worker.attention.cpu import CpuAttention, compiled_kernel
from worker.attention.prompt_choice import choose_prompt_kernels
from worker.attention.reference import ReferenceAttention
from worker.config import WorkerConfig
from worker.device.kv_cache import FP8_CODES, KVCache
from worker.kernels.trial import kernels_work, why_no_kernels

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


def cache_dtype(config: WorkerConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the elements of the KV cache of a model that computes in ``dtype``."""
    return FP8_CODES if config.kv_cache_dtype == "fp8" else dtype


def check_cache_dtype(
    config: WorkerConfig, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    """Raise ValueError if there is no attention for the configured type of the KV cache.

    ``dtype`` is the type of the queries.
    """
    if config.kv_cache_dtype == "auto":
        return
    if device.type != "cuda":
        raise ValueError("kv_cache_dtype fp8 is for GPUs: set kv_cache_dtype to auto")
    if dtype == torch.float32:
        raise ValueError("kv_cache_dtype fp8 needs dtype bfloat16 or float16, not float32")
    cause = why_no_kernels(device)
    if head_dim > _LARGEST_HEAD:
        cause = f"heads have {head_dim} features, which is more than {_LARGEST_HEAD}"
    if cause:
        raise ValueError(f"kv_cache_dtype fp8 needs Triton's kernels: {cause}")


def _gpu_attention(cache: KVCache, device: torch.device) -> AttentionBackend:
    # Imported only for a GPU, because Triton may not be installed elsewhere.
    from worker.attention.gpu import GpuAttention

    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return GpuAttention(cache, multiprocessors, choose_prompt_kernels(cache))
