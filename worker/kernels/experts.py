"""Kernels for a mixture of experts before and after its matrix products (``products``).

The kernels choose the experts of each token, sort the (token, expert) pairs by their expert, and
sum the results of the experts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route_tokens(
    logits,
    experts,
    weights,
    shared_weights,
    stride,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """Choose the TOP_K most probable experts of each token, one program per token.

    Row t of ``logits``, at t * ``stride``, has the logits of the EXPERTS experts. HAS_SHARED means
    that the logit of the shared expert's gate follows them, and that ``shared_weights`` fp32
    [tokens] gets its sigmoid. ``experts`` int32 [tokens, TOP_K] gets the chosen experts in
    ascending order, and ``weights`` fp32 [tokens, TOP_K] their probabilities. NORMALISED means that
    the probabilities of a token's chosen experts are divided by their sum. The first ones of
    equally probable experts are chosen. NaN counts as improbable, so that TOP_K experts are always
    chosen.
    """
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    is_expert = numbers < EXPERTS
    row = tl.load(logits + token * stride + numbers, mask=is_expert, other=float("-inf"))
    row = row.to(tl.float32)
    powers = tl.exp(row - tl.max(row, 0))
    probabilities = powers / tl.sum(powers, 0)
    left = tl.where(is_expert & (probabilities == probabilities), probabilities, 0.0)
    left = tl.where(is_expert, left, -2.0)
    is_chosen = numbers < 0
    for _ in tl.static_range(TOP_K):
        is_best = numbers == tl.argmax(left, 0, tie_break_left=True)
        is_chosen = is_chosen | is_best
        left = tl.where(is_best, -1.0, left)
    chosen = tl.where(is_chosen, probabilities, 0.0)
    if NORMALISED:
        chosen = chosen / tl.sum(chosen, 0)
    places = token * TOP_K + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(experts + places, numbers, mask=is_chosen)
    tl.store(weights + places, chosen, mask=is_chosen)
    if HAS_SHARED:
        gate = tl.load(logits + token * stride + EXPERTS).to(tl.float32)
        tl.store(shared_weights + token, 1.0 / (1.0 + tl.exp(-gate)))


@triton.jit(do_not_specialize=["number"])
def sort_pairs(experts, offsets, pairs, number, BLOCK: tl.constexpr):
    """Sort ``number`` (token, expert) pairs by their expert, stably; write their sorted indices.

    ``experts`` [number] has the expert of each pair, and ``pairs`` [number] gets the indices. There
    is one program per expert. Program e writes the number of pairs whose expert is below e to
    ``offsets[e]``. The indices of the pairs with expert e are written to ``pairs``, beginning at
    that offset. The last program also writes ``offsets[e + 1]``, which is ``number``.
    """
    expert, last = tl.program_id(0), tl.num_programs(0) - 1
    within = tl.arange(0, BLOCK)
    before = 0
    for first in range(0, number, BLOCK):
        found = tl.load(experts + first + within, mask=first + within < number, other=last + 1)
        before += tl.sum((found < expert).to(tl.int32), 0)
    tl.store(offsets + expert, before)
    if expert == last:
        tl.store(offsets + last + 1, number)
    for first in range(0, number, BLOCK):
        found = tl.load(experts + first + within, mask=first + within < number, other=last + 1)
        is_mine = found == expert
        places = before + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(pairs + places, first + within, mask=is_mine)
        before += tl.sum(is_mine.to(tl.int32), 0)


@triton.jit
def sum_experts(
    results,
    weights,
    shared,
    shared_weights,
    out,
    width,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the weighted sum of each token's experts to ``out`` [tokens, width].

    ``results`` are [tokens * TOP_K, width], ``weights`` fp32 [tokens, TOP_K]. HAS_SHARED means that
    ``shared`` [tokens, width] times ``shared_weights`` fp32 [tokens] is added last. There is one
    program per (token, BLOCK columns).
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        result = tl.load(results + pair * width + columns, mask=within, other=0.0)
        total += result.to(tl.float32) * tl.load(weights + pair)
    if HAS_SHARED:
        result = tl.load(shared + token * width + columns, mask=within, other=0.0)
        total += result.to(tl.float32) * tl.load(shared_weights + token)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=within)
