"""Attention function that transformers' attention layers call by name.

transformers lets a model take its attention from outside, by name: each attention layer hands its
queries, keys and values to the function of that name. Two names, one function: who answers is said
around the call.

    SURVEY   masks say what they mean (transformers_survey.py); nothing is attended to
    PAGED    no masks; keys and values go to the paged KV cache, and attention runs over it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from worker.attention.backend import AttentionForm, StepAttention

SURVEY = "everlift_survey"
PAGED = "everlift"


@dataclass(frozen=True, slots=True)
class Call:
    """Attention call of one layer over T tokens.

    ``query`` [T, heads, d], ``key`` [T, kv_heads, d], ``value`` [T, kv_heads, e], and the layer's
    other arguments.
    """

    layer: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    arguments: Mapping[str, Any]


class Attend(Protocol):
    def __call__(self, call: Call) -> Tensor:
        """Return the layer's output [T, heads, e]."""
        ...


#: Not an argument of the model: not every model hands its arguments on to its layers.
_attend: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def answered_by(attend: Attend) -> Iterator[None]:
    """Route the attention of models under SURVEY or PAGED to ``attend`` within the context."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Layer over paged attention; ``index`` is its place in the KV cache."""

    index: int
    form: AttentionForm


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """Attention modules of a model, with heads in the KV cache as wide as the widest."""

    by_module: Mapping[nn.Module, PagedLayer]
    kv_heads: int
    head_dim: int

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Shape of a token in the KV cache: num_layers, kv_heads, head_dim."""
        return len(self.by_module), self.kv_heads, self.head_dim


class PagedAttend:
    """An Attend over one step's paged attention. Zeros fill narrower heads up, and change no score.

    In a latent attention's cache that is much: its values are narrower than its keys.
    """

    def __init__(self, layers: PagedLayers, step: StepAttention) -> None:
        self._layers = layers
        self._step = step

    def __call__(self, call: Call) -> Tensor:
        layer = self._layers.by_module[call.layer]
        self._step.write(layer.index, self._widened(call.key), self._widened(call.value))
        out = self._step.attend(layer.index, self._widened(call.query), layer.form)
        return out[..., : call.value.shape[-1]]

    def _widened(self, heads: Tensor) -> Tensor:
        missing = self._layers.head_dim - heads.shape[-1]
        return functional.pad(heads, (0, missing)) if missing else heads


def hand_over(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Adapt transformers' shapes: [1, heads, T, d] comes in, [1, T, heads, e] goes out."""
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    call = Call(layer, query, key, value, attention_mask, arguments)
    return _attend.get()(call).unsqueeze(0), None


for _name in (SURVEY, PAGED):
    AttentionInterface.register(_name, hand_over)
