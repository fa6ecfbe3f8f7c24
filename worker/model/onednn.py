"""Weights packed by oneDNN, through private operators of torch.

A packed weight of each shape is first compared with torch's linear function. oneDNN compiles a
product for each combination of number of rows, weight shape and bias. Each takes about 1 ms and
0.55 MiB of code, so 512 numbers of rows and four weight shapes would take more than 1 GiB.
Therefore inputs are padded to a few numbers of rows, and the caches of compiled products are
bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from everlift import logs
from worker.model.matrix import Packing, are_close
from worker.model.quantised import Quantised

log = logs.get_logger(__name__)

#: Numbers of rows in a trial, because oneDNN has different code for one row and for many.
_TRIED_ROWS = (1, 8, 64)
#: Smallest padding step, in rows: about as many as oneDNN computes at once with AVX2.
_LEAST_STEP = 4
#: Capacity of each of the `_CACHES`, in compiled products. The 43 padded numbers of rows up to 512
#: with five weight shapes make 215 products, about 120 MiB.
_MAX_COMPILED = 256
#: Environment variables of the capacities of torch's cache and oneDNN's. Both default to 1,024.
_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def bound_caches() -> None:
    """Bound the memory of compiled products, unless the environment sets other capacities.

    Must be called before the process computes its first product; later it has no effect.
    """
    for name in _CACHES:
        os.environ.setdefault(name, str(_MAX_COMPILED))


def padded_rows(num_rows: int) -> int:
    """Return the number of rows to which a product of ``num_rows`` rows is padded.

    Above 32 rows the padding adds at most an eighth of ``num_rows``. Up to 4 rows there is no
    padding, so that small decode batches stay fast.
    """
    step = max(_LEAST_STEP, 1 << max(0, (num_rows - 1).bit_length() - 4))
    return num_rows if num_rows <= _LEAST_STEP else -(-num_rows // step) * step


class OneDnn:
    """Weight in an internal layout of oneDNN, from which no rows can be read."""

    def __init__(self, weight: Tensor) -> None:
        # No number of rows is given: fp32 weights packed for one row are half as fast with several.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = len(x)
        if padding := padded_rows(num_rows) - num_rows:
            x = functional.pad(x, (0, 0, 0, padding))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product[:num_rows] if padding else product

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        return self.multiply(x, None).float()

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("rows of a weight in oneDNN's layout cannot be read")


class OneDnnPacking:
    """Packing of weights by oneDNN.

    Products with the first weight of each shape are compared with those of torch's linear function.
    No further weight of a shape is packed if they differ or oneDNN raises an error. Mixtures of
    experts use the packing that the function ``experts`` returns, or this one if the function
    returns None.
    """

    supports_rows = packs_embeddings = by_kernels = False

    def __init__(self, experts: Callable[[], Packing | None] = lambda: None) -> None:
        self._experts = experts
        self._is_right: dict[torch.Size, bool] = {}

    def of_experts(self) -> Packing:
        return self._experts() or self

    def pack_quantised(self, weight: Quantised) -> None:
        """Leave ``weight`` as it is, because oneDNN does not multiply its codes."""

    def pack(self, weight: Tensor) -> OneDnn | None:
        """Return the packed weight, or None if oneDNN fails for weights of this shape.

        A failure is an error, or a product that differs from torch's. It is logged once per shape.
        """
        if not self._is_right.get(weight.shape, True):
            return None
        try:
            packed = OneDnn(weight)
            if weight.shape not in self._is_right:
                _try(packed, weight)
        except (RuntimeError, AttributeError) as error:
            log.warning(
                "weights not packed: using slower code",
                shape=list(weight.shape),
                dtype=str(weight.dtype),
                cause=str(error).partition("\n")[0],
            )
            self._is_right[weight.shape] = False
            return None
        self._is_right[weight.shape] = True
        return packed


def _try(packed: OneDnn, weight: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = weight.shape[1]
    x = torch.randn(max(_TRIED_ROWS), inputs, generator=generator).to(weight.dtype)
    for count in _TRIED_ROWS:
        expected = functional.linear(x[:count], weight)
        if not are_close(packed.multiply(x[:count], None), expected, inputs):
            raise RuntimeError(f"a product with {count} rows differs from torch's")
