"""Layers of a tensor-parallel decoder, each with this rank's share of its parameters.

    column   output features are split     x [T, in]          -> [T, out / ranks]   no communication
    row      input features are split      x [T, in / ranks]  -> [T, out]           one all_reduce
    vocab    rows of the table are split   ids [T] -> [T, hidden], hidden [n, hidden] -> logits

``pieces`` yields the slices of checkpoint tensors that a layer holds, and weights.py reads them.
The padding of a share (sharing.py), which no checkpoint tensor fills, is zero from the start.
Weights are plain tensors until ``pack`` converts them, once they are filled, to a faster layout;
after that ``pieces`` is unusable. The layers are for inference only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from worker.device.huge_pages import advise_huge_pages
from worker.model.lora import LinearAdapters, LowRank, PackedParts, StepAdapters
from worker.model.matrix import Matrix, Packing
from worker.model.piece import Piece
from worker.model.pointwise import TORCH, Pointwise
from worker.model.quantised import Block, Quantised
from worker.model.sharing import Share, tail_padded
from worker.model.spec import UnsupportedModel
from worker.model.weight_format import WeightFormat
from worker.parallel.group import Group

#: Whole matrices of a LoRA adapter by the names of linear layers, as Part.name_in_adapters.
Adapter = Mapping[str, LowRank]


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a rank's parameters: process group, types, device, and pointwise operations."""

    group: Group
    dtype: torch.dtype
    device: torch.device
    pointwise: Pointwise = TORCH
    #: type of the weights of matrix products and of the embedding; None: ``dtype``
    weights: torch.dtype | None = None
    #: format of a quantised checkpoint's linear layers
    format: WeightFormat | None = None

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty_weight(self, outputs: int, inputs: int) -> Tensor:
        size, dtype = (outputs, inputs), self.weights or self.dtype
        weight = torch.empty(size, dtype=dtype, device=self.device)
        advise_huge_pages(weight)
        return weight

    def linear_weight(self, blocks: Sequence[Block], inputs: int) -> Matrix:
        """Return an unfilled weight [outputs, ``inputs``] that joins the outputs of ``blocks``.

        Raises UnsupportedModel if only some of the blocks' layers are quantised.
        """
        layers = {block.layer: self.quantises(block.layer) for block in blocks}
        if self.format is None or not any(layers.values()):
            return Matrix(self.empty_weight(sum(block.width for block in blocks), inputs))
        if not all(layers.values()):
            raise UnsupportedModel(
                f"{', '.join(layers)} must be quantised together: they are one product"
            )
        return Matrix(Quantised(self.format, blocks, inputs, self.dtype, self.device))

    def quantises(self, layer: str) -> bool:
        """Return whether the weight of the linear layer ``layer`` is quantised."""
        return self.format is not None and self.format.quantises(layer)


@dataclass(frozen=True, slots=True)
class Part:
    """Linear layer or vector of the checkpoint, or slice of a fused layer, and this rank's share.

    ``size`` is the checkpoint tensor's length in the dimension that is split over the ranks. The
    dimension has output features in a ColumnLinear, input features in a RowLinear, and the elements
    of a vector. ``share`` is this rank's range in that dimension.
    """

    name: str
    size: int
    share: Share

    @property
    def local_features(self) -> slice:
        """Return the slice of the checkpoint's features that this rank holds."""
        return slice(self.share.start, self.share.stop)

    @property
    def held(self) -> range:
        """Return ``local_features`` as a range of feature indices."""
        return range(self.share.start, self.share.stop)

    @property
    def name_in_adapters(self) -> str:
        """Name of the linear layer without the model's prefix, such as layers.0.mlp.up_proj."""
        return self.name[self.name.index("layers.") :]


def column_parts(
    name: str, fused: str | None, parts: dict[str, tuple[int, Share]]
) -> tuple[Part, ...]:
    """Return the parts of a ColumnLinear: separate linear layers, or slices of a fused one.

    ``fused`` is the name of the fused linear layer, or None if the checkpoint has separate ones.
    ``parts`` maps each part's name to its total number of output features and this rank's share.
    """
    if fused is None:
        return tuple(Part(f"{name}.{part}", size, share) for part, (size, share) in parts.items())
    total = sum(size for size, _ in parts.values())
    fused_parts, before = [], 0
    for size, share in parts.values():
        fused_parts.append(Part(f"{name}.{fused}", total, share.moved(before)))
        before += size
    return tuple(fused_parts)


