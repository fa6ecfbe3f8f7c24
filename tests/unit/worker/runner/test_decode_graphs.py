"""Captured decode steps, on a device without graphs.

A replay calls the captured work again, which depends on its tensors only.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.worker.attention_support import KERNELS_ON
from worker.attention.backend import AttentionForm, StepAttention
from worker.attention.gpu import GpuAttention
from worker.device.kv_cache import KVCache
from worker.device.upload import Parcel
from worker.engine.plan import UNKNOWN, Row, Rows
from worker.runner import decode_graphs
from worker.runner.decode_graphs import CudaGraphs, DecodeGraphs, Work
from worker.runner.sampled_tokens import LastTokens

HEADS, KV_HEADS, DIM = 4, 2, 16
VOCAB = 50
#: Context length of each slot.
CONTEXTS = [70, 0, 31, 5, 33]


class Trunk:
    """Model with one attention layer."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self._table = torch.randn(VOCAB, (HEADS + 2 * KV_HEADS) * DIM, device=KERNELS_ON)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        sites: Tensor | None = None,
    ) -> Tensor:
        heads = self._table[tokens] * (1 + positions.unsqueeze(1) / 100)
        heads = heads.view(len(tokens), -1, DIM)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        attention.write(0, key, value)
        return attention.attend(0, query, AttentionForm(0.2)).flatten(1)


class Repeating:
    """Capture that records the number of rows of each captured step, largest first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, work: Work) -> Work:
        self.sizes.append(len(work()))
        return work


class Bench:
    """Decode graphs over a cache with the contexts of all slots, and NaN everywhere else."""

    def __init__(self) -> None:
        self.trunk, self.capture = Trunk(), Repeating()
        cache = KVCache(12, 1, KV_HEADS, DIM, torch.float32, KERNELS_ON)
        cache.tensor.fill_(torch.nan)
        self.attention = GpuAttention(cache, 4)
        self.tables = np.array([[5, 0, 9], [1, 0, 0], [7, 11, 0], [2, 0, 0], [10, 3, 0]], np.int32)
        self.last_tokens = LastTokens(len(CONTEXTS), KERNELS_ON)
        self.graphs = DecodeGraphs(
            self.trunk, self.attention, self.last_tokens, [1, 2, 4], 3, KERNELS_ON, self.capture
        )
        prompts = [
            Row(slot, tuple(range(count)) if count < VOCAB else (3,) * count, 0, (), False)
            for slot, count in enumerate(CONTEXTS)
            if count
        ]
        with torch.inference_mode():
            self.eagerly(Rows.of(prompts, self.tables))

    def decoding(self, slots: list[int], tokens: list[int]) -> Rows:
        starts = np.array([CONTEXTS[slot] for slot in slots])
        return Rows.decoding(np.array(slots), starts, np.array(tokens), self.tables)

    def eagerly(self, rows: Rows) -> Tensor:
        tokens, positions = (
            torch.from_numpy(column).to(KERNELS_ON) for column in (rows.tokens, rows.positions)
        )
        return self.trunk.forward(tokens, positions, self.attention.prepare(rows))


def nothing() -> Parcel:
    return Parcel(KERNELS_ON)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def test_decode_graphs_capture_largest_bucket_first(bench: Bench) -> None:
    assert bench.capture.sizes == [4, 2, 1]


def test_decode_graphs_keep_captured_inputs_alive(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured graph has the addresses of its tensors, but does not keep them alive."""
    steps: list[weakref.ref[StepAttention]] = []
    decoding = bench.attention.decoding

    def noted(*tensors: Tensor) -> StepAttention:
        step = decoding(*tensors)
        steps.append(weakref.ref(step))
        return step

    def capture(work: Work) -> Work:
        result = work()
        return lambda: result

    monkeypatch.setattr(bench.attention, "decoding", noted)
    graphs = DecodeGraphs(
        bench.trunk, bench.attention, bench.last_tokens, [1, 2], 3, KERNELS_ON, capture
    )
    gc.collect()
    assert graphs and len(steps) == 2 and all(step() is not None for step in steps)


