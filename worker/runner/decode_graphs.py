"""Decode steps as captured graphs, one per bucket: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from worker.attention.backend import StepAttention
from worker.device.upload import Parcel, upload_into
from worker.engine.plan import Rows
from worker.runner.decode_buckets import Parts, bucket_for, describe, input_length, parcel_length
from worker.runner.sampled_tokens import LastTokens

Work = Callable[[], Tensor]


class Capture(Protocol):
    def __call__(self, work: Work) -> Work:
        """Run ``work`` at least once, and return a function that repeats it on the same tensors."""
        ...


class CudaGraphs:
    """Implementation of Capture with CUDA graphs; all its graphs share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream = _capture_stream()

    def __call__(self, work: Work) -> Work:
        # The first run compiles kernels, which cannot be captured.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": CUDA calls of other threads, such as NCCL's, do not break the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = work()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the stream that all captures share, because cuBLAS keeps a workspace per stream."""
    return torch.cuda.Stream()


class Trunk(Protocol):
    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Return the hidden states [T, hidden] of ``tokens`` [T] at ``positions`` [T]."""
        ...


@runtime_checkable
class DecodingBackend(Protocol):
    def decoding(
        self, positions: Tensor, counts: Tensor, tables: Tensor, width: Tensor
    ) -> StepAttention:
        """Return the attention of a step with n rows of at most one token each.

        ``counts`` int32 [n] are the rows' numbers of tokens, and ``positions`` int32 [n] their
        positions. Rows with a token come first. ``tables`` int32 begins with their block tables, of
        ``width[0]`` blocks each; its other elements are not used. The launched kernels depend on n
        alone; they read the tensors when they run.
        """
        ...


class DecodeGraphs:
    """Graphs of decode steps, one for each of ``buckets``.

    The largest bucket is captured first, so that the others share its memory. All ranks capture in
    the same order. ``max_blocks`` is the largest number of blocks of a sequence.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Trunk,
        attention: DecodingBackend,
        last_tokens: LastTokens,
        buckets: Sequence[int],
        max_blocks: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._model = model
        self._attention = attention
        self._last_tokens = last_tokens
        self._buckets = sorted(buckets)
        length = input_length(self._buckets[-1], max_blocks) + parcel_length(self._buckets[-1])
        self._inputs = torch.zeros(length, dtype=torch.int32, device=device)
        #: kept alive, because a replay reads tensors that only these functions reference
        self._works = {bucket: self._work(bucket) for bucket in reversed(self._buckets)}
        self._replays = {bucket: capture(work) for bucket, work in self._works.items()}

    def bucket(self, rows: Rows) -> int | None:
        """Return the bucket of the captured step for ``rows``; None if no captured step fits."""
        return bucket_for(rows, self._buckets)

    def run(self, rows: Rows, parcel: Parcel) -> Tensor:
        """Replay the captured step for ``rows``, and return their hidden states [n, hidden].

        ``bucket(rows)`` must not be None. ``parcel`` is transferred to the device in the same copy
        as the rows. The hidden states and the parcel's tensors are valid until the next run.
        """
        bucket = self.bucket(rows)
        assert bucket is not None, "no captured step fits the rows"
        described, packed = describe(rows, bucket), parcel.packed()
        upload_into(np.concatenate((described, packed)), self._inputs)
        parcel.unpack(self._inputs[len(described) :][: len(packed)])
        return self._replays[bucket]()[: len(rows)]

    def close(self) -> None:
        """Release the graphs, which reference the process group of their collectives."""
        self._replays.clear()

    def _work(self, bucket: int) -> Work:
        parts = Parts.of(bucket)
        width, tokens, slots, positions, counts, tables = (self._inputs[part] for part in parts)
        attention = self._attention.decoding(positions, counts, tables, width)

        def work() -> Tensor:
            known = self._last_tokens.fill_in(tokens.long(), slots.long())
            return self._model.forward(known, positions.clamp(min=0).long(), attention)

        return work
