"""Interfaces of attention over the paged KV cache.

Only the backend knows the layout of a block, because it alone writes and reads keys and values. A
backend lives as long as its cache. A prepared step holds the index tensors that all layers share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.device.upload import Parcel
from worker.engine.plan import Rows


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """Parameters of one layer's attention.

    For a query at position p, key j has the score s = scale * (query . key). With a softcap the
    score is softcap * tanh(s / softcap) instead. The keys are those with p - window < j <= p, or
    0 <= j <= p without a window. The softmax of the scores weights the values. ``sinks`` [heads of
    this rank] has one additional score per head. The score takes part in the head's softmax like
    that of a key whose value is zero.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class StepAttention(Protocol):
    """Causal attention of one step's tokens, which are ordered by row.

    A row (worker.engine.plan.Row) has the new tokens of one sequence in the step.
    """

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write ``key`` and ``value`` [tokens, kv_heads, head_dim] to the cache of ``layer``.

        The key and value of each token are written at its position in its sequence.
        """
        ...

    def attend(self, layer: int, query: Tensor, form: AttentionForm) -> Tensor:
        """Return causal attention of ``query`` [tokens, heads, head_dim] in ``layer``.

        A query attends to the keys and values of its own sequence in the cache. The keys and values
        of the step's tokens must have been written by ``write`` before. The result has the shape of
        ``query``. Query heads that share a KV head are adjacent: head h reads KV head
        h // (heads // kv_heads).
        """
        ...


class AttentionBackend(Protocol):
    """Attention kernels over one KV cache."""

    @property
    def name(self) -> str:
        """Name of the attention kernels in use."""
        ...

    def prepare(self, rows: Rows, parcel: Parcel | None = None) -> StepAttention:
        """Return the attention of one step over ``rows``.

        Implementations must not loop over the rows in Python, because there may be a thousand. If
        ``parcel`` is given, the implementation may add arrays for the device to it. All arrays of
        a Parcel are copied to the device together, before the step writes or computes anything.

        A row that writes the first position of a block is the first to use the block since it was
        allocated. The block still has content of another sequence, which may be NaN and must not
        affect any result.
        """
        ...
