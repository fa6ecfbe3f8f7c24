"""Gated MLP of a layer, or of one expert, with this rank's share of its features."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from worker.model.layers import ColumnLinear, Part, Placement, RowLinear, column_parts
from worker.model.lora import StepAdapters
from worker.model.matrix import Packing
from worker.model.piece import Piece
from worker.model.sharing import tail_padded
from worker.model.spec import ModelSpec


class Mlp:
    """MLP ``name`` with ``size`` features: down(act(gate(x)) * up(x)).

    ``linears`` are the checkpoint's names of the gate, up and down projections.
    """

    def __init__(
        self,
        name: str,
        size: int,
        spec: ModelSpec,
        place: Placement,
        linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        self.share = share = tail_padded(size, place.group.size, place.group.rank)
        gate, up, down = linears
        parts = column_parts(
            name,
            "gate_up_proj" if spec.tensors.fused else None,
            {gate: (size, share), up: (size, share)},
        )
        self.activation = spec.activation
        self._pointwise = place.pointwise
        self.gate_up = ColumnLinear(parts, spec.hidden_size, spec.mlp_bias, place)
        self.down = RowLinear(
            Part(f"{name}.{down}", size, share), spec.hidden_size, spec.mlp_bias, place
        )

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        return self.down(self._gated(x, adapters), adapters)

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's part of the result; the sum over the ranks is the result."""
        return self.down.partial(self._gated(x))

    def _gated(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        return self._pointwise.gate(self.gate_up(x, adapters), self.activation)

    def pack(self, packing: Packing) -> None:
        self.gate_up.pack(packing)
        self.down.pack(packing)

    def pieces(self) -> Iterator[Piece]:
        yield from self.gate_up.pieces()
        yield from self.down.pieces()
