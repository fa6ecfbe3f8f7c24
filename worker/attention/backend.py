"""What the decoder needs of attention. A backend owns a block's layout: it writes and it reads.

A backend lives as long as its cache; what it prepares lives for one step, and holds the index
tensors that all layers of the step share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from worker.plan import Row


class StepAttention(Protocol):
    """Causal attention of one step's tokens, which lie row after row."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores ``key`` and ``value`` [tokens, kv_heads, head_dim] at the tokens' positions."""
        ...

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """``query`` [tokens, heads, head_dim] over each one's own sequence up to itself, scaled by
        head_dim ** -0.5; the same shape. The step's own keys must have been written."""
        ...


class AttentionBackend(Protocol):
    def prepare(self, rows: Sequence[Row]) -> StepAttention:
        """One step over ``rows``. Nothing of a block's earlier owners shows in its results, be it
        NaN: a block changes hands where a row writes its first position."""
        ...
