"""Sampling kernel: samples a token per row from logits, as worker.runner.sampling_backend defines.

A program samples one row. The logits of a greedy row are read once. The logits of any other row
are read three times, plus ten times if top_k is in use and eleven times if top_p is. Each lane
keeps its own sum or maximum during a read. The lanes are combined only at the end of the row,
because all threads must wait for each other to combine them. Only the last read, which finds the
token, combines them after every block, because it needs the sum over all earlier tokens.

Each filter keeps all weights from a threshold upwards. The threshold of min_p is known; those of
top_k and top_p are found without sorting. Non-negative floats have the same order as their bits,
read as integers. Each of ten passes determines one digit, of three bits, of the threshold. A pass
computes the number (top_k) or the total mass (top_p) of the weights that have each value of this
digit.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Values of worker.runner.sampling_backend.GREEDY_BELOW and of the markers in worker.native.argmax.
GREEDY_BELOW = tl.constexpr(1e-5)
NOT_FINITE = tl.constexpr(-1)
NOTHING_LEFT = tl.constexpr(-2)
#: Ten digits of three bits suffice, because a weight is at most 1.0, whose bits are below 1 << 30.
DIGIT_BITS = tl.constexpr(3)
DIGITS = tl.constexpr(10)
#: Number of values of a digit.
VALUES = tl.constexpr(8)


@triton.jit
def draw_rows(
    tokens,
    logits,
    filters,
    keys,
    positions,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sample ``tokens`` int64 [rows] from ``logits`` fp32 [rows, VOCAB].

    There is one program per row. Rows of ``logits`` are ``row_stride`` elements apart. For each
    row, ``filters`` fp64 [rows, 4] has temperature, top_k, top_p and min_p, where an infinite top_k
    or top_p keeps all tokens. ``keys`` int64 [rows, 2] has the bits of seed and choice, and
    ``positions`` int64 [rows] the token's position in the output. A token is the negative marker
    NOT_FINITE if a logit is NaN or +inf, and NOTHING_LEFT if all are -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    largest, token = _largest(source, VOCAB, BLOCK)
    precise = tl.load(filters + row * 4)
    if (token >= 0) & (precise >= GREEDY_BELOW):
        temperature = precise.to(tl.float32)
        least = _filter_threshold(
            source,
            largest,
            temperature,
            tl.load(filters + row * 4 + 1),
            tl.load(filters + row * 4 + 2),
            tl.load(filters + row * 4 + 3),
            VOCAB,
            BLOCK,
        )
        share = uniform(
            tl.load(keys + row * 2), tl.load(keys + row * 2 + 1), tl.load(positions + row)
        )
        token = _invert_cdf(source, largest, temperature, least, share, VOCAB, BLOCK)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def uniform(seed, choice, position):
    """Return the uniform number that worker.runner.uniform defines for these arguments."""
    mixed = _mix(_mix(_mix(seed.to(tl.uint64)) ^ choice.to(tl.uint64)) ^ position.to(tl.uint64))
    return (mixed >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _mix(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _largest(source, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, VOCAB, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        values = tl.load(source + ids, mask=ids < VOCAB, other=float("-inf"))
        broken = broken | ((values != values) | (values == float("inf"))).to(tl.int32)
        first = tl.where(values > most, ids, first)
        most = tl.where(values > most, values, most)
    largest = tl.max(most, 0)
    token = tl.min(tl.where(most == largest, first, VOCAB), 0)
    token = tl.where(largest == float("-inf"), NOTHING_LEFT, token)
    return largest, tl.where(tl.max(broken, 0) > 0, NOT_FINITE, token)


@triton.jit
def _weights(source, ids, largest, temperature, VOCAB: tl.constexpr):
    values = tl.load(source + ids, mask=ids < VOCAB, other=float("-inf"))
    return tl.exp((values - largest) / temperature)


@triton.jit
def _filter_threshold(
    source, largest, temperature, top_k, top_p, min_p, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the smallest weight that the filters keep; 0 without filters.

    A weight is exp((logit - largest) / temperature).
    """
    least = tl.full([], 0.0, tl.float32)
    if top_k < VOCAB:
        bits = _crossing(source, largest, temperature, top_k, 0, VOCAB, BLOCK, False)
        least = bits.to(tl.float32, bitcast=True)
    if top_p < 1.0:
        bound = least.to(tl.int32, bitcast=True)
        mass = _mass(source, largest, temperature, least, VOCAB, BLOCK)
        bits = _crossing(source, largest, temperature, top_p * mass, bound, VOCAB, BLOCK, True)
        least = tl.maximum(least, bits.to(tl.float32, bitcast=True))
    # The smallest fp32 number that is at least min_p.
    floor = min_p.to(tl.float32)
    above = (floor.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    floor = tl.where(floor.to(tl.float64) < min_p, above, floor)
    return tl.maximum(least, floor)


@triton.jit
def _mass(source, largest, temperature, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    by_lane = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, VOCAB, BLOCK):
        weights = _weights(source, begin + tl.arange(0, BLOCK), largest, temperature, VOCAB)
        by_lane += tl.where(weights >= least, weights, 0.0).to(tl.float64)
    return tl.sum(by_lane, 0)


@triton.jit
def _crossing(
    source,
    largest,
    temperature,
    limit,
    floor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    OF_MASS: tl.constexpr,
):
    """Return the bits of the smallest weight that has fewer than ``limit`` greater weights.

    With OF_MASS, the sum of the greater weights is compared with ``limit`` instead of their number.
    Weights with bits below ``floor`` are ignored. If no weight qualifies, the greatest is returned.
    """
    prefix = tl.full([], 0, tl.int32)
    above = tl.full([], 0.0, tl.float64)
    digits = tl.arange(0, VALUES)
    # Each lane has a sum for every value of the digit. More lanes would need too many registers.
    LANES: tl.constexpr = BLOCK // 4
    for turn in range(DIGITS):
        shift = (DIGITS - 1 - turn) * DIGIT_BITS
        by_lane = tl.zeros([LANES, VALUES], tl.float32)
        for begin in range(0, VOCAB, LANES):
            ids = begin + tl.arange(0, LANES)
            weights = _weights(source, ids, largest, temperature, VOCAB)
            bits = weights.to(tl.int32, bitcast=True)
            is_one = (bits >> (shift + DIGIT_BITS)) == prefix
            is_one = is_one & (bits >= floor) & (ids < VOCAB)
            digit = (bits >> shift) & (VALUES - 1)
            counted = weights if OF_MASS else tl.full([LANES], 1.0, tl.float32)
            has = is_one[:, None] & (digit[:, None] == digits[None, :])
            by_lane += tl.where(has, counted[:, None], 0.0)
        sums = tl.sum(by_lane.to(tl.float64), 0)
        # For each value of the digit, the sum over all weights with a greater prefix.
        greater = above + tl.sum(tl.where(digits[None, :] > digits[:, None], sums[None, :], 0.0), 1)
        wanted = (greater < limit) & (sums > 0.0)
        # The greatest weight is always kept.
        digit = tl.min(tl.where(wanted, digits, VALUES), 0)
        most = tl.max(tl.where(sums > 0.0, digits, 0), 0)
        digit = tl.where(digit < VALUES, digit, most)
        above = tl.sum(tl.where(digits == digit, greater, 0.0), 0)
        prefix = (prefix << DIGIT_BITS) | digit
    return prefix


@triton.jit
def _invert_cdf(
    source, largest, temperature, least, share, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    target = share * _mass(source, largest, temperature, least, VOCAB, BLOCK)
    passed = tl.full([], 0.0, tl.float64)
    token = tl.full([], -1, tl.int32)
    for begin in range(0, VOCAB, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        weights = _weights(source, ids, largest, temperature, VOCAB)
        kept = tl.where(weights >= least, weights, 0.0).to(tl.float64)
        mass = tl.sum(kept, 0)
        if (token < 0) & (passed + mass > target):
            beyond = (passed + tl.cumsum(kept, 0) > target) & (kept > 0.0)
            first = tl.min(tl.where(beyond, ids, VOCAB), 0)
            # The cumulative sum has another order of summation, and may end just below the target.
            last = tl.max(tl.where(kept > 0.0, ids, 0), 0)
            token = tl.minimum(first, last)
        passed += mass
    return token
