"""Shapes of models, and lower bounds of their step times by the roofline. Pure.

A step takes at least the longer one of reading all weights and of multiplying with them, and then
the time to read the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_BYTES = 2  # bytes of a bf16


@dataclass(frozen=True)
class Ceiling:
    """Limits of the device, measured in the same run.

    ``bandwidth`` is the bytes per second that a copy reads and writes, ``flops`` the floating-point
    operations per second of a large matrix product.
    """

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
        """Content of a config.json of transformers."""
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
    def matmul_params(self) -> int:
        """Number of parameters that a token is multiplied with: all except the input embedding."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES

    def decode_bound_s(self, batch: int, context: int, ceiling: Ceiling) -> float:
        """Return the least seconds of a step in which ``batch`` sequences decode one token each.

        Each sequence reads ``context`` tokens of the KV cache.
        """
        weights_s = self.matmul_params * _BYTES / ceiling.bandwidth
        products_s = 2 * self.matmul_params * batch / ceiling.flops
        return max(weights_s, products_s) + batch * context * self.kv_bytes / ceiling.bandwidth

    def prefill_flops(self, length: int) -> float:
        """Return the floating-point operations of a prompt of ``length`` tokens.

        The LM head is computed only for the last token.
        """
        head = self.hidden * self.vocab
        pairs = length * (length + 1) / 2
        attention = 4 * pairs * self.layers * self.heads * self.head_dim
        return 2 * (self.matmul_params - head) * length + 2 * head + attention


SHAPES = {
    "llama-8b": Shape(4096, 32, 32, 8, 128, 14336, 128_256),
    "llama-1b": Shape(2048, 16, 32, 8, 64, 8192, 128_256, tied=True),
    #: for tests of the benchmark on a CPU
    "tiny": Shape(32, 2, 4, 2, 8, 64, 300, context=256),
}
