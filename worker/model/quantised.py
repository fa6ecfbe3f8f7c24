"""Weight of a quantised checkpoint in its canonical form, and how the files' tensors fill it.

All formats (weight_format.py) have one form, which takes as much memory as the stored tensors:

    values   [outputs, 4 * words]     codes in 32-bit words, each with codes of consecutive inputs
    scales   [groups, columns]        in the stored type
    column   [outputs]                each output's column in ``scales``; None if output i has
                                      column i
    zeros    [groups, outputs / 2]    zero points, two of 4 bits per byte, for some formats

Inputs are divided into groups that share a scale. The first and the last group of a rank's share
may be shorter than the others, and each group begins with a new word. The codes of even inputs fill
the lower half of a word, and those of odd inputs the upper half (quantised.h). Integers are stored
in two's complement. Outputs are padded to whole panels, with codes of 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from worker.device.huge_pages import advise_huge_pages
from worker.model.checkpoint import BadCheckpoint
from worker.model.piece import Piece
from worker.model.weight_format import EXPONENTS_NAME, WeightFormat

#: Types of the scales, by their names in safetensors.
SCALE_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
#: Multiple of the number of outputs in a panel, on every CPU.
_PANEL = 64
#: Index of the 4-bit code of each of 8 outputs in a word of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_WORD_BITS = 32
#: Number of outputs that are dequantised at a time; it bounds the memory of their fp32 copy.
_DEQUANTISED_TOGETHER = 1024
#: Code of e4m3 that is NaN, without its sign.
_NAN = 0x7F
#: Types in safetensors of codes that are elements.
_ELEMENTS = {"int8": "I8", "int4": "I8", "e4m3": "F8_E4M3", "e2m1": "U8"}
#: Numbers of the 4-bit floats, by code.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Block:
    """Block of a checkpoint's quantised layer ``layer`` that a rank holds.

    ``size`` is the layer's number of outputs and of inputs. ``width`` is the number of outputs that
    the block takes in the rank's weight, including padding.
    """

    layer: str
    size: tuple[int, int]
    outputs: range
    inputs: range
    width: int


class Groups:
    """Division of a rank's inputs into groups of ``length``; the first one has ``first`` inputs."""

    def __init__(self, inputs: range, group: int | None, codes_per_word: int) -> None:
        """Create the groups of ``inputs``, the inputs of a layer that a rank holds.

        ``group`` is the length of a group, or None for a single group. There is at least one group.
        """
        width = len(inputs)
        self.length = group or max(width, 1)
        skipped = inputs.start % self.length if group else 0
        self.first = min(self.length - skipped, width)
        bounds = [0, *range(self.first, width, self.length), width]
        counts = torch.tensor(bounds).diff()
        words = -(-counts // codes_per_word)
        self.number = len(counts)
        #: words of an output
        self.words = int(words.sum())
        #: group of each input
        self.of_input = torch.repeat_interleave(counts)
        gaps = words * codes_per_word - counts
        #: index of each input's code among the codes of an output's words
        self.places = torch.arange(width) + (gaps.cumsum(0) - gaps)[self.of_input]


class Quantised:
    """Weight [outputs, inputs] in the canonical form; a Form that multiplies with torch.

    ``blocks`` are the layers, or shares of layers, whose outputs follow each other in the weight.
    All blocks have the same inputs. The argument ``inputs`` is the number of inputs of the weight;
    those beyond the inputs of the blocks are padding, which has no codes.
    """

    def __init__(
        self,
        format: WeightFormat,
        blocks: Sequence[Block],
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Create the weight, whose padding is 0; ``dtype`` is the type of inputs and outputs."""
        self.format = format
        self.dtype = dtype
        self.outputs, self.inputs = sum(block.width for block in blocks), inputs
        self.groups = Groups(blocks[0].inputs, format.group, _WORD_BITS // format.bits)
        self._blocks = tuple(blocks)
        self._lock = threading.Lock()
        padded = -(-self.outputs // _PANEL) * _PANEL
        columns, num_columns = self._columns(padded)
        zeros = torch.zeros
        self.values = torch.empty(padded, 4 * self.groups.words, dtype=torch.uint8, device=device)
        advise_huge_pages(self.values)
        self.values.zero_()
        self.column = None if columns is None else columns.to(device, torch.int32)
        scale_type, shape = SCALE_TYPES[format.scale_type], (self.groups.number, num_columns)
        self.scales = zeros(shape, dtype=scale_type, device=device)
        self.zeros: Tensor | None = None
        if format.has_zeros:
            shape = self.groups.number, padded // 2
            self.zeros = zeros(shape, dtype=torch.uint8, device=device)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = [functional.linear(x, part.to(x.dtype)) for part in self._parts()]
        product = torch.cat(parts, dim=1)
        return product if bias is None else product + bias

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        return self.multiply(x, None).float()

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("rows of a quantised weight cannot be read")

    def dequantised(self) -> Tensor:
        """Return the weight as fp32 [outputs, inputs]."""
        return torch.cat(list(self._parts()))

    def _parts(self) -> Iterator[Tensor]:
        for first in range(0, self.outputs, _DEQUANTISED_TOGETHER):
            part = slice(first, min(first + _DEQUANTISED_TOGETHER, self.outputs))
            weight = _decoded(_codes(self.values[part], self.format.bits), self.format)
            weight = weight[:, self.groups.places.to(weight.device)]
            columns = slice(part.start, part.stop) if self.column is None else self.column[part]
            if self.zeros is not None:
                bytes_ = torch.stack((self.zeros & 15, self.zeros >> 4), dim=2).flatten(1)[:, part]
                weight -= self._of_inputs(_decoded(bytes_, self.format))
            weight *= self._of_inputs(self.scales[:, columns].float())
            yield functional.pad(weight, (0, self.inputs - weight.shape[1]))

    def _of_inputs(self, of_groups: Tensor) -> Tensor:
        """Return ``of_groups`` [groups, outputs] expanded to [outputs, inputs].

        Each input has the values of its group.
        """
        return of_groups[self.groups.of_input.to(of_groups.device)].t()

    def pieces(self) -> Iterator[Piece]:
        """Yield the slices of checkpoint tensors that the weight consists of."""
        row = column = 0
        for block in self._blocks:
            yield self._values_piece(block, row)
            scales = self._scaled(block)
            yield self._scales_piece(block, scales, column)
            if self.zeros is not None:
                yield self._zeros_piece(block, row)
            row += block.width
            column += block.width if self.format.scaled_outputs == 1 else len(scales)

    def _values_piece(self, block: Block, row: int) -> Piece:
        form = self.format
        name = {"elements": "weight", "words": "weight_packed"}.get(form.arrangement, "qweight")
        is_transposed = form.arrangement in ("awq", "gptq")
        codes = _Codes(
            partial(self._put_values, row),
            bits=form.bits,
            packed={"elements": None, "words": 1, "awq": 1, "gptq": 0}[form.arrangement],
            order=_AWQ_ORDER if form.arrangement == "awq" else None,
            is_transposed=is_transposed,
            rows=block.inputs if is_transposed else block.outputs,
            columns=block.outputs if is_transposed else block.inputs,
            # Words have unsigned codes, which are half of their range larger.
            flip=0 if form.arrangement == "elements" else 1 << (form.bits - 1),
            element=_ELEMENTS[form.codes],
            name=f"{block.layer}.{name}",
        )
        size = block.size[::-1] if is_transposed else block.size
        into = self.values[row : row + len(block.outputs)]
        return codes.piece(size, into)

    def _scales_piece(self, block: Block, scaled: range, column: int) -> Piece:
        form, groups = self.format, self._groups_of(block)
        size = _whole(block.size[0], form.scaled_outputs), _whole(block.size[1], form.group)
        slices = slice(scaled.start, scaled.stop), slice(groups.start, groups.stop)
        into = self.scales[: len(groups), column : column + len(scaled)]
        name = f"{block.layer}.{form.scales}"
        if form.arrangement in ("awq", "gptq"):
            return Piece(name, size[::-1], slices[::-1], into)
        return Piece(name, size, slices, into.t())

    def _zeros_piece(self, block: Block, row: int) -> Piece:
        assert self.zeros is not None
        form, groups = self.format, self._groups_of(block)
        is_transposed = form.arrangement in ("awq", "gptq")
        name = "qzeros" if is_transposed else "weight_zero_point"
        codes = _Codes(
            partial(self._put_zeros, row),
            bits=form.bits,
            packed=1 if is_transposed else 0,
            order=_AWQ_ORDER if form.arrangement == "awq" else None,
            is_transposed=is_transposed,
            rows=groups if is_transposed else block.outputs,
            columns=block.outputs if is_transposed else groups,
            flip=1 << (form.bits - 1),
            offset=form.zero_offset,
            name=f"{block.layer}.{name}",
        )
        size = block.size[0], _whole(block.size[1], form.group)
        into = self.zeros[:, row // 2 : (row + len(block.outputs) + 1) // 2]
        return codes.piece(size[::-1] if is_transposed else size, into)

    def stacked_pieces(self, name: str, expert: int, experts: int) -> Iterator[Piece]:
        """Yield the pieces of two checkpoint tensors from which this weight is filled.

        The tensors, named ``name`` with the suffix ``_blocks`` or ``_scales``, contain the weights
        of all ``experts`` experts. The number of this weight's expert is ``expert``. Outputs
        in the tensors alternate between the layers of this weight, such as gate and up. The scales
        are powers of two, stored as exponents.
        """
        num_layers, column = len(self._blocks), 0
        for layer, block in enumerate(self._blocks):
            outputs, inputs = block.size
            groups, held = _whole(inputs, self.format.group), self._groups_of(block)
            rows = range(
                expert * outputs + block.outputs.start, expert * outputs + block.outputs.stop
            )
            columns = block.inputs.start + layer * inputs, block.inputs.stop + layer * inputs
            codes = _Codes(
                partial(self._put_values, column),
                bits=self.format.bits,
                packed=1,
                order=None,
                is_transposed=False,
                rows=rows,
                columns=range(*columns),
                flip=0,
                word=torch.uint8,
                name=f"{name}_blocks",
            )
            size, into = (experts * outputs, num_layers * inputs), self.values[column:]
            piece = codes.piece(size, into[: len(block.outputs)])
            bytes_ = self.format.bits * (self.format.group or 0) // 8
            shape = experts, num_layers * outputs, groups, bytes_
            yield replace(piece, shape=shape, view=piece.shape)
            first = layer * groups + held.start
            yield Piece(
                f"{name}{EXPONENTS_NAME}",
                shape[:-1],
                (slice(rows.start, rows.stop), slice(first, first + len(held))),
                scales := self.scales[:, column : column + len(block.outputs)].t(),
                _Exponents(scales, rows.start),
                view=(experts * outputs, num_layers * groups),
            )
            column += block.width

    def _groups_of(self, block: Block) -> range:
        """Return the groups of the layer that the block's inputs are in."""
        group = self.format.group
        if group is None:
            return range(1)
        return range(block.inputs.start // group, -(-block.inputs.stop // group))

    def _scaled(self, block: Block) -> range:
        """Return the range of the layer's scales that apply to the block's outputs.

        Indices are those of the output dimension of the layer's scales. Each index stands for
        ``format.scaled_outputs`` consecutive outputs, or for all outputs if that is None.
        """
        together = self.format.scaled_outputs
        if together is None:
            return range(1)
        return range(block.outputs.start // together, -(-block.outputs.stop // together))

    def _columns(self, padded: int) -> tuple[Tensor | None, int]:
        """Return the column in ``scales`` of each of ``padded`` outputs, and the number of columns.

        The first result is None if output i has column i.
        """
        together = self.format.scaled_outputs
        if together == 1:
            return None, padded
        columns, done, row = torch.zeros(padded, dtype=torch.int64), 0, 0
        for block in self._blocks:
            scaled = self._scaled(block)
            if together is not None:
                held = torch.arange(block.outputs.start, block.outputs.stop) // together
                columns[row : row + len(held)] = held - scaled.start + done
            else:
                columns[row : row + block.width] = done
            row, done = row + block.width, done + len(scaled)
        return columns, max(done, 1)

    def _put_values(self, row: int, codes: Tensor, output: int, first: int) -> None:
        """Write ``codes`` [outputs, inputs] of a block to ``values``.

        ``row`` is the block's first row in ``values``. ``output`` and ``first`` are the indices in
        the block of the first output and the first input of ``codes``.
        """
        per_word = _WORD_BITS // self.format.bits
        places = self.groups.places[first : first + codes.shape[1]].to(codes.device)
        begin = int(places[0]) // per_word * per_word
        end = -(-(int(places[-1]) + 1) // per_word) * per_word
        if end - begin != len(places):
            padded = codes.new_zeros(len(codes), end - begin)
            padded[:, places - begin] = codes
            codes = padded
        row += output
        into = self.values[row : row + len(codes), begin // per_word * 4 : end // per_word * 4]
        into |= _words(codes, self.format.bits)

    def _put_zeros(self, row: int, codes: Tensor, output: int, group: int) -> None:
        """Write the zero points ``codes`` [outputs, groups] of a block to ``zeros``.

        ``row`` is the number of the block's first output in the weight. ``output`` and ``group``
        are the indices in the block of the first output and the first group of ``codes``.
        """
        assert self.zeros is not None
        row += output
        even = functional.pad(codes.t(), (row % 2, (row + len(codes)) % 2))
        into = self.zeros[group : group + len(even), row // 2 : row // 2 + even.shape[1] // 2]
        with self._lock:  # two blocks may share a byte
            into |= even[:, ::2] | even[:, 1::2] << 4


@dataclass(frozen=True, slots=True)
class _Codes:
    """Writer of the codes or zero points of the tensor ``name``, a matrix of codes.

    Only the codes in the ranges ``rows`` and ``columns`` of the matrix are written. Outputs are the
    rows of the matrix, or its columns if ``is_transposed``. ``packed`` is the dimension along
    which words, of type ``word``, hold several codes of ``bits`` bits. A ``packed`` of None means
    that each code is an element, of the safetensors type ``element``. ``order`` has the index in a
    word of each of its codes; None stands for ascending order. Each code is increased by
    ``offset``, modulo 2 ** ``bits``, and then combined with ``flip`` by exclusive or.

    ``put`` receives codes [outputs, inputs], or zero points [outputs, groups]. The other arguments
    are the index of the first output and that of the first input or group; both count from the
    start of their range. ``write`` raises BadCheckpoint if an e4m3 code is NaN.
    """

    put: Callable[[Tensor, int, int], None]
    bits: int
    packed: int | None
    order: tuple[int, ...] | None
    is_transposed: bool
    name: str
    rows: range
    columns: range
    flip: int
    offset: int = 0
    element: str = ""
    word: torch.dtype = torch.int32

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.packed is None else self.word

    @property
    def stored(self) -> tuple[str, ...]:
        if self.packed is None:
            return (self.element,)
        return ("U8",) if self.word == torch.uint8 else ("I32",)

    @property
    def _per_word(self) -> int:
        return 8 * self.word.itemsize // self.bits

    def piece(self, size: tuple[int, int], into: Tensor) -> Piece:
        """Return the piece that fills ``into`` from the tensor.

        ``size`` is the number of codes in each dimension of the whole tensor.
        """
        shape, slices = list(size), [slice(r.start, r.stop) for r in (self.rows, self.columns)]
        if self.packed is not None:
            needed, codes = slices[self.packed], self._per_word
            shape[self.packed] = -(-size[self.packed] // codes)
            slices[self.packed] = slice(needed.start // codes, -(-needed.stop // codes))
        return Piece(self.name, tuple(shape), tuple(slices), into, self)

    def write(self, rows: Tensor, first: int) -> None:
        codes, begin, left = rows, first, self.columns.start
        if self.packed is not None:
            codes = _unpacked(rows, self.bits, self.packed, self.order)
            per_word = self._per_word
            begin = first * per_word if self.packed == 0 else first
            left = left // per_word * per_word if self.packed == 1 else left
        needed = range(max(begin, self.rows.start), min(begin + len(codes), self.rows.stop))
        codes = codes[needed.start - begin : needed.stop - begin]
        codes = codes[:, self.columns.start - left :][:, : len(self.columns)]
        if not codes.numel():
            return
        if self.element == _ELEMENTS["e4m3"] and int((codes & _NAN).max()) == _NAN:
            raise BadCheckpoint(f"{self.name} has weights that are NaN")
        if self.offset:
            codes = codes + self.offset & (1 << self.bits) - 1
        if self.flip:
            codes = codes ^ self.flip
        row = needed.start - self.rows.start
        if self.is_transposed:
            self.put(codes.t(), 0, row)
        else:
            self.put(codes, row, 0)


@dataclass(frozen=True, slots=True)
class _Exponents:
    """Writer of scales that are stored as exponents of 2, with a bias of 127.

    ``first`` is the number of the row of the stored tensor whose scales are ``scales[0]``.
    """

    scales: Tensor
    first: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def stored(self) -> tuple[str, ...]:
        return ("U8",)

    def write(self, rows: Tensor, first: int) -> None:
        into = self.scales[first - self.first :][: len(rows), : rows.shape[1]]
        into.copy_(torch.exp2(rows.float() - 127))


def _unpacked(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None) -> Tensor:
    """Return the codes, one a byte, that ``words`` [rows, columns] hold along dimension ``dim``."""
    codes = words.contiguous().view(torch.uint8).view(*words.shape, words.itemsize)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=3).flatten(2)
    if order is not None:
        codes = codes[..., list(order)]
    return codes.flatten(1) if dim == 1 else codes.transpose(1, 2).flatten(0, 1)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return ``codes`` [outputs, n] packed into 32-bit words, as bytes [outputs, n * bits / 8].

    The number n must be a multiple of the codes in a word.
    """
    if bits == 8:
        return codes.reshape(len(codes), -1, 2, 2).transpose(2, 3).flatten(1)
    pairs = codes.reshape(len(codes), -1, 2, 2, 2)
    halves = pairs[..., 0, :] | pairs[..., 1, :] << 4
    return halves.transpose(2, 3).flatten(1)


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes [outputs, n] that 32-bit words hold; the inverse of ``_words``.

    ``words`` has the bytes of the words, [outputs, n * bits / 8].
    """
    halves = words.view(len(words), -1, 2, 2)
    if bits == 8:
        return halves.transpose(2, 3).flatten(1)
    pairs = torch.stack((halves & 15, halves >> 4), dim=4)
    return pairs.permute(0, 1, 3, 4, 2).flatten(1)


def _decoded(codes: Tensor, format: WeightFormat) -> Tensor:
    """Return the numbers in fp32 that ``codes`` stand for."""
    if format.codes == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if format.codes == "e2m1":
        numbers = torch.tensor([*_E2M1, *(-number for number in _E2M1)], device=codes.device)
        return numbers[codes.int()]
    half = 1 << (format.bits - 1)
    return (codes ^ half).float() - half


def _whole(size: int, together: int | None) -> int:
    return 1 if together is None else -(-size // together)
