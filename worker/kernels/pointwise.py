"""Fused pointwise kernels of a layer: residual sum with norm, and the gate of an MLP."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_and_norm(
    x,
    added,
    weight,
    out,
    heads,
    token_stride,
    head_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    ADD_ONE: tl.constexpr,
):
    """Compute ``out`` [rows, WIDTH] = x / rms(x) * weight, one program per row.

    Row r of ``x`` begins at (r // heads) * token_stride + (r % heads) * head_stride. With ADDS,
    ``added`` [rows, WIDTH] is first added to ``x`` in place, and the sum is rounded to the type of
    ``x``. With ADD_ONE the factor is weight + 1.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    within = columns < WIDTH
    place = x + row // heads * token_stride + row % heads * head_stride + columns
    values = tl.load(place, mask=within, other=0.0)
    if ADDS:
        more = tl.load(added + row * WIDTH + columns, mask=within, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(place, values, mask=within)
    precise = values.to(tl.float32)
    factor = tl.load(weight + columns, mask=within, other=0.0).to(tl.float32)
    if ADD_ONE:
        factor += 1.0
    mean = tl.sum(precise * precise, 0) / WIDTH
    result = precise * (1.0 / tl.sqrt(mean + eps)) * factor
    tl.store(out + row * WIDTH + columns, result.to(values.dtype), mask=within)


@triton.jit
def gate_and_multiply(
    gate_up,
    out,
    token_stride,
    width,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Compute ``out`` [tokens, width] = activation(gate) * up of ``gate_up`` [tokens, 2 * width].

    There is one program per (token, BLOCK columns). ``gate_up`` has gate before up. ACTIVATION is a
    name in worker.model.spec.Activation, such as silu; gpt_oss has another formula.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < width
    source = gate_up + token * token_stride + columns
    gate = tl.load(source, mask=within, other=0.0)
    up = tl.load(source + width, mask=within, other=0.0).to(tl.float32)
    active = gated(gate.to(tl.float32), up, ACTIVATION)
    tl.store(out + token * width + columns, active.to(gate.dtype), mask=within)


@triton.jit
def gated(x, up, ACTIVATION: tl.constexpr):
    """Return activation(``x``) * ``up``, where ``x`` is the gate; both are fp32.

    The activation gpt_oss first clamps ``up`` to the range -7..7, and ``x`` to at most 7. Its
    result is multiplied by the clamped ``up`` plus 1, instead of by ``up``.
    """
    if ACTIVATION == "silu":
        active = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gpt_oss":
        x = tl.minimum(x, 7.0)
        active = x / (1.0 + tl.exp(-1.702 * x))
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    else:
        # x * sigmoid(2 y) is x / 2 * (1 + tanh(y))
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        active = x / (1.0 + tl.exp(-twice))
    return active * up
