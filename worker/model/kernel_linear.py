"""Quantised weights on a GPU, and their products by Triton kernels (worker.kernels.products).

A weight keeps its memory. Its codes are reordered there, row by row:

    8 bits    in the order of the inputs
    4 bits    in blocks of 16 words, or of 8, 4, 2 and 1 words at the end of a row. Code j of word i
              of a block of n words is that of the block's input n * j + i. So a program reads each
              word once, and codes j of consecutive words are those of consecutive inputs. Integers
              are stored with 8 added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.products import multiply_tiles, quantise_rows, sum_splits
from worker.model.matrix import Packing, are_close
from worker.model.quantised import Block, Quantised
from worker.model.spec import Activation, UnsupportedModel
from worker.model.weight_format import WeightFormat

#: Minimum number of inputs of one tl.dot: with 4-bit codes, with other codes, and with activations
#: in FP8.
_WORDS, _LEAST_INPUTS, _LEAST_FP8 = 16, 16, 32
_MOST_INPUTS = 128
#: Largest number of bytes of codes that are reordered together, because it takes several times as
#: much memory.
_REORDERED_BYTES = 1 << 20
_SUM_BLOCK = 1024
#: Number of programs per multiprocessor that hides the latency of memory, and minimum number of
#: blocks of inputs per program. Both limit the number of splits.
_PROGRAMS, _BLOCKS = 4, 4
_MOST_SPLITS = 16
#: Largest number of tiles with different rows whose inputs are split.
_MOST_SPLIT_TILES = 4
#: Number of outputs, and numbers of rows, of the products that are compared with torch's.
_TRIED_OUTPUTS, _TRIED_ROWS = 96, (1, 40, 70)


@dataclass(frozen=True, slots=True)
class Tile:
    """Outputs and rows of a program, its warps and its prefetched iterations."""

    outputs: int
    rows: int
    num_warps: int
    num_stages: int


#: Tiles for few, some and many rows. Single precision is not multiplied by tensor cores; its larger
#: tiles would not fit into the registers.
NARROW, MEDIUM, WIDE = Tile(64, 16, 4, 4), Tile(128, 64, 8, 3), Tile(128, 128, 8, 2)


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """Weight [outputs, inputs] as multiply_tiles reads it; see there for the fields.

    ``kind`` is called CODES there, and ``together`` is 16 * PLANES.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    columns: Tensor | None
    outputs: int
    kind: str
    inputs: int
    #: length of a group, or 0 if there is one group
    group: int = 0
    skipped: int = 0
    #: maximum number of inputs of one tl.dot, a power of two, so that they share a scale
    together: int = _MOST_INPUTS

    def tile_for(self, rows: int, dtype: torch.dtype) -> Tile:
        """Return the tile for products with ``rows`` rows of type ``dtype`` per expert."""
        if dtype == torch.float32 or rows <= NARROW.rows:
            return NARROW
        # Sums of short groups take as many registers as the result itself.
        is_dense = self.codes.dtype == torch.int32 and self.together < _MOST_INPUTS
        return MEDIUM if rows <= MEDIUM.rows or is_dense else WIDE

    @classmethod
    def of_plain(cls, weight: Tensor) -> Operand:
        return cls(weight, weight, None, None, len(weight), "plain", weight.shape[1])

    @classmethod
    def of_quantised(cls, weight: Quantised) -> Operand:
        """Return the operand for ``weight``, whose codes are reordered in place.

        Raises UnsupportedModel unless the format's group length, if any, is a multiple of 16. If
        this rank holds only a part of its first group, the number of the group's other inputs must
        be a multiple of 16 too.
        """
        groups, form = weight.groups, weight.format
        inputs, length = len(groups.places), form.group or 0
        skipped = groups.length - groups.first if length and inputs else 0
        together = gcd(length, skipped, _MOST_INPUTS)
        if together < _LEAST_INPUTS:
            raise UnsupportedModel(
                f"{form.title} weights with groups of {length} inputs are not supported on GPUs, "
                f"if {skipped} inputs of a group are on another rank; supported: multiples of "
                f"{_LEAST_INPUTS}"
            )
        if form.bits == 4:
            _reorder(weight.values, lambda rows: _blocks(rows, form.codes == "int4"))
            codes = weight.values.view(torch.int32)
        else:
            _reorder(weight.values, _in_order)
            codes = weight.values.view(torch.int8)
        return cls(
            codes,
            weight.scales,
            weight.zeros,
            weight.column,
            weight.outputs,
            form.codes,
            inputs,
            length,
            skipped,
            together,
        )

    def addresses(self, bias: Tensor | None) -> list[int]:
        """Return the addresses of codes, scales, zero points and ``bias``, in this order.

        The address of a part that is None is 0. The result is one expert's row in the table of
        addresses that multiply_tiles reads.
        """
        parts = self.codes, self.scales, self.zeros, bias
        return [0 if part is None else part.data_ptr() for part in parts]


