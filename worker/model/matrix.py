"""A linear's weight: filled as a plain tensor, multiplied with in whatever form is fastest."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Form(Protocol):
    """Memory layout of a weight [outputs, inputs]."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x`` [T, inputs] @ weight.T + ``bias`` [outputs], of shape [T, outputs]."""
        ...

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        """Return the product without bias as fp32, not rounded to a smaller type before."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of the weight at ``ids`` [T]: [T, inputs], of any type."""
        ...


class Packing(Protocol):
    """A way to bring weights into another form."""

    #: Its form has ``rows``.
    keeps_rows: bool
    #: Embeddings are packed even where they are not multiplied with.
    packs_embeddings: bool

    def pack(self, weight: Tensor) -> Form | None:
        """Return ``weight`` packed, possibly in its memory; None if it cannot be packed.

        Then it is unchanged.
        """
        ...


class Plain:
    """Layout of a checkpoint."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.weight, bias)

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        return self.multiply(x, None).float()

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


class Matrix:
    """A weight on its way from ``plain``, which is filled, to a form that is multiplied with."""

    def __init__(self, plain: Tensor) -> None:
        self.form: Form = Plain(plain)
        self.dtype = plain.dtype

    @property
    def plain(self) -> Tensor:
        """Return the weight [outputs, inputs]. Raises RuntimeError once it is packed."""
        if not isinstance(self.form, Plain):
            raise RuntimeError("a packed weight cannot be filled")
        return self.form.weight

    def pack(self, packing: Packing) -> None:
        """Pack the weights, once they are filled."""
        self.form = packing.pack(self.plain) or self.form

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x`` [T, inputs] @ weight.T + ``bias`` [outputs], of shape [T, outputs]."""
        return self.form.multiply(x, bias)

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        """See Form."""
        return self.form.multiply_to_fp32(x)

    def rows(self, ids: Tensor) -> Tensor:
        """See Form."""
        return self.form.rows(ids)


def agree(product: Tensor, expected: Tensor, inputs: int) -> bool:
    """Return whether two products differ only by the order of fp32 sums and the final rounding.

    Never where one is not finite.
    """
    rounding = torch.finfo(expected.dtype).eps + inputs**0.5 * torch.finfo(torch.float32).eps
    furthest = (product.float() - expected.float()).abs().max()
    return bool(furthest <= 4 * rounding * expected.abs().max())
