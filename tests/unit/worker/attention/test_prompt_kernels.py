"""Prompt attention by stand-ins for the kernels of FlashAttention 3 and FlashInfer.

The stand-ins compute results from their arguments alone, and refuse what the kernels refuse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from everlift.hashes import BLOCK_SIZE
from tests.support.worker.attention_support import (
    FORMS,
    KV_HEADS,
    Batch,
    assert_formula,
    kernel,
    some_forms,
)
from worker.attention import prompt_choice
from worker.attention.backend import AttentionForm
from worker.attention.gpu import GpuAttention
from worker.attention.prompt_choice import choose_prompt_kernels
from worker.attention.prompts import Feature, PromptKernels
from worker.device.kv_cache import KVCache

CPU = torch.device("cpu")
HEAD_DIM, HEADS = 16, 6
#: (start, tokens) of rows: decodes before, between and after chunks of prompts.
ROWS = [(32, 1), (0, 40), (5, 2), (40, 22), (62, 1)]
HALF = partial(Batch, dtype=torch.float16, head_dim=HEAD_DIM, heads=HEADS)
ALL = {Feature(window, softcap) for window in (False, True) for softcap in (False, True)}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in on a CPU")


class StandIn:
    """Module of FlashAttention 3, whose results are changed by ``change``."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.change: Callable[[Tensor, dict[str, Any]], Tensor] = lambda out, _: out

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, **asked: Any
    ) -> Tensor:
        self.num_calls += 1
        bounds, lengths = asked["cu_seqlens_q"], asked["cache_seqlens"]
        tables = asked["page_table"]
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == tables.stride(-1) == 1
        assert {each.dtype for each in (bounds, lengths, tables)} == {torch.int32}
        assert k_cache.shape == v_cache.shape == (len(k_cache), BLOCK_SIZE, KV_HEADS, q.shape[-1])
        assert len(bounds) - 1 == len(lengths) == len(tables) and bounds[-1] == len(q)
        assert asked["causal"] and asked["max_seqlen_q"] == bounds.diff().max()
        outs = []
        for row, (length, table) in enumerate(zip(lengths.tolist(), tables, strict=True)):
            pages = table[: -(-length // BLOCK_SIZE)]
            keys, values = (each[pages].flatten(0, 1)[:length] for each in (k_cache, v_cache))
            outs.append(formula(q[bounds[row] : bounds[row + 1]], keys, values, asked))
        return self.change(torch.cat(outs).to(q.dtype), asked)


def formula(query: Tensor, keys: Tensor, values: Tensor, asked: dict[str, Any]) -> Tensor:
    """Return attention in float64; ``query`` has the last positions of ``keys`` and ``values``."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * asked["softmax_scale"]
    if softcap := asked["softcap"]:
        scores = softcap * torch.tanh(scores / softcap)
    before = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))
    left, right = asked["window_size"]
    assert (left == -1) == (right == -1) and right in (-1, 0)
    unseen = (before < 0) | ((before > left) if left >= 0 else False)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), values)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    on(9, monkeypatch)
    # FlashInfer may be installed here, but must not be found.
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    prompt_choice._try_cached.cache_clear()
    yield module
    prompt_choice._try_cached.cache_clear()


def on(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))


def chosen(dtype: torch.dtype = torch.float16, head_dim: int = HEAD_DIM) -> PromptKernels | None:
    return choose_prompt_kernels(KVCache(1, 1, KV_HEADS, head_dim, dtype, CPU))


@some_forms
def test_prompt_kernel_computes_prompts_only(stand_in: StandIn, form: AttentionForm) -> None:
    kernels = chosen()
    batch = HALF(partial(kernel, prompt_kernels=kernels), ROWS)
    stand_in.num_calls = 0
    for i, out in enumerate(batch.attend([0, 1, 2, 3, 4], form)):
        assert_formula(batch, i, out, form)
    assert stand_in.num_calls == (form.sinks is None)


def test_prompt_kernel_is_not_called_without_prompts(stand_in: StandIn) -> None:
    batch = HALF(partial(kernel, prompt_kernels=chosen()), ROWS)
    stand_in.num_calls = 0
    for i, out in zip((0, 2, 4), batch.attend([0, 2, 4]), strict=True):
        assert_formula(batch, i, out)
    assert not stand_in.num_calls


@pytest.mark.long
def test_prompt_kernel_output_of_lone_prompt_is_not_copied(stand_in: StandIn) -> None:
    made: list[Tensor] = []
    batch = HALF(partial(kernel, prompt_kernels=chosen()), ROWS)
    stand_in.change = lambda out, _: made.append(out) or out  # type: ignore[func-returns-value]
    (out,) = batch.attend([1])
    assert out.data_ptr() == made[0].data_ptr()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "generation", "fits"),
    [
        (torch.float16, 16, 9, True),
        (torch.float32, 16, 9, False),
        (torch.float16, 12, 9, False),
        (torch.float16, 264, 9, False),
        (torch.float16, 16, 8, False),
        (torch.float16, 16, 10, False),
    ],
)
def test_flashattention3_requires_hopper_and_half_precision(
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    head_dim: int,
    generation: int,
    fits: bool,
) -> None:
    on(generation, monkeypatch)
    assert (chosen(dtype, head_dim) is not None) == fits


def spoilt(out: Tensor, value: float) -> Tensor:
    out[60, 3] *= value
    return out


@pytest.mark.parametrize("value", [1.1, 0.0, torch.nan, torch.inf])
def test_prompt_kernel_wrong_in_one_head_is_rejected(stand_in: StandIn, value: float) -> None:
    stand_in.change = lambda out, _: spoilt(out, value)
    assert chosen() is None


def test_prompt_kernel_wrong_with_softcap_is_used_without_it(stand_in: StandIn) -> None:
    stand_in.change = lambda out, asked: out * (2 if asked["softcap"] else 1)
    kernels = chosen()
    assert kernels is not None
    takes = {name for name, form in FORMS.items() if kernels.supports(form)}
    assert takes == {name for name, f in FORMS.items() if f.softcap is None and f.sinks is None}


def test_prompt_kernel_without_entry_point_is_rejected(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace())
    assert chosen() is None


def test_prompt_kernel_is_none_if_not_installed(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert chosen() is None


def test_prompt_kernel_failure_falls_back_permanently(stand_in: StandIn) -> None:
    batch = HALF(partial(kernel, prompt_kernels=chosen()), ROWS)

    def fail(out: Tensor, asked: object) -> Tensor:
        raise RuntimeError("not for this card")

    stand_in.change, stand_in.num_calls = fail, 0
    for _ in range(2):
        assert_formula(batch, 1, batch.attend([1])[0])
    assert stand_in.num_calls == 1


@pytest.mark.long
def test_prompt_kernel_is_kept_after_out_of_memory(stand_in: StandIn) -> None:
    kernels = chosen()
    batch = HALF(partial(kernel, prompt_kernels=kernels), ROWS)

    def fail(out: Tensor, asked: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    stand_in.change = fail
    with pytest.raises(torch.OutOfMemoryError):
        batch.attend([1])
    assert kernels is not None and kernels.supports(FORMS["plain"])


def test_attention_name_includes_prompt_kernel(stand_in: StandIn) -> None:
    cache = KVCache(1, 1, KV_HEADS, HEAD_DIM, torch.float16, CPU)
    assert GpuAttention(cache, 1).name == "GpuAttention"
    assert GpuAttention(cache, 1, chosen()).name == "GpuAttention, prompts by FlashAttention 3"


class Wrapper:
    """Stand-in for the prefill wrapper of FlashInfer."""

    num_plans = 0

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"

    def plan(
        self,
        bounds: Tensor,
        page_bounds: Tensor,
        pages: Tensor,
        last_lengths: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        **asked: Any,
    ) -> None:
        type(self).num_plans += 1
        assert {each.dtype for each in (bounds, page_bounds, pages, last_lengths)} == {torch.int32}
        assert page_bounds[-1] == len(pages) and page_size == BLOCK_SIZE and asked["causal"]
        assert ((last_lengths > 0) & (last_lengths <= page_size)).all()
        self._rows = list(zip(bounds.tolist(), bounds.tolist()[1:], strict=False))
        of_rows = pages.split(page_bounds.diff().tolist())
        self._pages = list(zip(of_rows, last_lengths.tolist(), strict=True))
        self._shape = heads, kv_heads, head_dim
        left = asked["window_left"]
        self._asked = {
            "softmax_scale": asked["sm_scale"],
            "softcap": asked["logits_soft_cap"],
            "window_size": (left, -1 if left < 0 else 0),
        }

    def run(self, q: Tensor, cache: Tensor) -> Tensor:
        heads, kv_heads, head_dim = self._shape
        assert q.shape[1:] == (heads, head_dim) and cache.shape[1:3] == (2, kv_heads)
        outs = []
        for (first, end), (pages, last) in zip(self._rows, self._pages, strict=True):
            length = (len(pages) - 1) * BLOCK_SIZE + last
            parts = (cache[pages, part].transpose(1, 2).flatten(0, 1) for part in (0, 1))
            keys, values = (part[:length] for part in parts)
            outs.append(formula(q[first:end], keys, values, self._asked))
        return torch.cat(outs).to(q.dtype)


@some_forms
def test_flashinfer_computes_prompts_without_flashattention(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, form: AttentionForm
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    on(8, monkeypatch)
    kernels = chosen(head_dim=64)
    assert kernels is not None and kernels.name == "FlashInfer"
    attention = partial(kernel, prompt_kernels=kernels)
    batch = Batch(attention, ROWS, torch.float16, head_dim=64, heads=HEADS)
    monkeypatch.setattr(Wrapper, "num_plans", 0)
    for i, out in enumerate(batch.attend([0, 1, 2, 3, 4], form)):
        assert_formula(batch, i, out, form)
    assert Wrapper.num_plans == (form.sinks is None)


@pytest.mark.long
def test_flashattention_is_preferred_to_flashinfer(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    kernels = chosen(head_dim=64)
    assert kernels is not None and kernels.name == "FlashAttention 3"
