"""Products with weights that are plain or quantised, of one linear layer or of many experts.

    program   (tile of outputs and rows, split)
    tile      OUT outputs and TOKENS rows of x, all of one expert
    split     a part of the inputs; ``sum_splits`` adds up the results of the splits

The weights are the left operand of a product of matrices, so that they can be decoded in registers,
and so that few rows of x need little padding.

The rows of an expert follow each other, and those of the next expert begin right after them. A
program finds its expert and its rows from ``offsets`` alone, so that the host need not know how
many rows an expert has. Just the last tile of an expert may have fewer than TOKENS rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.number_formats import from_e2m1, from_e4m3, from_int4, to_e4m3
from worker.kernels.pointwise import gated

#: Number of tiles with different rows that are computed side by side, so that they find the
#: weights in the GPU's cache.
_NEIGHBOURS = tl.constexpr(8)


# Numbers of rows that are 1 or multiples of 16 would be variants of their own.
@triton.jit(do_not_specialize=["rows", "tiles"])
def multiply_tiles(
    out,
    x,
    x_scales,
    codes,
    scales,
    zeros,
    columns,
    bias,
    table,
    offsets,
    pairs,
    rows,
    tiles,
    outputs,
    x_stride,
    num_columns,
    INPUTS: tl.constexpr,
    STRIDE: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SKIPPED: tl.constexpr,
    PLANES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_X_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    GATHERED: tl.constexpr,
    SCATTERS: tl.constexpr,
    SPLITS: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write ``x`` @ weight.T + bias, gated if ACTIVATION is a name, to ``out`` [rows, outputs].

    ``tiles`` is the number of tiles into which the rows are divided, or an upper bound if there are
    experts. ``x`` is [n, INPUTS]; its rows are ``x_stride`` elements apart. HAS_X_SCALES means that
    ``x`` has codes of e4m3, whose scales are ``x_scales`` fp32 [n, groups].

    ``codes`` are [outputs, STRIDE]: numbers of the type of ``x``, codes of 8 bits, or words with 8
    codes of 4 bits, as worker.model.kernel_linear orders them. CODES is "plain", or a CodeType of
    worker.model.weight_format. Input k belongs to group (k + SKIPPED) // GROUP, or to the only one
    if GROUP is 0. ``scales`` are [groups, num_columns]. HAS_COLUMNS means that ``columns``
    [outputs] has each output's column; otherwise output o has column o. ``zeros`` [groups,
    num_columns / 2] have two zero points per byte. Each PLANES * n consecutive inputs of a block of
    n words share a scale and a zero point.

    EXPERTS is the number of experts, or 0 for one linear layer. ``table`` int64 [EXPERTS, 4] has
    the addresses of each expert's codes, scales, zeros and bias. The rows of expert e are those
    from ``offsets[e]`` to before ``offsets[e + 1]``. ``pairs[row]`` is the number of a row's pair
    of a token and an expert. A row's input is ``x[pair // GATHERED]`` unless GATHERED is 0.
    SCATTERS means that the row's result is ``out[pair]``.

    ACTIVATION is empty or a name of worker.model.spec.Activation. A name means that the first half
    of the outputs is the gate of the second half, and that ``out`` is [rows, outputs / 2].

    Several SPLITS, possible only without bias and ACTIVATION, write partial products to ``out``
    fp32 [SPLITS, rows, outputs].
    """
    features = outputs // 2 if ACTIVATION != "" else outputs
    width: tl.constexpr = OUT // 2 if ACTIVATION != "" else OUT
    per_group = _NEIGHBOURS * tl.cdiv(features, width)
    neighbour = tl.program_id(0) // per_group * _NEIGHBOURS
    num_neighbours = tl.minimum(tiles - neighbour, _NEIGHBOURS)
    within = tl.program_id(0) % per_group
    tile = neighbour + within % num_neighbours
    first_output = within // num_neighbours * width
    split = tl.program_id(1)

    lines = tl.arange(0, TOKENS)
    if EXPERTS:
        numbers = tl.arange(0, BLOCK_EXPERTS)
        is_expert = numbers < EXPERTS
        starts = tl.load(offsets + numbers, mask=is_expert, other=0)
        stops = tl.load(offsets + numbers + 1, mask=is_expert, other=0)
        counts = tl.cdiv(stops - starts, TOKENS)
        ends = tl.cumsum(counts, 0)
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        if expert >= EXPERTS:
            return
        is_mine = numbers == expert
        row = lines + tl.sum(tl.where(is_mine, starts + (tile - ends + counts) * TOKENS, 0), 0)
        is_row = row < tl.sum(tl.where(is_mine, stops, 0), 0)
        mine = table + expert * 4
        codes = tl.multiple_of(tl.load(mine).to(codes.dtype), 16)
        scales = tl.multiple_of(tl.load(mine + 1).to(scales.dtype), 16)
        zeros = tl.multiple_of(tl.load(mine + 2).to(zeros.dtype), 16)
        bias = tl.multiple_of(tl.load(mine + 3).to(bias.dtype), 16)
    else:
        row = tile * TOKENS + lines
        is_row = row < rows
    source = row
    target = row.to(tl.int64)
    if GATHERED:
        source = tl.load(pairs + row, mask=is_row, other=0) // GATHERED
    if SCATTERS:
        target = tl.load(pairs + row, mask=is_row, other=0).to(tl.int64)

    # The outputs of the tile, and for a gate those of the other half below them.
    places = tl.arange(0, OUT)
    feature = first_output + places % width
    is_output = feature < features
    output = feature + places // width * features
    x_rows = x + source.to(tl.int64) * x_stride
    code_rows = codes + output.to(tl.int64) * STRIDE
    column = output
    if HAS_COLUMNS:
        column = tl.load(columns + output, mask=is_output, other=0)
    if HAS_X_SCALES:
        groups: tl.constexpr = (INPUTS + SKIPPED + GROUP - 1) // GROUP if GROUP else 1
        x_scales += source.to(tl.int64) * groups

    total = tl.zeros([OUT, TOKENS], tl.float32)
    if CODES == "int4" or CODES == "e2m1":
        blocks: tl.constexpr = STRIDE // 16
        steps: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
        for block in range(split * steps, tl.minimum(split * steps + steps, blocks)):
            total = _add_words(
                total, block * 16, 16, x_rows, is_row, code_rows, is_output, scales, zeros,
                column, num_columns, INPUTS, CODES, GROUP, SKIPPED, PLANES, HAS_ZEROS,
            )  # fmt: skip
        if STRIDE % 16 and split == SPLITS - 1:
            # The rest are blocks of 8, 4, 2 and 1 words.
            first = blocks * 16
            for power in range(4):
                size = 8 >> power
                if STRIDE & size:
                    total = _add_words(
                        total, first, size, x_rows, is_row, code_rows, is_output, scales, zeros,
                        column, num_columns, INPUTS, CODES, GROUP, SKIPPED, PLANES, HAS_ZEROS,
                    )  # fmt: skip
                    first += size
    else:
        reads: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
        share: tl.constexpr = (reads + SPLITS - 1) // SPLITS
        for block in range(split * share, tl.minimum(split * share + share, reads)):
            k = block * BLOCK_K + tl.arange(0, BLOCK_K)
            weights = tl.load(
                code_rows[:, None] + k[None, :],
                mask=is_output[:, None] & (k < INPUTS)[None, :],
                other=0,
            )
            inputs = tl.load(
                x_rows[None, :] + k[:, None],
                mask=is_row[None, :] & (k < INPUTS)[:, None],
                other=0,
            )
            if HAS_X_SCALES:
                weights = weights.to(tl.float8e4nv, bitcast=True)
                inputs = inputs.to(tl.float8e4nv, bitcast=True)
            elif CODES == "e4m3":
                weights = from_e4m3(weights, inputs.dtype)
            elif CODES == "int8":
                weights = weights.to(inputs.dtype)
            if GROUP:
                group = (block * BLOCK_K + SKIPPED) // GROUP
                factor = tl.load(scales + group * num_columns + column, mask=is_output, other=0.0)
                part = tl.dot(weights, inputs, input_precision="ieee")
                factors = factor.to(tl.float32)[:, None]
                if HAS_X_SCALES:
                    factors = factors * tl.load(x_scales + group, mask=is_row, other=0.0)[None, :]
                total += part * factors
            elif HAS_X_SCALES:
                # Products of e4m3 are added up with few bits: their sum is added in fp32.
                total = tl.dot(weights, inputs, acc=total, max_num_imprecise_acc=BLOCK_K)
            else:
                total = tl.dot(weights, inputs, acc=total, input_precision="ieee")

    if CODES != "plain" and GROUP == 0:
        factor = tl.load(scales + column, mask=is_output, other=0.0).to(tl.float32)
        total *= factor[:, None]
        if HAS_X_SCALES:
            total *= tl.load(x_scales, mask=is_row, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION != "":
        halves = tl.permute(tl.reshape(total, (2, width, TOKENS)), (1, 2, 0))
        gate, up = tl.split(halves)
        result = gated(gate, up, ACTIVATION)
        output = first_output + tl.arange(0, width)
    else:
        result = total
    if SPLITS > 1:
        target += split.to(tl.int64) * rows
    tl.store(
        out + target[None, :] * features + output[:, None],
        result.to(out.dtype.element_ty),
        mask=is_row[None, :] & (output < features)[:, None],
    )


@triton.jit
def _add_words(
    total,
    first,
    size,
    x_rows,
    is_row,
    code_rows,
    is_output,
    scales,
    zeros,
    column,
    num_columns,
    INPUTS: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SKIPPED: tl.constexpr,
    PLANES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """Return ``total`` plus the products of a block of 4-bit weights and the block's inputs.

    The block has ``size`` words, 16 at most, from word ``first`` of each row of codes on. A word
    has 8 codes. Code j of the block's word i belongs to the block's input size * j + i.
    """
    lines = tl.arange(0, 16)
    is_line = lines < size
    words = tl.load(
        code_rows[:, None] + (first + lines)[None, :],
        mask=is_output[:, None] & is_line[None, :],
        other=0,
    )
    factor = tl.zeros([total.shape[0]], tl.float32)
    zero = tl.zeros([total.shape[0]], tl.float32)
    part = tl.zeros(total.shape, tl.float32)
    for j in tl.static_range(8):
        begin = first * 8 + size * j
        if j % PLANES == 0:
            group = (begin + SKIPPED) // GROUP if GROUP else 0
            if GROUP:
                places = group * num_columns + column
                factor = tl.load(scales + places, mask=is_output, other=0.0).to(tl.float32)
                part = tl.zeros(total.shape, tl.float32)
            if HAS_ZEROS:
                pair = tl.load(
                    zeros + group * (num_columns // 2) + column // 2, mask=is_output, other=0
                )
                code = (pair.to(tl.int32) >> (column % 2 * 4)) & 15
                zero = ((code ^ 8) - 8).to(tl.float32)
        k = begin + lines
        inputs = tl.load(
            x_rows[None, :] + k[:, None],
            mask=is_row[None, :] & (is_line & (k < INPUTS))[:, None],
            other=0.0,
        )
        if CODES == "e2m1":
            weights = from_e2m1(words, j, inputs.dtype)
        else:
            weights = from_int4(words, j, zero[:, None], inputs.dtype)
        if GROUP:
            part = tl.dot(weights, inputs, acc=part, input_precision="ieee")
            if j % PLANES == PLANES - 1:
                total += part * factor[:, None]
        else:
            total = tl.dot(weights, inputs, acc=total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def sum_splits(
    parts,
    bias,
    out,
    rows,
    outputs,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of ``parts`` fp32 [SPLITS, rows, outputs], plus bias, to ``out``.

    There is one program per (row, BLOCK outputs).
    """
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = output < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * rows + row) * outputs + output
        total += tl.load(parts + place, mask=within, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, total.to(out.dtype.element_ty), mask=within)


@triton.jit
def quantise_rows(
    x,
    codes,
    scales,
    inputs,
    x_stride,
    groups,
    length,
    skipped,
    BLOCK: tl.constexpr,
):
    """Write ``x`` [rows, inputs] as codes of e4m3, with a scale for each group of a row.

    There is one program per (row, group). Input k belongs to group (k + skipped) // length.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    k = group * length + within - skipped
    is_input = (within < length) & (k >= 0) & (k < inputs)
    values = tl.load(x + row * x_stride + k, mask=is_input, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / 448.0
    tl.store(codes + row * inputs + k, to_e4m3(values / scale), mask=is_input)
    tl.store(scales + row * groups + group, scale)
