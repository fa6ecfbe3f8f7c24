"""Timer of vLLM's attention kernel for CPUs, which runs in vLLM's environment.

    python -m benchmarks.attention_vllm SETTINGS

SETTINGS is JSON: layers, heads, kv_heads, head_dim, dtype, threads, and cases as in
attention_kernel.py. For each line of standard input, which names a case, the process prints the
seconds per layer to write the keys and values and compute attention.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

BLOCK_SIZE = 32


class Case:
    """Test case: rows with KV blocks in random order, and random queries, keys and values.

    ``shapes`` has (position of the first new token, number of new tokens) of each row.
    """

    def __init__(self, shapes: list[tuple[int, int]], caches: torch.Tensor, settings: Any) -> None:
        self._settings, self._dtype = settings, caches.dtype
        order = iter(torch.randperm(caches.shape[1]).tolist())
        lengths = [start + new for start, new in shapes]
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        tables = torch.zeros(len(shapes), max(counts), dtype=torch.int32)
        slots: list[int] = []
        for row, ((start, _), length, count) in enumerate(
            zip(shapes, lengths, counts, strict=True)
        ):
            blocks = [next(order) for _ in range(count)]
            tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            slots += [
                blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, length)
            ]
        self._tables, self._slots = tables, torch.tensor(slots)
        starts = torch.tensor([0, *(new for _, new in shapes)], dtype=torch.int32)
        self._starts = starts.cumsum(0, dtype=torch.int32)
        self._lengths = torch.tensor(lengths, dtype=torch.int32)
        kv_heads = settings["kv_heads"]
        sizes = [settings["heads"], kv_heads, kv_heads]
        qkv = torch.randn(len(slots), sum(sizes), settings["head_dim"]).to(self._dtype)
        self._query, self._key, self._value = (
            part.contiguous() for part in qkv.split(sizes, dim=1)
        )
        self._isa = _get_attn_isa(self._dtype, BLOCK_SIZE, settings["head_dim"])

    def seconds_a_layer(self, caches: torch.Tensor) -> float:
        settings, out = self._settings, torch.empty_like(self._query)
        began = time.perf_counter()
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self._lengths),
            num_heads=settings["heads"],
            num_kv_heads=settings["kv_heads"],
            head_dim=settings["head_dim"],
            seq_lens=self._lengths,
            dtype=self._dtype,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=True,
        )
        for cache in caches:
            keys, values = cache.view(*cache.shape[:2], BLOCK_SIZE * 2, -1).chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(
                self._key, self._value, keys, values, self._slots, self._isa
            )
            ops.cpu_attention_with_kv_cache(
                query=self._query,
                key_cache=keys,
                value_cache=values,
                output=out,
                query_start_loc=self._starts,
                seq_lens=self._lengths,
                scale=settings["head_dim"] ** -0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=self._tables,
                softcap=0.0,
                scheduler_metadata=metadata,
                s_aux=None,
            )
        return (time.perf_counter() - began) / len(caches)


@torch.inference_mode()
def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    current_platform.import_kernels()
    shape = settings["blocks"], settings["kv_heads"], BLOCK_SIZE, 2 * settings["head_dim"]
    caches = torch.randn(settings["layers"], *shape).to(getattr(torch, settings["dtype"]))
    cases = {name: Case(shapes, caches, settings) for name, shapes in settings["cases"].items()}
    print("ready", flush=True)
    for line in sys.stdin:
        print(cases[line.strip()].seconds_a_layer(caches), flush=True)


if __name__ == "__main__":
    main()
