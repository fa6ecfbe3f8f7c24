"""Shapes of models, and the least that a step of them takes. Pure.

By the roofline: every weight is read once, or multiplied with if that takes longer, and then the KV
cache is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_BYTES = 2  # of a bf16


@dataclass(frozen=True)
class Ceiling:
    """What the device reached in the same run: bytes a second that a copy reads and writes, and
    floating point operations a second of a large product."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    context: int = 16384

    @property
    def config(self) -> dict[str, Any]:
        """A config.json of transformers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "bfloat16",
        }

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: all but the embedding that is looked up."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES

    def decode_bound_s(self, batch: int, context: int, ceiling: Ceiling) -> float:
        """Seconds of a step in which ``batch`` sequences decode, each behind ``context`` tokens."""
        weights_s = self.multiplied * _BYTES / ceiling.bandwidth
        products_s = 2 * self.multiplied * batch / ceiling.flops
        return max(weights_s, products_s) + batch * context * self.kv_bytes / ceiling.bandwidth

    def prefill_flops(self, length: int) -> float:
        """Of a prompt; its head is computed once."""
        head = self.hidden * self.vocab
        pairs = length * (length + 1) / 2
        attention = 4 * pairs * self.layers * self.heads * self.head_dim
        return 2 * (self.multiplied - head) * length + 2 * head + attention


SHAPES = {
    "llama-8b": Shape(4096, 32, 32, 8, 128, 14336, 128_256),
    "llama-1b": Shape(2048, 16, 32, 8, 64, 8192, 128_256, tied=True),
    #: for a run in small on a CPU
    "tiny": Shape(32, 2, 4, 2, 8, 64, 300, context=256),
}
