"""The layers of a tensor-parallel decoder, each with this rank's share of its parameters.

    column   output features are split     x [T, in]          -> [T, out / ranks]   no communication
    row      input features are split      x [T, in / ranks]  -> [T, out]           one all_reduce
    vocab    rows of the table are split   ids [T] -> [T, hidden], hidden [n, hidden] -> logits

A layer says which slices of which checkpoint tensors it holds (``pieces``); weights.py reads them.
Parameters are plain tensors: nothing here is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.spec import UnsupportedModel
from worker.parallel import Group

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank's parameters live, and which rank it is."""

    group: Group
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor's way into a parameter: ``into`` gets ``tensor[slices]``.

    ``shape`` is that of the whole tensor in the checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    slices: Slices
    into: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One of the checkpoint's linears, and the share of it held here.

    ``size`` counts, and ``share`` cuts, the features that its layer splits: of the output in a
    column layer, of the input in a row layer.
    """

    name: str
    size: int
    share: slice

    @property
    def width(self) -> int:
        return int(self.share.stop - self.share.start)


def even_share(size: int, group: Group, what: str) -> slice:
    """This rank's part of ``size`` things that are split evenly. Raises UnsupportedModel."""
    if size % group.size:
        raise UnsupportedModel(f"{size} {what} cannot be split over {group.size} ranks")
    width = size // group.size
    return slice(group.rank * width, (group.rank + 1) * width)


def kv_head_share(num_kv_heads: int, group: Group) -> slice:
    """This rank's KV heads; with fewer heads than ranks, neighbours hold the same one."""
    if num_kv_heads >= group.size:
        return even_share(num_kv_heads, group, "KV heads")
    if group.size % num_kv_heads:
        raise UnsupportedModel(f"{group.size} ranks cannot share {num_kv_heads} KV heads evenly")
    head = group.rank * num_kv_heads // group.size
    return slice(head, head + 1)


class ColumnLinear:
    """Several linears of one input as one product; their outputs lie side by side, in order."""

    def __init__(self, parts: tuple[Part, ...], inputs: int, bias: bool, place: Placement) -> None:
        outputs = sum(part.width for part in parts)
        self._parts = parts
        self._inputs = inputs
        self._weight = place.empty(outputs, inputs)
        self._bias = place.empty(outputs) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def pieces(self) -> Iterator[Piece]:
        start = 0
        for part in self._parts:
            rows = slice(start, start + part.width)
            shape = (part.size, self._inputs)
            yield Piece(f"{part.name}.weight", shape, (part.share,), self._weight[rows])
            if self._bias is not None:
                yield Piece(f"{part.name}.bias", (part.size,), (part.share,), self._bias[rows])
            start = rows.stop


class RowLinear:
    """A linear whose input is what a column layer left split; the ranks' products are summed."""

    def __init__(self, part: Part, outputs: int, bias: bool, place: Placement) -> None:
        self._part = part
        self._group = place.group
        self._weight = place.empty(outputs, part.width)
        self._bias = place.empty(outputs) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        total = self._group.all_reduce(functional.linear(x, self._weight))
        return total if self._bias is None else total.add_(self._bias)

    def pieces(self) -> Iterator[Piece]:
        outputs = self._weight.shape[0]
        whole = slice(None)
        shape = (outputs, self._part.size)
        yield Piece(f"{self._part.name}.weight", shape, (whole, self._part.share), self._weight)
        if self._bias is not None:
            yield Piece(f"{self._part.name}.bias", (outputs,), (whole,), self._bias)


class VocabTable:
    """One row a token: looked up as the embedding, multiplied with as the head, or both (tied).

    The vocabulary is padded to a multiple of the ranks; rows past its end hold nothing, and their
    logits are cut off.
    """

    def __init__(self, name: str, vocab_size: int, width: int, place: Placement) -> None:
        rows = -(-vocab_size // place.group.size)
        self._name = name
        self._vocab_size = vocab_size
        self._group = place.group
        self._first = place.group.rank * rows
        self._weight = place.empty(rows, width)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of ``ids`` [T], [T, width]. A token of another rank's is zero until the sum."""
        if self._group.size == 1:
            return functional.embedding(ids, self._weight)
        local = ids - self._first
        absent = (local < 0) | (local >= len(self._weight))
        rows = functional.embedding(local.masked_fill(absent, 0), self._weight)
        return self._group.all_reduce(rows.masked_fill_(absent.unsqueeze(-1), 0))

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Logits of ``hidden`` [n, width] as fp32 [n, vocab_size] on rank 0, None elsewhere."""
        logits = self._group.gather_to_first(functional.linear(hidden, self._weight))
        return None if logits is None else logits[:, : self._vocab_size].float()

    def pieces(self) -> Iterator[Piece]:
        end = min(self._first + len(self._weight), self._vocab_size)
        held = slice(min(self._first, end), end)
        shape = (self._vocab_size, self._weight.shape[1])
        yield Piece(self._name, shape, (held,), self._weight[: held.stop - held.start])


class RmsNorm:
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    def __init__(self, name: str, width: int, eps: float, place: Placement) -> None:
        self._name = name
        self._eps = eps
        self._weight = place.empty(width)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self._weight.shape, self._weight, self._eps)

    def pieces(self) -> Iterator[Piece]:
        shape = (len(self._weight),)
        yield Piece(f"{self._name}.weight", shape, (slice(None),), self._weight)
