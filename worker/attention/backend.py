"""Interfaces of attention. A backend owns the layout of a block: it writes and reads.

A backend lives as long as its cache; a prepared step holds the index tensors that all layers share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.device.upload import Parcel
from worker.engine.plan import Rows


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """Attention of one layer.

    For a query at position p, key j scores s = scale * (query . key), or softcap * tanh(s /
    softcap), for every j with p - window < j <= p, or 0 <= j <= p without a window; the softmax of
    the scores weighs the values. ``sinks`` [heads of this rank] are one more score per head in its
    softmax, without a value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class StepAttention(Protocol):
    """Causal attention of one step's tokens, which lie row after row."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` [tokens, kv_heads, head_dim] at the tokens' positions."""
        ...

    def attend(self, layer: int, query: Tensor, form: AttentionForm) -> Tensor:
        """Return causal attention of ``query`` [tokens, heads, head_dim] over each sequence.

        The result has the same shape. Query heads that share a KV head lie side by side: head h
        reads KV head h // (heads // kv_heads). The step's own keys must have been written.
        """
        ...


class AttentionBackend(Protocol):
    @property
    def name(self) -> str:
        """Names of the attention kernels in use."""
        ...

    def prepare(self, rows: Rows, parcel: Parcel | None = None) -> StepAttention:
        """Prepare one step over ``rows``.

        There may be a thousand rows: no loop over them. Data for the device goes with ``parcel``,
        if given; nothing is written or attended before it has arrived. A block's earlier content,
        even NaN, never shows: a block changes hands where a row writes its first position.
        """
        ...