class ColumnLinear:
    """Linear layers with the same input, computed as one product; outputs are split over the ranks.

    The result [T, outputs] concatenates this rank's outputs of all ``parts``, including padding.
    """

    def __init__(self, parts: tuple[Part, ...], inputs: int, bias: bool, place: Placement) -> None:
        outputs = sum(part.share.width for part in parts)
        self._parts = parts
        blocks = [
            Block(p.name, (p.size, inputs), p.held, range(inputs), p.share.width) for p in parts
        ]
        self.weight = place.linear_weight(blocks, inputs)
        self._inputs = inputs
        self.bias = place.empty(outputs) if bias else None
        #: slots for LoRA adapters; None if there are none
        self.adapters: LinearAdapters | None = None
        for _, part, rows in self._rows():
            rows[part.share.num_items :].zero_()

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        y = self.weight.multiply(x, self.bias)
        return y if adapters is None else _adapted(self.adapters, adapters, x, y)

    def add_adapter_slots(self, number: int, place: Placement) -> None:
        outputs = sum(part.share.width for part in self._parts)
        num_names = len({part.name for part in self._parts})
        size = self._inputs, outputs, num_names
        self.adapters = LinearAdapters(number, *size, place.dtype, place.device)

    def packed_adapter(self, adapter: Adapter) -> PackedParts:
        """Return this rank's share of an adapter: all of A, and B's rows for the rank's outputs."""
        assert self.adapters is not None, "there are no slots"
        return self.adapters.pack(self._share_of(adapter))

    def _share_of(self, adapter: Adapter) -> list[LowRank]:
        shares, first = [], 0
        for name, group in groupby(self._parts, lambda part: part.name_in_adapters):
            parts = [*group]
            widths = [part.share.width for part in parts]
            if (whole := adapter.get(name)) is not None:
                b = whole.b.new_zeros(sum(widths), whole.ranks)
                for part, rows in zip(parts, b.split_with_sizes(widths), strict=True):
                    rows[: part.share.num_items] = whole.b[part.local_features]
                shares.append(LowRank(whole.a, b, whole.scaling, first))
            first += sum(widths)
        return shares

    def pack(self, packing: Packing) -> None:
        self.weight.pack(packing)

    def pieces(self) -> Iterator[Piece]:
        if self.weight.quantised is not None:
            yield from self.weight.quantised.pieces()
        for kind, part, rows in self._rows():
            shape = (part.size, *rows.shape[1:])
            yield Piece(
                f"{part.name}.{kind}", shape, (part.local_features,), rows[: part.share.num_items]
            )

    def _rows(self) -> Iterator[tuple[str, Part, Tensor]]:
        widths = [part.share.width for part in self._parts]
        weight = self.weight.plain if self.weight.quantised is None else None
        for kind, parameter in (("weight", weight), ("bias", self.bias)):
            if parameter is not None:
                for part, rows in zip(self._parts, parameter.split_with_sizes(widths), strict=True):
                    yield kind, part, rows


def _adapted(linear: LinearAdapters | None, adapters: StepAdapters, x: Tensor, y: Tensor) -> Tensor:
    assert linear is not None, "the model has no adapters"
    return linear.add(adapters, x, y)


