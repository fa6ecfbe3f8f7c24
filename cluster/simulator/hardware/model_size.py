"""Size of a model: its bytes and its operations. Pure.

Operations are counted per token, per row (one sequence of a step), and per pair of a token and a
token that it attends to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cluster.errors import ForecastFailed
from worker.model.huggingface.families import read_spec
from worker.model.spec import UnsupportedModel


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a decoder model, as its config.json describes it.

    Norms and biases are neglected, and every layer is assumed to keep keys and values of all
    tokens.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    tied_embeddings: bool = False
    #: bytes of a parameter, and of an element of the KV cache
    element_bytes: int = 2

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Return the size of the model that the config.json in ``directory`` describes.

        Raises ForecastFailed if the file is unreadable or describes another kind of model.
        """
        try:
            spec = read_spec(directory)
        except (UnsupportedModel, OSError) as error:
            raise ForecastFailed(f"{directory}: {error}") from None
        return cls(
            directory.name,
            spec.num_layers,
            spec.hidden_size,
            spec.intermediate_size,
            spec.vocab_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.max_position,
            spec.tied_embeddings,
        )

    @property
    def stored_bytes(self) -> float:
        tables = self._table_weights if self.tied_embeddings else 2 * self._table_weights
        return (self._layer_weights + tables) * self.element_bytes

    @property
    def read_bytes(self) -> float:
        """Bytes of weights read in a step: the layers and the output projection.

        The input embedding is not included, because only one of its rows is read per token.
        """
        return (self._layer_weights + self._table_weights) * self.element_bytes

    @property
    def token_flops(self) -> float:
        """Operations per token in the layers: a multiplication and an addition per weight."""
        return 2 * self._layer_weights

    @property
    def row_flops(self) -> float:
        """Operations of the output projection per row, that is, per sequence of a step."""
        return 2 * self._table_weights

    @property
    def pair_flops(self) -> float:
        """Operations of attention per pair of a token and a token that it attends to.

        These are the products with the key and with the value.
        """
        return 4 * self.num_layers * self.num_heads * self.head_size

    @property
    def kv_token_bytes(self) -> float:
        heads = self.num_layers * self.num_kv_heads
        return 2 * heads * self.head_size * self.element_bytes

    @property
    def _layer_weights(self) -> float:
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_size
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def _table_weights(self) -> float:
        return self.vocab_size * self.hidden_size


#: Known models, in bfloat16.
MODELS: Mapping[str, ModelSize] = {
    each.name: each
    for each in (
        ModelSize("llama-3.1-8b", 32, 4096, 14_336, 128_256, 32, 8, 128, 131_072),
        ModelSize("llama-3.3-70b", 80, 8192, 28_672, 128_256, 64, 8, 128, 131_072),
        ModelSize("qwen3-8b", 36, 4096, 12_288, 151_936, 32, 8, 128, 40_960),
    )
}
