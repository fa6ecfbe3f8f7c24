"""Weight of a linear layer: filled as a plain tensor, then packed into the fastest layout."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.quantised import Quantised


class Form(Protocol):
    """Weight [outputs, inputs] in one memory layout, and the operations on it."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x`` [T, inputs] @ weight.T + ``bias`` [outputs], of shape [T, outputs]."""
        ...

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        """Return ``x`` [T, inputs] @ weight.T as fp32 [T, outputs].

        Some layouts round the product to the type of ``x`` first.
        """
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids`` [T] of the weight, as a float tensor [T, inputs].

        The layout determines the float type. Raises NotImplementedError unless ``supports_rows`` of
        the Packing is True.
        """
        ...


class Packing(Protocol):
    """Conversion of plain and quantised weights to another layout."""

    #: whether the packed layout supports ``Form.rows``
    supports_rows: bool
    #: whether to pack an embedding that is only looked up and never multiplied with
    packs_embeddings: bool
    #: whether Triton kernels multiply the weights
    by_kernels: bool

    def pack(self, weight: Tensor) -> Form | None:
        """Return ``weight`` in the packed layout, which may reuse its memory.

        Return None, and leave ``weight`` unchanged, if it cannot be packed.
        """
        ...

    def pack_quantised(self, weight: Quantised) -> Form | None:
        """Return ``weight``, which must be filled, in the packed layout, which reuses its memory.

        Return None, and leave ``weight`` unchanged, if it cannot be packed.
        """
        ...

    def of_experts(self) -> Packing:
        """Return the packing to use for the weights of a mixture of experts; it may be this one.

        The products with such weights are many and have few rows, so that another layout may be
        faster.
        """
        ...


class Plain:
    """Unpacked layout: row-major, as in a checkpoint."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.weight, bias)

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        return self.multiply(x, None).float()

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


class Matrix:
    """Weight [outputs, inputs] of a linear layer or an embedding.

    A Matrix is created with the plain tensor, whose values are then filled in through ``plain``, or
    with the weight of a quantised checkpoint, which is filled through ``quantised``. After that,
    ``pack`` converts the weight to a faster layout if possible. ``multiply`` works in any layout,
    ``rows`` only in some.
    """

    def __init__(self, weight: Tensor | Quantised) -> None:
        self.form: Form = Plain(weight) if isinstance(weight, Tensor) else weight
        self.dtype = weight.dtype

    @property
    def plain(self) -> Tensor:
        """Return the weight [outputs, inputs]. Raises RuntimeError once it is packed."""
        if not isinstance(self.form, Plain):
            raise RuntimeError("a packed weight cannot be filled")
        return self.form.weight

    @property
    def quantised(self) -> Quantised | None:
        """Return the weight if it is that of a quantised checkpoint and not packed, else None."""
        return self.form if isinstance(self.form, Quantised) else None

    def pack(self, packing: Packing) -> None:
        """Pack the weight, which must be filled; it stays as it is if it cannot be packed."""
        weight = self.quantised
        packed = packing.pack(self.plain) if weight is None else packing.pack_quantised(weight)
        self.form = packed or self.form

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x`` [T, inputs] @ weight.T + ``bias`` [outputs], of shape [T, outputs]."""
        return self.form.multiply(x, bias)

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        """Return ``x`` [T, inputs] @ weight.T as fp32 [T, outputs]; see Form.multiply_to_fp32."""
        return self.form.multiply_to_fp32(x)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids`` [T] of the weight as float [T, inputs]; see Form.rows."""
        return self.form.rows(ids)


def are_close(product: Tensor, expected: Tensor, inputs: int) -> bool:
    """Return whether two products differ only by the order of fp32 sums and the final rounding.

    ``inputs`` is the number of terms of each sum. The result is False if ``product`` has a value
    that is not finite although all values of ``expected`` are finite.
    """
    rounding = torch.finfo(expected.dtype).eps + inputs**0.5 * torch.finfo(torch.float32).eps
    furthest = (product.float() - expected.float()).abs().max()
    return bool(furthest <= 4 * rounding * expected.abs().max())
