"""Shapes of models, and lower bounds of their step times by the roofline. Pure.

A step takes at least the longer one of reading all weights and of multiplying with them, and then
the time to read the KV cache.

Of experts, a step reads those that some token chose. ``batch`` tokens that choose ``top_k`` of n
experts independently choose n * (1 - (1 - top_k / n) ** batch) different ones on average.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

_BYTES = 2  # bytes of a bf16
#: Bytes of a weight and its share of the scales, as a worker holds them: bf16; e4m3 with an fp32
#: scale for 128 x 128 weights; 4-bit floats with a bf16 scale for 32.
_WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1 + 4 / 128**2, "mxfp4": 0.5 + 2 / 32}
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


@dataclass(frozen=True)
class Ceiling:
    """Limits of the device, measured in the same run.

    ``bandwidth`` is the bytes per second that a copy reads and writes, ``flops`` the floating-point
    operations per second of a large matrix product in bf16.
    """

    bandwidth: float
    flops: float


class Experts(NamedTuple):
    """Experts of each layer: their number, how many compute a token, and their features."""

    number: int
    top_k: int
    intermediate: int


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
    model_type: str = "llama"
    architecture: str = "LlamaForCausalLM"
    #: in place of an MLP with ``intermediate`` features
    experts: Experts | None = None
    #: weights of linear layers; with mxfp4 those of the experts only
    weights: str = "bf16"
    #: tokens that every second layer attends to; None: all
    window: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        """Content of a config.json of transformers."""
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
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
        if self.experts is not None:
            config |= {
                "num_experts": self.experts.number,
                "num_local_experts": self.experts.number,
                "num_experts_per_tok": self.experts.top_k,
                "moe_intermediate_size": self.experts.intermediate,
                "norm_topk_prob": True,
            }
        if self.window is not None:
            config |= {"sliding_window": self.window, "attention_bias": True}
        if self.weights != "bf16":
            config["quantization_config"] = _FP8 if self.weights == "fp8" else _MXFP4
        return config

    @property
    def _expert_params(self) -> int:
        """Number of parameters of an expert, over all layers."""
        assert self.experts is not None
        return self.layers * 3 * self.hidden * self.experts.intermediate

    @property
    def _dense_params(self) -> int:
        """Number of parameters that every token is multiplied with, without the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.experts is not None:
            return self.layers * (attention + self.hidden * self.experts.number)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def matmul_params(self) -> int:
        """Number of parameters that a token is multiplied with: all except the input embedding."""
        experts = 0 if self.experts is None else self.experts.top_k * self._expert_params
        return self._dense_params + experts + self.hidden * self.vocab

    def weight_bytes(self, batch: int) -> float:
        """Return the expected bytes of the weights that a step of ``batch`` tokens reads."""
        dense = _WEIGHT_BYTES["bf16" if self.weights == "mxfp4" else self.weights]
        total = self._dense_params * dense + self.hidden * self.vocab * _BYTES
        if self.experts is None:
            return total
        number, top_k, _ = self.experts
        chosen = number * (1 - (1 - top_k / number) ** batch)
        return total + chosen * self._expert_params * _WEIGHT_BYTES[self.weights]

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES

    def _seen(self, lengths: Iterable[int]) -> float:
        """Return the sum of ``lengths``, which every second layer cuts at the window, as a mean."""
        lengths = [*lengths]
        window = self.window or max(lengths)
        return sum((length + min(length, window)) / 2 for length in lengths)

    def decode_bound_s(self, batch: int, context: int, ceiling: Ceiling) -> float:
        """Return the least seconds of a step in which ``batch`` sequences decode one token each.

        Each sequence reads ``context`` tokens of the KV cache.
        """
        weights_s = self.weight_bytes(batch) / ceiling.bandwidth
        products_s = 2 * self.matmul_params * batch / ceiling.flops
        kv_s = batch * self._seen([context]) * self.kv_bytes / ceiling.bandwidth
        return max(weights_s, products_s) + kv_s

    def prefill_flops(self, length: int) -> float:
        """Return the floating-point operations of a prompt of ``length`` tokens.

        The LM head is computed only for the last token.
        """
        head = self.hidden * self.vocab
        pairs = self._seen(range(1, length + 1))
        attention = 4 * pairs * self.layers * self.heads * self.head_dim
        return 2 * (self.matmul_params - head) * length + 2 * head + attention


SHAPES = {
    "llama-8b": Shape(4096, 32, 32, 8, 128, 14336, 128_256),
    "llama-8b-fp8": Shape(4096, 32, 32, 8, 128, 14336, 128_256, weights="fp8"),
    "qwen3-30b-a3b": Shape(
        *(2048, 48, 32, 4, 128, 6144, 151_936),
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        experts=Experts(128, 8, 768),
    ),
    "gpt-oss-20b": Shape(
        *(2880, 24, 64, 8, 64, 2880, 201_088),
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        experts=Experts(32, 4, 2880),
        weights="mxfp4",
        window=128,
    ),
    "llama-1b": Shape(2048, 16, 32, 8, 64, 8192, 128_256, tied=True),
    #: for tests of the benchmark on a CPU
    "tiny": Shape(32, 2, 4, 2, 8, 64, 300, context=256),
}
