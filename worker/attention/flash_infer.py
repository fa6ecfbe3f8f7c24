"""Attention of prompts by FlashInfer (flashinfer-ai/flashinfer), if FlashAttention 3 is unusable.

FlashInfer prepares a plan on the host, once per step and attention form. It reads the cache in
place: the shape of KVCache is the layout that FlashInfer calls HND, in which the axis of the heads
precedes that of the positions. Kernels that are not compiled yet are compiled in the trial at the
start (worker.attention.prompt_choice).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everlift.hashes import BLOCK_SIZE
from worker.attention.backend import AttentionForm
from worker.attention.prompts import Prompts, bounds_of
from worker.device.upload import upload

_MODULE = "flashinfer"
_AMPERE = 8
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
#: Size of the workspace that FlashInfer's documentation recommends.
_WORKSPACE_BYTES = 128 << 20

_Key = tuple[int, float, int | None, float | None]


class FlashInfer:
    """PromptBackend (attention of rows with many new tokens) that uses FlashInfer.

    The constructor raises ImportError if the library is not installed.
    """

    name = "FlashInfer"

    def __init__(self, device: torch.device) -> None:
        self._wrapper: Any = import_module(_MODULE).BatchPrefillWithPagedKVCacheWrapper
        self._device = device
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planners: dict[_Key, _Planner] = {}

    @staticmethod
    def fits(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        return (
            head_dim in _HEAD_DIMS
            and dtype in _DTYPES
            and torch.cuda.get_device_capability(device)[0] >= _AMPERE
        )

    def prepare(self, prompts: Prompts) -> FlashInferStep:
        return FlashInferStep(self, prompts)

    def planner(self, heads: int, form: AttentionForm) -> _Planner:
        key = (heads, form.scale, form.window, form.softcap)
        if key not in self._planners:
            self._planners[key] = _Planner(self._wrapper(self._workspace, "HND"), self._device)
        return self._planners[key]


class _Planner:
    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._device = device
        self._copied: torch.cuda.Event | None = None

    def plan(self, prompts: Prompts, layer: Tensor, query: Tensor, form: AttentionForm) -> Any:
        """Plan the attention of ``prompts``, and return the function that computes it.

        Only shapes and types are read from ``layer`` and ``query``. The returned function has the
        arguments ``query`` [tokens, heads, head_dim] and ``layer`` (from KVCache.layer).

        A plan is copied to the device from host memory that the next plan overwrites. This method
        therefore first waits until the previous plan has been copied.
        """
        if self._copied is not None:
            self._copied.synchronize()
        num_pages = -(-prompts.lengths // BLOCK_SIZE)
        pages = prompts.tables[np.arange(prompts.tables.shape[1]) < num_pages[:, np.newaxis]]
        self._wrapper.plan(
            _host_tensor(bounds_of(prompts.counts)),
            _host_tensor(bounds_of(num_pages)),
            upload(pages, self._device, torch.int32),
            _host_tensor(prompts.lengths - (num_pages - 1) * BLOCK_SIZE),
            query.shape[1],
            layer.shape[2],
            layer.shape[4],
            BLOCK_SIZE,
            causal=True,
            sm_scale=form.scale,
            window_left=-1 if form.window is None else form.window - 1,
            logits_soft_cap=form.softcap,
            q_data_type=query.dtype,
            kv_data_type=layer.dtype,
        )
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._wrapper.run


class FlashInferStep:
    def __init__(self, backend: FlashInfer, prompts: Prompts) -> None:
        self._backend = backend
        self._prompts = prompts
        self._runs: dict[_Planner, Any] = {}

    def attend(self, layer: Tensor, query: Tensor, form: AttentionForm) -> Tensor:
        planner = self._backend.planner(query.shape[1], form)
        if planner not in self._runs:
            self._runs[planner] = planner.plan(self._prompts, layer, query, form)
        attended: Tensor = self._runs[planner](query, layer)
        return attended


def _host_tensor(column: NDArray[Any]) -> Tensor:
    return torch.from_numpy(column.astype(np.int32))
