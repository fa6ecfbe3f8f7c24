"""Weights packed by oneDNN, through private operators of torch: each shape is tried first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from everlift import logs
from worker.model.matrix import agree

log = logs.get(__name__)

#: Numbers of rows that a shape is tried with: oneDNN has other code for one and for many.
_TRIED_ROWS = (1, 8, 64)


class OneDnn:
    """A weight in a layout that only oneDNN knows."""

    def __init__(self, weight: Tensor) -> None:
        # Without a number of rows: packed for one, fp32 is half as fast with several.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        return self.multiply(x, None).float()

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("oneDNN does not tell where a row lies")


class OneDnnPacking:
    """Packs weights of those shapes with which a product was what torch's own linear makes."""

    keeps_rows = False

    def __init__(self) -> None:
        self._is_right: dict[torch.Size, bool] = {}

    def pack(self, weight: Tensor) -> OneDnn | None:
        """None where the trial of this shape failed; the log says so once for each."""
        if not self._is_right.get(weight.shape, True):
            return None
        try:
            packed = OneDnn(weight)
            if weight.shape not in self._is_right:
                _try(packed, weight)
        except (RuntimeError, AttributeError) as error:
            log.warning(
                "weights not packed: slower code is used",
                shape=list(weight.shape),
                dtype=str(weight.dtype),
                cause=str(error).partition("\n")[0],
            )
            self._is_right[weight.shape] = False
            return None
        self._is_right[weight.shape] = True
        return packed


def _try(packed: OneDnn, weight: Tensor) -> None:
    """Raises RuntimeError where its products are others than those of ``weight``."""
    generator = torch.Generator().manual_seed(0)
    inputs = weight.shape[1]
    x = torch.randn(max(_TRIED_ROWS), inputs, generator=generator).to(weight.dtype)
    for count in _TRIED_ROWS:
        expected = functional.linear(x[:count], weight)
        if not agree(packed.multiply(x[:count], None), expected, inputs):
            raise RuntimeError(f"a product with {count} rows differs")
