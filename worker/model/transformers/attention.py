"""Attention function that transformers' attention layers call by name.

In transformers an attention function can be registered under a name. Each attention layer of a
model that is set to this name passes its queries, keys and values to the function. Everlift
registers one function under two names. The function passes each call to the Attend that the context
manager ``use_attention`` has set. The name determines the masks that transformers passes:

    SURVEY   instead of a mask, one number: the attention window (survey.py); the Attend notes it
             and computes no attention
    PAGED    none; the Attend writes keys and values to the paged KV cache and attends over it
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

    ``query`` is [T, heads, d], ``key`` [T, kv_heads, d] and ``value`` [T, kv_heads, e];
    ``arguments`` are the layer's further keyword arguments.
    """

    layer: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    arguments: Mapping[str, Any]


class Attend(Protocol):
    def __call__(self, call: Call) -> Tensor:
        """Return the attention output [T, heads, e] of the layer's ``call``."""
        ...


#: Attend in use. It is not passed as an argument of the model, because not every model passes its
#: arguments on to its layers.
_attend: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def use_attention(attend: Attend) -> Iterator[None]:
    """Context manager in which ``attend`` computes attention for models set to SURVEY or PAGED."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Layer with paged attention; ``index`` is its layer number in the KV cache, from 0."""

    index: int
    form: AttentionForm


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """Attention layers of a model by their module; ``head_dim`` is the width of the widest head."""

    by_module: Mapping[nn.Module, PagedLayer]
    kv_heads: int
    head_dim: int

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Shape of a token in the KV cache: (num_layers, kv_heads, head_dim)."""
        return len(self.by_module), self.kv_heads, self.head_dim


class PagedAttend:
    """Attend of one step: writes keys and values to the paged KV cache and attends over it.

    Heads that are narrower than those of the KV cache are padded with zeros, which change no score.
    With latent attention much of the cache is padding, because values are narrower than keys.
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


def attention_forward(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention with the Attend that ``use_attention`` has set.

    This is the function that transformers calls. ``query`` is [1, heads, T, d], ``key``
    [1, kv_heads, T, d] and ``value`` [1, kv_heads, T, e]; the output is [1, T, heads, e]. No
    attention weights are returned.
    """
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    call = Call(layer, query, key, value, attention_mask, arguments)
    return _attend.get()(call).unsqueeze(0), None


for _name in (SURVEY, PAGED):
    AttentionInterface.register(_name, attention_forward)
