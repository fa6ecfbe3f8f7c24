"""Mixture of experts, with this rank's share of the features of every expert.

    p = softmax(router(x))                         in fp32
    y = sum of p[e] * expert[e](x)                 over the top_k experts e with the largest p
        + sigmoid(shared_gate(x)) * shared(x)      if there is a shared expert

The p[e] of the top_k experts are first divided by their sum if ``Experts.normalised``.

One C++ call computes the block if all weights are in panels (mixture.h). A GPU computes the block
with a few Triton kernels if they work (kernel_mixture.py). Otherwise a loop calls each expert with
just the tokens that chose the expert.

The router is held by every rank, and one sum over the ranks makes the result of the whole block. A
router's near tie is decided alike on all ranks, because they have the same hidden states and run
the same code. Ranks on different CPUs need EVERLIFT_CPU_LEVEL to run the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from worker.model.compiled_mixture import CompiledMixture, compiled_mixture
from worker.model.layers import ColumnLinear, Part, Placement
from worker.model.lora import StepAdapters
from worker.model.matrix import Packing
from worker.model.mlp import Mlp
from worker.model.piece import Piece
from worker.model.sharing import Share
from worker.model.spec import Experts, ModelSpec

#: Numbers of tokens of a trial of the kernels, and the largest error in relation to the largest
#: result. The loop rounds between its operations; inputs in FP8 may be rounded to a neighbour.
_TRIED_ROWS, _LARGEST_ERROR = (2, 70), 0.1


class Mixture:
    """Mixture ``name`` of the experts that ``experts`` describes.

    The results of a token's experts are added up in fp32 in the order of their numbers, the shared
    expert's last, so that the sum does not depend on the other tokens of a step.
    """

    def __init__(self, name: str, experts: Experts, spec: ModelSpec, place: Placement) -> None:
        self.form = experts
        self._name = name
        self._width = spec.hidden_size
        self._dtype, self._device = place.dtype, place.device
        self._is_stacked = spec.tensors.stacked_experts
        self.activation = spec.activation
        self.group = place.group
        linears, size = spec.tensors.expert_linears, experts.intermediate_size
        #: all experts by number, followed by the shared one
        self.experts = [
            Mlp(f"{name}.experts.{number}", size, spec, place, linears)
            for number in range(experts.number)
        ]
        router = f"{name}.{spec.tensors.router}"
        outputs = [Part(router, experts.number, _whole(experts.number))]
        if experts.shared_size is not None:
            shared = Mlp(f"{name}.shared_expert", experts.shared_size, spec, place)
            self.experts.append(shared)
            outputs.append(Part(f"{name}.shared_expert_gate", 1, _whole(1)))
        #: outputs: a logit of each expert, and the shared expert's gate
        self.router = ColumnLinear(tuple(outputs), spec.hidden_size, experts.router_bias, place)
        #: the C++ call, if all weights are in panels
        self.compiled: CompiledMixture | None = None
        #: the kernels of a GPU
        self.kernels: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Return the result; ``adapters`` is ignored, because none adapts a mixture of experts."""
        return self.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's part of the result; the sum over the ranks is the result."""
        return (self.compiled or self.kernels or self._loop)(x)

    def _loop(self, x: Tensor) -> Tensor:
        weights = expert_weights(self.router(x), self.form)
        chosen = weights.t() != 0
        tokens = chosen.nonzero()[:, 1].split_with_sizes(chosen.sum(dim=1).tolist())
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number, rows in enumerate(tokens):
            if len(rows):
                result = self.experts[number].partial(x[rows])
                total[rows] += result.float() * weights[rows, number, None]
        return total.to(x.dtype)

    def pack(self, packing: Packing) -> None:
        packing = packing.of_experts()
        self.router.pack(packing)
        for expert in self.experts:
            expert.pack(packing)
        if packing.by_kernels:
            # Imported only for a GPU, because Triton may not be installed elsewhere.
            from worker.model.kernel_mixture import KernelMixture

            self.kernels = KernelMixture(self.form, self.router, self.experts)
        else:
            self.compiled = compiled_mixture(self.form, self.router, self.experts)

    def why_no_kernels(self) -> str:
        """Return why the GPU kernels cannot be used, or an empty string if they can.

        A trial computes random tokens with ``kernels`` and with the loop over the experts. The
        kernels fail on an error, or if a value differs from the loop's by more than a tenth of the
        largest magnitude among the loop's values.
        """
        assert self.kernels is not None
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(_TRIED_ROWS), self._width, generator=generator)
        x = x.to(self._device, self._dtype)
        try:
            for rows in _TRIED_ROWS:
                got, expected = self.kernels(x[:rows]).float(), self._loop(x[:rows]).float()
                furthest = (got - expected).abs().max()
                if not furthest <= _LARGEST_ERROR * expected.abs().max():
                    return f"results of {rows} tokens differ from those of a loop over experts"
        except Exception as error:
            return repr(error)
        return ""

    def pieces(self) -> Iterator[Piece]:
        yield from self.router.pieces()
        for number, expert in enumerate(self.experts):
            yield from self._stacked_pieces(number) if self._is_stacked else expert.pieces()

    def _stacked_pieces(self, number: int) -> Iterator[Piece]:
        """Yield the pieces of an expert whose weights are stored with those of all others."""
        expert, name, experts = self.experts[number], f"{self._name}.experts", self.form.number
        size, inputs = self.form.intermediate_size, self._width
        share, this = expert.share, slice(number, number + 1)
        held, features = slice(share.num_items), slice(share.start, share.stop)
        gate_up, down = expert.gate_up.weight.quantised, expert.down.weight.quantised
        if gate_up is not None and down is not None:
            yield from gate_up.stacked_pieces(f"{name}.gate_up_proj", number, experts)
            yield from down.stacked_pieces(f"{name}.down_proj", number, experts)
        else:
            both = expert.gate_up.weight.plain.view(2, share.width, inputs)[:, held]
            yield Piece(
                f"{name}.gate_up_proj",
                (experts, inputs, 2 * size),
                (slice(number * inputs, (number + 1) * inputs), features),
                both.permute(2, 1, 0),
                view=(experts * inputs, size, 2),
            )
            yield Piece(
                f"{name}.down_proj",
                (experts, size, inputs),
                (slice(number * size + share.start, number * size + share.stop),),
                expert.down.weight.plain[:, held].t(),
                view=(experts * size, inputs),
            )
        assert expert.gate_up.bias is not None and expert.down.bias is not None
        yield Piece(
            f"{name}.gate_up_proj_bias",
            (experts, 2 * size),
            (this, features),
            expert.gate_up.bias.view(2, share.width)[:, held].t()[None],
            view=(experts, size, 2),
        )
        yield Piece(f"{name}.down_proj_bias", (experts, inputs), (this,), expert.down.bias[None])


def expert_weights(logits: Tensor, form: Experts) -> Tensor:
    """Return the fp32 weights [T, outputs] of the experts' results; 0 for experts not chosen.

    ``logits`` [T, outputs] are the router's outputs: one for each expert, and one for the gate of
    the shared expert if there is one. Of equally probable experts, the first ones are chosen.
    """
    logits = logits.float()
    probabilities = logits[:, : form.number].softmax(dim=-1)
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    largest = ranked[:, : form.top_k]
    if form.normalised:
        largest = largest / largest.sum(dim=-1, keepdim=True)
    weights = logits[:, form.number :].sigmoid()
    chosen = torch.zeros_like(probabilities).scatter_(1, order[:, : form.top_k], largest)
    return torch.cat((chosen, weights), dim=1)


def _whole(size: int) -> Share:
    return Share(0, size, size)
