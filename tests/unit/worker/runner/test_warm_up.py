"""Warm-up of a GPU: it launches every form of attention that a step may have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worker.llama_support import save_llama
from worker.attention.gpu import GpuAttention, TileKey
from worker.config import WorkerConfig
from worker.device.upload import Parcel
from worker.engine.plan import Ints
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.warm_up import warm_up_plans


def forms(counts: Ints, group: int, kv_heads: int) -> set[tuple[int, int, int]]:
    """Return (tokens, block_rows, splits) of tiles on an H100 for rows with ``counts`` tokens."""
    cache = SimpleNamespace(tensor=torch.empty(0), kv_heads=kv_heads)
    attention = GpuAttention(cache, 132)  # type: ignore[arg-type]
    tile_sets = attention._tile_sets(counts, None, Parcel(torch.device("cpu")))
    tiles = tile_sets(TileKey(group, is_for_all=True))
    return {(each.tokens, each.block_rows, each.splits) for each in tiles}


def known_forms(max_num_seqs: int, budget: int, group: int, kv_heads: int) -> set[tuple[int, ...]]:
    plans = warm_up_plans(max_num_seqs, budget, 4096)
    return set().union(*(forms(plan.rows.counts, group, kv_heads) for plan in plans))


@given(
    st.data(),
    st.integers(1, 300),
    st.integers(1, 600),
    st.sampled_from([1, 3, 4, 5, 7, 16, 32]),
    st.integers(1, 8),
)
def test_warm_up_covers_every_attention_form(
    data: st.DataObject, max_num_seqs: int, budget: int, group: int, kv_heads: int
) -> None:
    known = known_forms(max_num_seqs, budget, group, kv_heads)
    most = data.draw(st.sampled_from([1, 2, 3, 16, 40]))
    counts = np.array(data.draw(st.lists(st.integers(1, most), min_size=1, max_size=max_num_seqs)))
    counts[0] = min(counts[0], budget)
    counts = counts[counts.cumsum() <= budget]
    assert forms(counts, group, kv_heads) <= known


def test_warm_up_covers_tile_counts_of_ragged_rows() -> None:
    assert forms(np.array([1, 3]), group=7, kv_heads=6) <= known_forms(2, 600, 7, 6)
    assert forms(np.array([3] * 30 + [1] * 10), 7, 4) <= known_forms(40, 100, 7, 4)


@pytest.mark.parametrize(("max_num_seqs", "budget", "longest"), [(1, 1, 2), (5, 5, 9), (3, 99, 64)])
def test_warm_up_plans_run_within_limits(
    tmp_path: Path, max_num_seqs: int, budget: int, longest: int
) -> None:
    config = WorkerConfig(
        model=str(save_llama(tmp_path)),
        device="cpu",
        dtype="float32",
        num_blocks=1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=longest,
    )
    threads = torch.get_num_threads()
    runner = build_runner(config, Group.single())
    torch.set_num_threads(threads)
    plans = list(warm_up_plans(max_num_seqs, budget, longest))
    assert all(plan.num_tokens <= budget and len(plan.rows) <= max_num_seqs for plan in plans)
    results = [runner.execute(plan) for plan in plans]
    assert len(results[-1][0].tokens) == 1
    runner.release([0])
