"""Survey of a transformers model's attention, in one pass over a few tokens.

A model whose layers need more than paged attention provides is refused. A layer's window is taken
from its mask, which also determines the window in transformers' eager attention. The mask is a
function of positions, so it can be evaluated at positions far beyond the few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from worker.attention.backend import AttentionForm
from worker.model.transformers.attention import (
    SURVEY,
    Call,
    PagedLayer,
    PagedLayers,
    use_attention,
)

#: Arguments that affect the scores, and arguments that do not. Any other argument is refused.
_FORM = frozenset({"scaling", "softcap", "s_aux"})
_IGNORED = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "sliding_window",
        "use_cache",
    }
)
_NUM_TOKENS = 3
#: Positions at which a mask is evaluated: each of _QUERIES, with every key below _HORIZON.
_HORIZON = 1 << 18
_QUERIES = (0, 1, 100, 5000, 40_000, _HORIZON - 2, _HORIZON - 1)

#: (batch, head, query position, key position) -> whether the query sees the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Unservable(ValueError):
    """Raised if a transformers model cannot be served; the message does not name the model."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Description of a transformers model's attention, as ``survey`` found it.

    ``trunk`` is the name of the submodule that returns hidden states.
    """

    layers: PagedLayers
    trunk: str
    vocab_size: int


@torch.inference_mode()
def survey(model: PreTrainedModel) -> Survey:
    """Run ``model`` on a few tokens, and return the description of its attention.

    The model's attention stays set to SURVEY. Raises Unservable if a layer needs more than paged
    attention provides, or if the head cannot be separated from the layers.
    """
    model.set_attn_implementation(SURVEY)
    tokens = torch.arange(_NUM_TOKENS, device=model.device).unsqueeze(0)
    surveyor = _Surveyor()
    with use_attention(surveyor), _called_within(model) as called:
        out = model(input_ids=tokens, position_ids=tokens, use_cache=False)
    if not called:
        raise Unservable("the head cannot be separated from the layers")
    layers = surveyor.layers(model.config.num_hidden_layers)
    return Survey(layers, trunk=called[0], vocab_size=int(out.logits.shape[-1]))


class _Surveyor:
    def __init__(self) -> None:
        self._notes: dict[torch.nn.Module, PagedLayer] = {}
        self._kv_heads: set[int] = set()
        self._head_dims: set[int] = set()

    def __call__(self, call: Call) -> Tensor:
        if call.layer in self._notes:
            raise Unservable("one of its layers attends more than once")
        self._notes[call.layer] = PagedLayer(len(self._notes), _form(call))
        self._kv_heads.add(call.key.shape[1])
        self._head_dims |= {call.key.shape[-1], call.value.shape[-1]}
        return call.value.new_zeros(*call.query.shape[:2], call.value.shape[-1])

    def layers(self, expected: int) -> PagedLayers:
        """Return the layers that called the attention function.

        Raises Unservable unless their number is ``expected`` and all have equally many KV heads.
        """
        if len(self._notes) != expected:
            raise Unservable(
                f"{len(self._notes)} of its {expected} layers attend through transformers' "
                "attention interface, and the KV cache has no place for the state of other layers"
            )
        if len(self._kv_heads) > 1:
            raise Unservable("the layers differ in the number of KV heads")
        return PagedLayers(self._notes, self._kv_heads.pop(), max(self._head_dims))


def _form(call: Call) -> AttentionForm:
    passed = {name for name, value in call.arguments.items() if value is not None}
    if unknown := passed - _FORM - _IGNORED:
        raise Unservable(f"the attention takes unknown arguments: {', '.join(sorted(unknown))}")
    scale = call.arguments.get("scaling")
    return AttentionForm(
        scale=call.key.shape[-1] ** -0.5 if scale is None else float(scale),
        window=_decode_window(call.mask),
        softcap=call.arguments.get("softcap"),
        sinks=call.arguments.get("s_aux"),
    )


def _encode_window(*, mask_function: MaskFunction, device: torch.device, **_: Any) -> Tensor:
    """Return an int64 mask [1, 1, 1, 1] whose element is the window, or 0 if there is no window."""
    window = window_of(mask_function) or 0
    return torch.full((1, 1, 1, 1), window, dtype=torch.int64, device=device)


def _decode_window(mask: Tensor | None) -> int | None:
    if mask is None or mask.shape != (1, 1, 1, 1) or mask.dtype != torch.int64:
        raise Unservable("the attention mask is not one of transformers' own")
    return int(mask) or None


def window_of(sees: MaskFunction) -> int | None:
    """Return the window of the causal mask ``sees``.

    The window is the largest number of tokens to which a token attends, including itself. Returns
    None if a token attends to all tokens before it. Raises Unservable if the mask is not causal or
    has gaps.
    """
    query, key = torch.tensor(_QUERIES).unsqueeze(1), torch.arange(_HORIZON).unsqueeze(0)
    first = torch.tensor(0)
    seen = sees(first, first, query, key).expand(len(_QUERIES), _HORIZON)
    width = int(seen[-1].sum())
    if not torch.equal(seen, (key <= query) & (key > query - width)):
        raise Unservable("the attention mask is neither causal nor a sliding window")
    return None if width == _HORIZON else width


@contextmanager
def _called_within(model: PreTrainedModel) -> Iterator[list[str]]:
    """Context manager that yields a list of the names of called submodels, in the order of calls.

    A submodel is a module inside ``model`` that is itself a PreTrainedModel. The list grows while
    ``model`` runs.
    """
    called: list[str] = []
    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module is not model:
            handles.append(module.register_forward_pre_hook(partial(_note, called, name)))
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _note(called: list[str], name: str, *_: object) -> None:
    called.append(name)


AttentionMaskInterface.register(SURVEY, _encode_window)
