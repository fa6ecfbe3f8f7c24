"""What the decoder needs of attention. A backend owns a block's layout: it writes and it reads.

A backend lives as long as its cache; what it prepares lives for one step, and holds the index
tensors that all layers of the step share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.device.upload import Parcel
from worker.engine.plan import Rows


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """How one layer attends. Of a query at position p, the key at position j gets the score

        s = scale * (query . key),  or  softcap * tanh(s / softcap) with a softcap,

    for every j with p - window < j <= p, or 0 <= j <= p without a window; the softmax of the
    scores weighs the values. ``sinks`` [heads], those of this rank, are one more score for each
    head in its softmax, which weighs nothing.
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
        """``query`` [tokens, heads, head_dim] over each one's own sequence up to itself, as
        ``form`` says; the same shape. Query heads that share a KV head lie side by side: head h
        reads KV head h // (heads // kv_heads). The step's own keys must have been written."""
        ...


class AttentionBackend(Protocol):
    @property
    def name(self) -> str:
        """Names of everything that attends."""
        ...

    def prepare(self, rows: Rows, parcel: Parcel | None = None) -> StepAttention:
        """One step over ``rows``, of which there may be a thousand: a loop over them would take
        longer than planning them. What a device has to know of them goes with ``parcel``, if there
        is one: nothing is written or attended before all is in it. Nothing of a block's earlier
        owners shows in its results, be it NaN: a block changes hands where a row writes its first
        position."""
        ...
