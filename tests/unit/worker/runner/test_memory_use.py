"""Part of a GPU's memory that the KV cache gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.config import WorkerConfig
from worker.runner.kv_blocks import MemoryUse, count_blocks

MIB = 1 << 20
#: Memory of a GPU with 24 GiB, of which 22,118 MiB are allowed.
USE = MemoryUse(total=24_576 * MIB, outside=500 * MIB, step=17_000 * MIB, graphs=200 * MIB)
CONFIG = WorkerConfig(model="m")
BLOCK = 4 * MIB


def test_count_blocks_uses_memory_left_of_allowance() -> None:
    assert USE.free_bytes(0.9) // MIB == 22_118 - 17_700
    assert count_blocks(USE, CONFIG, BLOCK, num_extra=0) == 4_418 // 4
    assert count_blocks(USE, CONFIG, BLOCK, num_extra=8) == 4_418 // 4 - 8
    half = replace(CONFIG, gpu_memory_utilization=0.75)
    assert count_blocks(USE, half, BLOCK, num_extra=0) == (18_432 - 17_700) // 4


def test_count_blocks_is_capped_for_small_model() -> None:
    assert count_blocks(USE, CONFIG, block_bytes=4096, num_extra=0) == 8 << 20 >> 5


sizes = st.integers(0, 1 << 36)


@given(sizes, sizes, sizes, sizes, st.floats(0.1, 1.0), st.integers(1, 1 << 24), st.integers(0, 9))
def test_count_blocks_fills_allowance_to_the_block(
    total: int, outside: int, step: int, graphs: int, part: float, block: int, num_extra: int
) -> None:
    use = MemoryUse(total, outside, step, graphs)
    config = replace(CONFIG, gpu_memory_utilization=part)
    rest = outside + step + graphs
    try:
        blocks = num_extra + count_blocks(use, config, block, num_extra)
    except ValueError:
        blocks = num_extra
    else:
        assert rest + blocks * block <= total * part
    assert blocks >= 1 << 18 or rest + (blocks + 1) * block > int(total * part)


def test_memory_shortage_names_amount_and_remedy() -> None:
    with pytest.raises(ValueError, match="lacks 86 MiB for a KV cache of 32 tokens") as failure:
        count_blocks(USE._replace(step=21_500 * MIB), CONFIG, BLOCK, num_extra=0)
    for size in ("24576 MiB", "0.9 allows 22119", "step take 21500", "decoding 200", "tensors 500"):
        assert size in str(failure.value)
    for setting in (
        "batched_tokens",
        "num_seqs",
        "tensor_parallel",
        "larger gpu_memory",
        "kv_cache_mib",
    ):
        assert setting in str(failure.value)
    assert "max_model_len" not in str(failure.value)


def test_count_blocks_refuses_context_without_room() -> None:
    asked = replace(CONFIG, max_model_len=32 * 1000)
    assert count_blocks(USE, asked, BLOCK, num_extra=0) == 1104
    with pytest.raises(ValueError, match=r"lacks 1582 MiB .* 48000 tokens.*smaller max_model_len"):
        count_blocks(USE, replace(asked, max_model_len=32 * 1500), BLOCK, num_extra=0)
