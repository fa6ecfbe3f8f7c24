"""Which attention there is for a KV cache: the compiled one on CPUs where there is a compiler, else
torch's."""

from __future__ import annotations

from worker.attention.backend import AttentionBackend
from worker.attention.cpu import CpuAttention, compiled_kernel
from worker.attention.reference import ReferenceAttention
from worker.kv_cache import KVCache


def choose_attention(cache: KVCache) -> AttentionBackend:
    """Compiles the kernel, in a few seconds, where this machine has not done so before."""
    if cache.tensor.device.type != "cpu":
        return ReferenceAttention(cache)
    kernel = compiled_kernel(cache.tensor.shape[-1], cache.tensor.dtype)
    return ReferenceAttention(cache) if kernel is None else CpuAttention(cache, kernel)