class Graph:
    """Graph that lives as long as it is referenced."""


def test_decode_graphs_close_frees_captures_at_once(bench: Bench) -> None:
    """NCCL ends only after graphs with its collectives are freed, so GC would be too late."""
    captured: list[weakref.ref[Graph]] = []

    def capture(work: Work) -> Work:
        result, graph = work(), Graph()
        captured.append(weakref.ref(graph))

        def replay() -> Tensor:
            assert graph is not None
            return result

        return replay

    graphs = DecodeGraphs(
        bench.trunk, bench.attention, bench.last_tokens, [1, 2], 3, KERNELS_ON, capture
    )
    assert [graph() is None for graph in captured] == [False, False]
    gc.disable()
    try:
        graphs.close()
        assert [graph() is None for graph in captured] == [True, True]
    finally:
        gc.enable()


@torch.inference_mode()
def test_decode_graphs_replay_matches_eager(bench: Bench) -> None:
    for slots in ([0, 1, 2, 4], [2, 3, 0], [4], [1, 3], [3, 2, 1]):
        rows = bench.decoding(slots, [slot + 5 for slot in slots])
        assert bench.graphs.bucket(rows)
        replayed = bench.graphs.run(rows, nothing())
        torch.testing.assert_close(replayed, bench.eagerly(rows), atol=2e-6, rtol=0)


@torch.inference_mode()
def test_decode_graphs_read_unknown_tokens_from_last_drawn(bench: Bench) -> None:
    slots, drawn = (torch.tensor(it, device=KERNELS_ON) for it in ([4, 2], [33, 11]))
    bench.last_tokens.write(slots, drawn)
    known = bench.graphs.run(bench.decoding([2, 3, 4], [11, 8, 33]), nothing()).clone()
    resolved = bench.graphs.run(bench.decoding([2, 3, 4], [UNKNOWN, 8, UNKNOWN]), nothing())
    assert torch.equal(known, resolved)


@torch.inference_mode()
def test_decode_graphs_look_up_marks_as_valid_tokens(bench: Bench) -> None:
    slots, marks = (torch.tensor(it, device=KERNELS_ON) for it in ([0, 1], [-1, -2]))
    bench.last_tokens.write(slots, marks)
    rows = bench.decoding([0, 1], [UNKNOWN, UNKNOWN])
    assert bench.graphs.run(rows, nothing()).isfinite().all()


class Stream:
    """Stream of a GPU that does not exist."""

    def wait_stream(self, other: Stream) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Captured:
    """Arguments with which a graph was captured."""

    pool: object
    stream: Stream
    capture_error_mode: str


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Captured]]:
    """Yield the arguments of each capture, in order."""
    decode_graphs._capture_stream.cache_clear()
    graphs: list[Captured] = []

    def graph(_: object, **how: Any) -> AbstractContextManager[None]:
        graphs.append(Captured(**how))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: "pool"))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    yield graphs
    decode_graphs._capture_stream.cache_clear()


def test_cuda_graphs_share_pool_and_allow_other_threads(captured: list[Captured]) -> None:
    capture = CudaGraphs()
    for _ in range(3):
        capture(lambda: torch.zeros(1))
    assert [each.pool for each in captured] == [None, "pool", "pool"]
    assert {each.capture_error_mode for each in captured} == {"thread_local"}


def test_cuda_graphs_of_profile_and_decoding_share_stream(
    captured: list[Captured],
) -> None:
    for capture in (CudaGraphs(), CudaGraphs()):
        capture(lambda: torch.zeros(1))
        capture(lambda: torch.zeros(1))
    assert [each.pool for each in captured] == [None, "pool"] * 2
    assert len({each.stream for each in captured}) == 1


@pytest.mark.parametrize("slots", [[0, 1, 2, 3, 4], []])
def test_decode_graphs_have_no_bucket_for_too_many_or_no_rows(
    bench: Bench, slots: list[int]
) -> None:
    assert bench.graphs.bucket(Rows.of([Row(slot, (1,), 3, (0,), True) for slot in slots])) is None