class RowLinear:
    """Linear layer with input features split over the ranks; a call sums the ranks' products.

    ``partial`` returns this rank's product only.
    """

    def __init__(self, part: Part, outputs: int, bias: bool, place: Placement) -> None:
        self._part = part
        self._outputs = outputs
        self.group = place.group
        block = Block(part.name, (outputs, part.size), range(outputs), part.held, outputs)
        self.weight = place.linear_weight([block], part.share.width)
        if self.weight.quantised is None:
            self.weight.plain[:, part.share.num_items :].zero_()
        self.bias = place.empty(outputs) if bias else None
        #: slots for LoRA adapters; None if there are none
        self.adapters: LinearAdapters | None = None

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        return self.group.all_reduce(self.partial(x, adapters))

    def partial(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        y = self.weight.multiply(x, self.own_bias)
        return y if adapters is None else _adapted(self.adapters, adapters, x, y)

    def add_adapter_slots(self, number: int, place: Placement) -> None:
        size = self._part.share.width, self._outputs, 1
        self.adapters = LinearAdapters(number, *size, place.dtype, place.device)

    def packed_adapter(self, adapter: Adapter) -> PackedParts:
        """Return this rank's share of an adapter: some columns of A, and all of B.

        The columns are those for this rank's inputs.
        """
        assert self.adapters is not None, "there are no slots"
        return self.adapters.pack(self._share_of(adapter))

    def _share_of(self, adapter: Adapter) -> list[LowRank]:
        part = self._part
        if (whole := adapter.get(part.name_in_adapters)) is None:
            return []
        a = whole.a.new_zeros(whole.ranks, part.share.width)
        a[:, : part.share.num_items] = whole.a[:, part.local_features]
        return [LowRank(a, whole.b, whole.scaling)]

    @property
    def own_bias(self) -> Tensor | None:
        """Bias that this rank adds: None except on rank 0, so that the sum includes it once."""
        return self.bias if self.group.rank == 0 else None

    def pack(self, packing: Packing) -> None:
        self.weight.pack(packing)

    def pieces(self) -> Iterator[Piece]:
        part, outputs, whole = self._part, self._outputs, slice(None)
        if self.weight.quantised is not None:
            yield from self.weight.quantised.pieces()
        else:
            slices, into = (
                (whole, part.local_features),
                self.weight.plain[:, : part.share.num_items],
            )
            yield Piece(f"{part.name}.weight", (outputs, part.size), slices, into)
        if self.bias is not None:
            yield Piece(f"{part.name}.bias", (outputs,), (whole,), self.bias)


class VocabTable:
    """Table with one row per token: embedding, head, or both (tied).

    The rows of the last ranks may include padding; the logits of padding are cut off.
    """

    def __init__(self, name: str, vocab_size: int, width: int, place: Placement) -> None:
        self.vocab_size = vocab_size
        self.group = place.group
        self._name = name
        self._share = tail_padded(vocab_size, place.group.size, place.group.rank)
        #: rows of each rank, including padding
        self.share_width = self._share.width
        self.weight = Matrix(place.empty_weight(self.share_width, width))
        self._dtype = place.dtype
        self.weight.plain[self._share.num_items :].zero_()

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows [T, width] of the tokens ``ids`` [T], on every rank.

        A collective: all ranks must call it. A rank contributes its own rows, and zeros for the
        others; the sum over the ranks has every row.
        """
        if self.group.size == 1:
            return self.weight.rows(ids).to(self._dtype)
        absent = (ids < self._share.start) | (ids >= self._share.stop)
        local = (ids - self._share.start).masked_fill(absent, 0)
        rows = self.weight.rows(local).to(self._dtype)
        return self.group.all_reduce(rows.masked_fill_(absent.unsqueeze(-1), 0))

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return fp32 logits [n, vocab_size] of ``hidden`` [n, width] on rank 0, None elsewhere.

        A collective: all ranks must call it.
        """
        if self.group.size == 1:
            return self.weight.multiply_to_fp32(hidden)
        return self.gather_logits(self.weight.multiply(hidden), self._dtype)

    def gather_logits(self, logits: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return all ranks' ``logits`` as fp32 [n, vocab_size] on rank 0, None elsewhere.

        A collective: all ranks must call it. ``logits`` [n, share_width] are the logits of the
        tokens that this rank holds; the ranks exchange them in the type ``dtype``.
        """
        if self.group.size == 1:
            return logits
        gathered = self.group.gather_to_first(logits.to(dtype))
        return None if gathered is None else gathered[:, : self.vocab_size].float()

    @property
    def local_ids(self) -> range:
        """Token ids whose rows this rank holds."""
        return range(self._share.start, self._share.stop)

    def pack(self, packing: Packing) -> None:
        self.weight.pack(packing)

    def pieces(self) -> Iterator[Piece]:
        held = slice(self._share.start, self._share.stop)
        weight = self.weight.plain
        shape = (self.vocab_size, weight.shape[1])
        yield Piece(self._name, shape, (held,), weight[: self._share.num_items])


class RmsNorm:
    """RMS norm with the weight that the checkpoint stores as ``{name}.weight``."""

    def __init__(self, name: str, width: int, eps: float, add_one: bool, place: Placement) -> None:
        self._name = name
        self.eps = eps
        self.add_one = add_one
        self.weight = place.empty(width)
        self._pointwise = place.pointwise

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Return the norm of ``x``; ``added``, if given, is first added to ``x`` in place."""
        return self._pointwise.norm(x, self.weight, self.eps, self.add_one, added)

    def pieces(self) -> Iterator[Piece]:
        shape = (len(self.weight),)
        yield Piece(f"{self._name}.weight", shape, (slice(None),), self.weight)
