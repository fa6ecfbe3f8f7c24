"""Falcon with replaceable attention, which transformers' own Falcon does not support."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import FalconConfig, FalconForCausalLM
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from worker.model.transformers.attention import PAGED, SURVEY, attention_forward


class InterfacedFalcon(FalconForCausalLM):
    """Falcon whose attention can be replaced, as transformers allows for other models.

    It can be set to SURVEY or PAGED of worker.model.transformers.attention. All else is as in
    transformers.
    """

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, FalconAttention):
                module.__class__ = _InterfacedAttention

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True


class _InterfacedAttention(FalconAttention):
    num_kv_heads: int

    def forward(self, hidden_states: Tensor, **given: Any) -> Any:  # type: ignore[override]
        """Return the output [1, T, hidden] for ``hidden_states`` [1, T, hidden], and None.

        If the attention is set to neither SURVEY nor PAGED, FalconAttention computes the result.
        """
        if self.config._attn_implementation not in (SURVEY, PAGED):
            return super().forward(hidden_states, **given)
        split = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (heads.transpose(1, 2) for heads in split)
        if given["alibi"] is None:
            query, key = apply_rotary_pos_emb(query, key, *given["position_embeddings"])
        # Each KV head is repeated for the query heads that share it; only one copy is passed on.
        copies = key.shape[1] // self.num_kv_heads
        out, _ = attention_forward(
            self,
            query,
            key[:, ::copies],
            value[:, ::copies],
            given["attention_mask"],
            scaling=self.inv_norm_factor,
            alibi=given["alibi"],
        )
        return self.dense(out.flatten(2)), None
