"""What a model costs its hardware. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A decoder by its config.json. ``parameters`` are all of them; the input embedding, of which a
    token reads one row, and the output's projection, are as large as ``vocab_size * hidden_size``
    each, and two different ones."""

    name: str
    parameters: float
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    #: of a parameter, and of an element of the KV cache
    element_bytes: int = 2

    @property
    def stored_bytes(self) -> float:
        return self.parameters * self.element_bytes

    @property
    def read_bytes(self) -> float:
        """In a step: all but the input embedding."""
        return (self.parameters - self._embedding) * self.element_bytes

    @property
    def token_flops(self) -> float:
        """Of the layers' products with their weights: a multiplication and an addition each."""
        return 2 * (self.parameters - 2 * self._embedding)

    @property
    def row_flops(self) -> float:
        """Of the output's projection, which a row needs for its last token alone."""
        return 2 * self._embedding

    @property
    def pair_flops(self) -> float:
        """Of a token and one that it attends to: a product with the key, one with the value."""
        return 4 * self.num_layers * self.num_heads * self.head_size

    @property
    def kv_token_bytes(self) -> float:
        heads = self.num_layers * self.num_kv_heads
        return 2 * heads * self.head_size * self.element_bytes

    @property
    def _embedding(self) -> float:
        return self.vocab_size * self.hidden_size


#: In bfloat16.
MODELS: Mapping[str, ModelSize] = {
    each.name: each
    for each in (
        ModelSize("llama-3.1-8b", 8.03e9, 32, 4096, 128_256, 32, 8, 128, 131_072),
        ModelSize("llama-3.3-70b", 70.55e9, 80, 8192, 128_256, 64, 8, 128, 131_072),
        ModelSize("qwen3-8b", 8.19e9, 36, 4096, 151_936, 32, 8, 128, 40_960),
    )
}
