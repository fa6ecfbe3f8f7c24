"""Decoder-only models of transformers over the paged KV cache, on one rank.

The model's own modules compute everything but attention. They receive the tokens of a step as one
sequence in a batch of one; only attention knows to which sequences the tokens belong.

    trunk   embedding, layers, last norm    tokens [1, T] -> hidden [1, T, hidden]
    head    the model without its trunk     hidden [1, n, hidden] -> logits [1, n, vocab]
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from worker.attention.backend import StepAttention
from worker.engine.plan import Ints
from worker.model.transformers.attention import PAGED, PagedAttend, use_attention
from worker.model.transformers.survey import Survey


class Output(NamedTuple):
    """Result for one sequence: ``hidden`` [T, hidden] and fp32 ``logits`` [T, vocab]."""

    hidden: Tensor
    logits: Tensor


class TransformersDecoder:
    """Decoder that runs the modules of ``model``, with its attention replaced by paged attention.

    Like worker.model.decoder.Decoder it has ``forward`` and ``logits``, but none of the methods
    that load and pack weights. ``max_position`` is the length in tokens of the longest sequence
    that the model is made for.
    """

    def __init__(self, model: PreTrainedModel, survey: Survey, max_position: int) -> None:
        self.layers = survey.layers
        self.max_position = max_position
        self.vocab_size = survey.vocab_size
        self._model = model
        self._trunk = model.get_submodule(survey.trunk)
        self._head = _with_passage(model, survey.trunk.split("."))
        model.set_attn_implementation(PAGED)

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        sites: Tensor | None = None,
        adapters: Ints | None = None,
    ) -> Tensor:
        """Return the hidden states of all tokens, or of those at ``sites``; see Decoder.forward."""
        assert adapters is None, "transformers' modules have no adapters"
        with use_attention(PagedAttend(self.layers, attention)):
            out = self._trunk(
                input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            )
        hidden = _hidden(out)
        return hidden if sites is None else hidden[sites]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [n, vocab] of ``hidden`` [n, hidden]."""
        return _logits(self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False))

    def forward_with_own_attention(self, tokens: Tensor) -> Output:
        """Return the model's result for one whole sequence, computed with its own attention.

        ``tokens`` [T] are all tokens of the sequence, from position 0 on.
        """
        hidden: list[Tensor] = []
        listening = self._trunk.register_forward_hook(
            lambda module, args, out: hidden.append(_hidden(out))
        )
        self._model.set_attn_implementation("eager")
        try:
            out = self._model(input_ids=tokens.unsqueeze(0), use_cache=False)
        finally:
            listening.remove()
            self._model.set_attn_implementation(PAGED)
        return Output(hidden[0], _logits(out))


class _Hidden(tuple[Tensor]):
    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def _as_passage(trunk: nn.Module) -> nn.Module:
    """Return a copy of ``trunk`` that returns its argument ``inputs_embeds`` as hidden states."""
    passage = copy(trunk)
    passage.forward = lambda *_, inputs_embeds, **__: _Hidden((inputs_embeds,))
    return passage


def _with_passage(module: nn.Module, trunk: Sequence[str]) -> nn.Module:
    """Return a copy of ``module`` in which _as_passage has replaced the submodule ``trunk``.

    ``trunk`` has the names on the path to the submodule; if empty, ``module`` itself is replaced.
    The original is not changed.
    """
    if not trunk:
        return _as_passage(module)
    name, *inner = trunk
    replaced = copy(module)
    replaced._modules = module._modules | {name: _with_passage(module.get_submodule(name), inner)}
    return replaced


def _hidden(out: Any) -> Tensor:
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def _logits(out: Any) -> Tensor:
    logits: Tensor = out.logits[0]
    return logits.float()
