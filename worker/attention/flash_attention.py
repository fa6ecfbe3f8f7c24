"""Attention of prompts by FlashAttention 3, for Hopper (Dao-AILab/flash-attention, hopper/)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from worker.attention.backend import AttentionForm
from worker.attention.prompts import Prompts

_MODULE = "flash_attn_interface"
_HOPPER = 9
#: Largest supported head dimension, and the number of which head dimensions must be multiples
#: (eight features are 16 bytes).
_LARGEST_HEAD, _ALIGNED = 256, 8
_DTYPES = (torch.float16, torch.bfloat16)


class FlashAttention3:
    """PromptBackend (attention of rows with many new tokens) that uses FlashAttention 3.

    The constructor raises ImportError if the library is not installed.
    """

    name = "FlashAttention 3"

    def __init__(self, device: torch.device) -> None:
        self._attend = import_module(_MODULE).flash_attn_with_kvcache

    @staticmethod
    def fits(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        return (
            head_dim <= _LARGEST_HEAD
            and head_dim % _ALIGNED == 0
            and dtype in _DTYPES
            and torch.cuda.get_device_capability(device)[0] == _HOPPER
        )

    def prepare(self, prompts: Prompts) -> FlashStep:
        return FlashStep(self._attend, prompts)


class FlashStep:
    def __init__(self, attend: Any, prompts: Prompts) -> None:
        self._attend = attend
        self._prompts = prompts

    def attend(self, layer: Tensor, query: Tensor, form: AttentionForm) -> Tensor:
        tensors = self._prompts.tensors
        keys, values = (part.transpose(1, 2) for part in layer.unbind(1))
        attended: Tensor = self._attend(
            query,
            keys,
            values,
            cache_seqlens=tensors.lengths,
            page_table=tensors.tables,
            cu_seqlens_q=tensors.bounds,
            max_seqlen_q=int(self._prompts.counts.max()),
            softmax_scale=form.scale,
            causal=True,
            # Numbers of positions that a token sees to its left and to its right; -1: no limit.
            window_size=(-1, -1) if form.window is None else (form.window - 1, 0),
            softcap=form.softcap or 0.0,
        )
        return attended
