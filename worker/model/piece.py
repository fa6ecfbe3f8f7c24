"""Slice of a checkpoint tensor that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.model.sharing import bounds_of

Slices = tuple[slice, ...]


class Writer(Protocol):
    """Conversion of a piece's stored elements into the form in which its parameter holds them."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type in which the stored elements are read."""
        ...

    @property
    def stored(self) -> tuple[str, ...]:
        """Return the types in safetensors that the stored elements may have."""
        ...

    def write(self, rows: Tensor, first: int) -> None:
        """Convert consecutive rows of a piece's slice and write them to its parameter.

        ``first`` is the index of the first of these rows in the stored tensor, or in the piece's
        ``view`` of the tensor.
        """
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Slice of a checkpoint tensor, and the parameter, or part of it, that the slice is read into.

    The slice ``slices`` of the tensor is read into ``into``. ``name`` and ``shape`` describe the
    whole tensor, of which a rank may need several pieces. Dimensions of size 1 may be missing in
    ``shape``. With a ``writer``, the stored elements are converted by it instead of being copied.
    If ``view`` is given, ``slices`` index the tensor as reshaped to ``view`` instead of ``shape``.
    """

    name: str
    shape: tuple[int, ...]
    slices: Slices
    into: Tensor
    writer: Writer | None = None
    view: tuple[int, ...] | None = None

    @property
    def bounds(self) -> tuple[range, ...]:
        """Indices in each dimension of ``view``, or ``shape``, that the slice selects."""
        return bounds_of(self.slices, self.view or self.shape)
