"""Mixture of experts on a GPU, in a fixed number of kernels (worker.kernels.experts, .products).

    choose the experts of each token, and sort the (token, expert) pairs by their expert
    compute act(gate(x)) * up(x) of all pairs, in one product over all experts
    compute down of these results, in another product over all experts
    compute the weighted sum of each token's experts

The host knows neither the chosen experts nor how many tokens each has, so that a step can be
captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.kernels.experts import route_tokens, sort_pairs, sum_experts
from worker.model.kernel_linear import ExpertRows, KernelLinear, Operand, multiply
from worker.model.layers import ColumnLinear, RowLinear
from worker.model.matrix import Plain
from worker.model.mlp import Mlp
from worker.model.spec import Experts

_SORT_BLOCK, _SUM_BLOCK = 1024, 1024


class KernelMixture:
    """Router and experts in memory of a GPU; a call returns this rank's part of their result."""

    def __init__(self, form: Experts, router: ColumnLinear, experts: Sequence[Mlp]) -> None:
        """Create the mixture; ``experts`` end with the shared one, if there is one."""
        self._form = form
        self._router = router
        self._experts = experts[: form.number]
        self._shared = experts[form.number] if form.shared_size is not None else None
        self._gate_up = _table([mlp.gate_up for mlp in self._experts])
        self._down = _table([mlp.down for mlp in self._experts])

    def __call__(self, x: Tensor) -> Tensor:
        x, form, tokens = x.contiguous(), self._form, len(x)
        if not tokens:
            return x
        pairs, has_shared = tokens * form.top_k, self._shared is not None
        logits = self._router(x)
        experts = x.new_empty(tokens, form.top_k, dtype=torch.int32)
        weights = x.new_empty(tokens, form.top_k, dtype=torch.float32)
        shared_weights = x.new_empty(tokens, dtype=torch.float32)
        route_tokens[(tokens,)](
            logits,
            experts,
            weights,
            shared_weights,
            logits.stride(0),
            EXPERTS=form.number,
            BLOCK=1 << (form.number - 1).bit_length(),
            TOP_K=form.top_k,
            NORMALISED=form.normalised,
            HAS_SHARED=has_shared,
            num_warps=1,
        )
        offsets = experts.new_empty(form.number + 1)
        order = experts.new_empty(pairs)
        sort_pairs[(form.number,)](experts, offsets, order, pairs, BLOCK=_SORT_BLOCK, num_warps=4)
        results = self._results(x, offsets, order, pairs)
        shared = results if self._shared is None else self._shared.partial(x)
        out = torch.empty_like(x)
        width = x.shape[1]
        sum_experts[(tokens, -(-width // _SUM_BLOCK))](
            results,
            weights,
            shared,
            shared_weights,
            out,
            width,
            TOP_K=form.top_k,
            HAS_SHARED=has_shared,
            BLOCK=_SUM_BLOCK,
            num_warps=4,
        )
        return out

    def _results(self, x: Tensor, offsets: Tensor, order: Tensor, pairs: int) -> Tensor:
        """Return the results [pairs, hidden] of the experts, by number of the pair."""
        number, mlp = self._form.number, self._experts[0]
        gate_up, down = _operand(mlp.gate_up), _operand(mlp.down)
        tile = gate_up.tile_for(-(-pairs // number), x.dtype)
        # Each expert with tokens may have one tile that is not full.
        tiles = min(number, pairs) + pairs // tile.rows
        inner = x.new_empty(pairs, gate_up.outputs // 2)
        multiply(
            inner,
            x,
            gate_up,
            mlp.gate_up.bias,
            tile,
            tiles,
            pairs,
            mlp.activation,
            ExpertRows(self._gate_up, offsets, order, gathered=self._form.top_k),
            fp8=_has_fp8(mlp.gate_up),
        )
        results = x.new_empty(pairs, down.outputs)
        multiply(
            results,
            inner,
            down,
            mlp.down.own_bias,
            tile,
            tiles,
            pairs,
            None,
            ExpertRows(self._down, offsets, order, scatters=True),
            fp8=_has_fp8(mlp.down),
        )
        return results


def _operand(linear: ColumnLinear | RowLinear) -> Operand:
    form = linear.weight.form
    if isinstance(form, KernelLinear):
        return form.operand
    assert isinstance(form, Plain)
    return Operand.of_plain(form.weight)


def _has_fp8(linear: ColumnLinear | RowLinear) -> bool:
    form = linear.weight.form
    return isinstance(form, KernelLinear) and form.fp8


def _table(linears: Sequence[ColumnLinear | RowLinear]) -> Tensor:
    """Return the addresses of the experts' weights for multiply_tiles, int64 [experts, 4]."""
    biases = [
        linear.own_bias if isinstance(linear, RowLinear) else linear.bias for linear in linears
    ]
    operands = [_operand(linear) for linear in linears]
    rows = [operand.addresses(bias) for operand, bias in zip(operands, biases, strict=True)]
    return torch.tensor(rows, dtype=torch.int64, device=operands[0].codes.device)
