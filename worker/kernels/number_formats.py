"""Conversions between small number formats and floats, by integer operations.

The conversions need no instruction that only newer GPUs have. Triton's own conversions of e4m3
require compute capability 8.9 or later.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_e4m3(codes, dtype: tl.constexpr):
    """Return in ``dtype`` the numbers that ``codes`` int8 stand for; the result is exact.

    No code may be NaN. Exponent and mantissa are moved to their places in ``dtype``. A product then
    corrects the bias of the exponent, which also turns subnormal numbers into normal ones.
    """
    if dtype == tl.float32:
        bits = ((codes.to(tl.int32) << 24) >> 4) & -0x78100000
        numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    elif dtype == tl.float16:
        bits = ((codes.to(tl.int16) << 8) >> 1) & -0x4080
        numbers = bits.to(tl.float16, bitcast=True) * 256.0
    else:
        bits = ((codes.to(tl.int16) << 8) >> 4) & -0x7810
        numbers = bits.to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
    return numbers.to(dtype)


@triton.jit
def to_e4m3(x):
    """Return the e4m3 codes int8 of ``x`` fp32, rounded to nearest even; NaN stays NaN.

    Magnitudes above 448 become 448. The numbers of e4m3 below 2 ** -6 are multiples of 2 ** -9. A
    large number is added to such a magnitude, in units of 2 ** -9, so that fp32 rounds the sum to
    an integer.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 15
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the bias is 120 less
    codes = tl.where(size < 0.015625, small, large)
    codes = tl.where(x == x, codes, 0x7F)
    return (codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.int8)


@triton.jit
def from_e2m1(words, PLACE: tl.constexpr, dtype: tl.constexpr):
    """Return the values of the 4-bit floats (e2m1) at PLACE of each word, in ``dtype``; exact.

    ``words`` int32 have eight of these floats each, and place 0 is the lowest four bits.
    """
    top = words << (28 - 4 * PLACE)
    if dtype == tl.float32:
        numbers = ((top >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif dtype == tl.float16:
        bits = ((top >> 19) & -0x7200).to(tl.int16)
        numbers = bits.to(tl.float16, bitcast=True) * 16384.0
    else:
        bits = ((top >> 22) & -0x7E40).to(tl.int16)
        numbers = bits.to(tl.bfloat16, bitcast=True) * 8.507059173023462e37  # 2 ** 126
    return numbers.to(dtype)


@triton.jit
def from_int4(words, PLACE: tl.constexpr, zeros, dtype: tl.constexpr):
    """Return code - 8 - ``zeros`` in ``dtype`` for the 4-bit code at PLACE of each word; exact.

    ``words`` int32 have eight codes each, and place 0 is the lowest four bits. ``zeros`` fp32 are
    integers from -8 to 7. A code becomes the last bits of the mantissa of a power of two, which is
    then subtracted.
    """
    codes = (words >> (4 * PLACE)) & 15
    if dtype == tl.float32:
        numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388616.0 + zeros)
    elif dtype == tl.float16:
        bits = (codes | 0x6400).to(tl.int16)
        numbers = bits.to(tl.float16, bitcast=True) - (1032.0 + zeros).to(tl.float16)
    else:
        bits = (codes | 0x4300).to(tl.int16)
        numbers = bits.to(tl.bfloat16, bitcast=True) - (136.0 + zeros).to(tl.bfloat16)
    return numbers