class KernelLinear:
    """Quantised weight on a GPU as a Form of worker.model.matrix, multiplied by Triton kernels.

    ``multiprocessors`` is the number of the GPU's multiprocessors. ``fp8`` means that inputs are
    quantised to e4m3 too, with a scale for each row and group of inputs.
    """

    def __init__(self, operand: Operand, multiprocessors: int, fp8: bool) -> None:
        self.operand = operand
        self.fp8 = fp8
        self._multiprocessors = multiprocessors

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        operand, rows = self.operand, len(x)
        out = x.new_empty(rows, operand.outputs)
        if not rows:
            return out
        tile = operand.tile_for(rows, x.dtype)
        tiles = -(-rows // tile.rows)
        programs = tiles * -(-operand.outputs // tile.outputs)
        splits = self._splits(tiles, programs)
        parts = out if splits == 1 else out.new_empty(splits, *out.shape, dtype=torch.float32)
        added = bias if splits == 1 else None
        multiply(parts, x, operand, added, tile, tiles, rows, splits=splits, fp8=self.fp8)
        if splits > 1:
            sum_splits[(rows, -(-operand.outputs // _SUM_BLOCK))](
                parts,
                out if bias is None else bias,
                out,
                rows,
                operand.outputs,
                SPLITS=splits,
                HAS_BIAS=bias is not None,
                BLOCK=_SUM_BLOCK,
                num_warps=4,
            )
        return out

    def _splits(self, tiles: int, programs: int) -> int:
        """Return the number of parts into which a product's inputs are split, a power of two.

        ``tiles`` is the number of tiles into which the rows are divided. ``programs`` is the number
        of programs that the kernel runs for one split. Every number of splits is a variant of the
        kernel, which the warm-up compiles (runner/warm_up.py).
        """
        if tiles > _MOST_SPLIT_TILES:
            return 1
        most = min(_MOST_SPLITS, self.operand.inputs // (_MOST_INPUTS * _BLOCKS))
        wanted = min(most, _PROGRAMS * self._multiprocessors // programs)
        return 1 << max(wanted, 1).bit_length() - 1

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        return self.multiply(x, None).float()

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("rows of a quantised weight cannot be read")


class KernelPacking:
    """Packing for a GPU: quantised weights for the kernels, plain ones as they are for torch.

    ``has_fp8`` is whether the GPU multiplies numbers of e4m3.
    """

    supports_rows = False
    packs_embeddings = False
    by_kernels = True

    def __init__(self, multiprocessors: int, has_fp8: bool) -> None:
        self._multiprocessors = multiprocessors
        self._has_fp8 = has_fp8

    def pack(self, weight: Tensor) -> None:
        """Leave ``weight`` as it is: torch multiplies plain weights."""

    def pack_quantised(self, weight: Quantised) -> KernelLinear:
        operand = Operand.of_quantised(weight)
        fp8 = self._has_fp8 and weight.format.fp8_activations and operand.together >= _LEAST_FP8
        return KernelLinear(operand, self._multiprocessors, fp8)

    def of_experts(self) -> Packing:
        return self

    def why_not(self, format: WeightFormat, dtype: torch.dtype, device: torch.device) -> str:
        """Return why products with weights of ``format`` fail on ``device``, or an empty string.

        Products with a small random weight are compared with torch's. Raises UnsupportedModel if
        the kernels do not support the groups.
        """
        weight = _random_weight(format, dtype, device)
        dequantised = weight.dequantised()
        packed = self.pack_quantised(weight)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(max(_TRIED_ROWS), weight.inputs, generator=generator).to(device, dtype)
        try:
            rounded = _dequantised(x, packed.operand) if packed.fp8 else x.float()
            expected = functional.linear(rounded, dequantised).to(dtype)
            for rows in _TRIED_ROWS:
                if not are_close(packed.multiply(x[:rows], None), expected[:rows], weight.inputs):
                    return f"a product differs from torch's (rows: {rows})"
        except Exception as error:
            return repr(error)
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """Rows of the experts' products, and the tensors that describe them to multiply_tiles.

    With ``gathered``, a row's input is ``x[pair // gathered]``; with ``scatters``, its result is
    ``out[pair]``.
    """

    table: Tensor
    offsets: Tensor
    pairs: Tensor
    gathered: int = 0
    scatters: bool = False


def multiply(
    out: Tensor,
    x: Tensor,
    operand: Operand,
    bias: Tensor | None,
    tile: Tile,
    tiles: int,
    rows: int,
    activation: Activation | None = None,
    experts: ExpertRows | None = None,
    splits: int = 1,
    fp8: bool = False,
) -> None:
    """Launch multiply_tiles for ``rows`` rows in ``tiles`` tiles of ``tile.rows`` rows each.

    ``tiles`` is an upper bound if there are ``experts``. ``operand`` and ``bias`` are then those of
    the first expert; the others have the same shapes and types.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    scales = None
    if fp8:
        x, scales = quantised_rows(x, operand)
    most = 64 if x.dtype != torch.int8 else _MOST_INPUTS
    block_k = min(operand.together, 32 if x.dtype == torch.float32 else most)
    features = operand.outputs // 2 if activation else operand.outputs
    width = tile.outputs // 2 if activation else tile.outputs
    number = 0 if experts is None else len(experts.table)
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    multiply_tiles[(tiles * -(-features // width), splits)](
        out,
        x,
        out if scales is None else scales,
        operand.codes,
        operand.scales,
        operand.codes if operand.zeros is None else operand.zeros,
        operand.codes if operand.columns is None else operand.columns,
        out if bias is None else bias,
        out if experts is None else experts.table,
        out if experts is None else experts.offsets,
        out if experts is None else experts.pairs,
        rows,
        tiles,
        operand.outputs,
        x.stride(0),
        operand.scales.shape[1],
        INPUTS=operand.inputs,
        STRIDE=operand.codes.shape[1],
        CODES=operand.kind,
        GROUP=operand.group,
        SKIPPED=operand.skipped,
        PLANES=operand.together // _WORDS,
        HAS_ZEROS=operand.zeros is not None,
        HAS_COLUMNS=operand.columns is not None,
        HAS_BIAS=bias is not None,
        HAS_X_SCALES=scales is not None,
        ACTIVATION=activation or "",
        EXPERTS=number,
        BLOCK_EXPERTS=_power_of_two(max(number, 1)),
        GATHERED=0 if experts is None else experts.gathered,
        SCATTERS=experts is not None and experts.scatters,
        SPLITS=splits,
        OUT=tile.outputs,
        TOKENS=tile.rows,
        BLOCK_K=block_k,
        **options,
    )


def quantised_rows(x: Tensor, operand: Operand) -> tuple[Tensor, Tensor]:
    """Return ``x`` [n, inputs] as codes int8 of e4m3, and scales fp32 [n, groups] of its groups."""
    rows, inputs, length = len(x), operand.inputs, operand.group or operand.inputs
    groups = -(-(inputs + operand.skipped) // length)
    codes = torch.empty(rows, inputs, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    block = _power_of_two(length)
    quantise_rows[(rows, groups)](
        x,
        codes,
        scales,
        inputs,
        x.stride(0),
        groups,
        length,
        operand.skipped,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return codes, scales


def _dequantised(x: Tensor, operand: Operand) -> Tensor:
    """Quantise ``x`` with quantised_rows, and return the dequantised values in fp32."""
    codes, scales = quantised_rows(x, operand)
    length = operand.group or operand.inputs
    groups = (torch.arange(operand.inputs, device=x.device) + operand.skipped) // length
    return codes.view(torch.float8_e4m3fn).float() * scales[:, groups]


def _random_weight(format: WeightFormat, dtype: torch.dtype, device: torch.device) -> Quantised:
    inputs = min(2 * (format.group or _MOST_INPUTS), 4 * _MOST_INPUTS)
    size = _TRIED_OUTPUTS, inputs
    block = Block("trial", size, range(size[0]), range(inputs), size[0])
    weight = Quantised(format, [block], inputs, dtype, device)
    for part in (weight.values, weight.zeros):
        if part is not None:
            # Without this bit no code is the NaN of e4m3.
            part.random_(256).bitwise_and_(0xBF)
    weight.scales.uniform_(0.5, 1.5)
    return weight


def _reorder(values: Tensor, order: Callable[[Tensor], Tensor]) -> None:
    if values.numel():
        step = max(1, _REORDERED_BYTES // values.shape[1])
        for first in range(0, len(values), step):
            rows = values[first : first + step]
            rows.copy_(order(rows))


def _in_order(rows: Tensor) -> Tensor:
    """Return 8-bit codes [outputs, bytes] in the order of their inputs.

    Each word (four bytes) of ``rows`` has the codes of its two even inputs first.
    """
    return rows.view(len(rows), -1, 2, 2).transpose(2, 3).reshape(rows.shape)


def _blocks(rows: Tensor, is_signed: bool) -> Tensor:
    """Return 4-bit codes [outputs, bytes] in the blocks that the module docstring describes.

    ``rows`` has the same shape, and words as in worker.model.quantised. ``is_signed`` means that
    the codes are two's complement integers; 8 is added to them.
    """
    halves = rows.view(len(rows), -1, 2, 2)
    pairs = torch.stack((halves & 15, halves >> 4), dim=4)
    codes = pairs.permute(0, 1, 3, 4, 2).flatten(1)
    if is_signed:
        codes = codes ^ 8
    words, parts = rows.shape[1] // 4, []
    while words:
        size = min(_WORDS, 1 << words.bit_length() - 1)
        count = words // size if size == _WORDS else 1
        block, codes = codes.tensor_split([8 * size * count], dim=1)
        planes = block.view(len(rows), count, 8, size).transpose(2, 3)
        parts.append((planes[..., ::2] | planes[..., 1::2] << 4).reshape(len(rows), -1))
        words -= size * count
    return torch.cat(parts, dim=1)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
