"""One decoder for every supported family, driven by a ModelSpec; flat tensors, no batch dimension.

A step's tokens lie one after the other, whatever sequences they belong to: only attention knows
whose they are, and it is handed in.

    h = embed(tokens)
    each layer:  h += out(attend(rotate(qkv(norm(h)))))
                 h += down(silu(gate(x)) * up(x)),  x = norm(h)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

from worker.attention.backend import StepAttention
from worker.model.layers import (
    ColumnLinear,
    Part,
    Piece,
    Placement,
    RmsNorm,
    RowLinear,
    VocabTable,
    even_share,
    kv_head_share,
)
from worker.model.rope import RotaryTable, rotate
from worker.model.spec import ModelSpec

Angle = tuple[Tensor, Tensor]


class Attention:
    def __init__(self, layer: int, spec: ModelSpec, place: Placement) -> None:
        heads = even_share(spec.num_heads, place.group, "attention heads")
        kv_heads = kv_head_share(spec.num_kv_heads, place.group)
        name = f"model.layers.{layer}.self_attn"
        query = _heads_part(f"{name}.q_proj", spec.num_heads, heads, spec.head_dim)
        key = _heads_part(f"{name}.k_proj", spec.num_kv_heads, kv_heads, spec.head_dim)
        value = _heads_part(f"{name}.v_proj", spec.num_kv_heads, kv_heads, spec.head_dim)
        out = _heads_part(f"{name}.o_proj", spec.num_heads, heads, spec.head_dim)
        bias = spec.attention_bias
        self._layer = layer
        self._head_dim = spec.head_dim
        self._num_heads = heads.stop - heads.start
        self._num_kv_heads = kv_heads.stop - kv_heads.start
        self._qkv = ColumnLinear((query, key, value), spec.hidden_size, bias, place)
        self._out = RowLinear(out, spec.hidden_size, bias, place)

    def __call__(self, x: Tensor, angle: Angle, attention: StepAttention) -> Tensor:
        qkv = self._qkv(x).view(len(x), -1, self._head_dim)
        rotated, value = qkv.tensor_split([self._num_heads + self._num_kv_heads], dim=1)
        query, key = rotate(rotated, angle).tensor_split([self._num_heads], dim=1)
        attention.write(self._layer, key, value)
        return self._out(attention.attend(self._layer, query).flatten(1))

    def pieces(self) -> Iterator[Piece]:
        yield from self._qkv.pieces()
        yield from self._out.pieces()


class Mlp:
    def __init__(self, layer: int, spec: ModelSpec, place: Placement) -> None:
        size = spec.intermediate_size
        share = even_share(size, place.group, "MLP features")
        name = f"model.layers.{layer}.mlp"
        gate, up, down = (
            Part(f"{name}.{part}_proj", size, share) for part in ("gate", "up", "down")
        )
        self._gate_up = ColumnLinear((gate, up), spec.hidden_size, spec.mlp_bias, place)
        self._down = RowLinear(down, spec.hidden_size, spec.mlp_bias, place)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(functional.silu(gate) * up)

    def pieces(self) -> Iterator[Piece]:
        yield from self._gate_up.pieces()
        yield from self._down.pieces()


class Layer:
    def __init__(self, layer: int, spec: ModelSpec, place: Placement) -> None:
        name = f"model.layers.{layer}"
        width, eps = spec.hidden_size, spec.norm_eps
        self._attention_norm = RmsNorm(f"{name}.input_layernorm", width, eps, place)
        self._attention = Attention(layer, spec, place)
        self._mlp_norm = RmsNorm(f"{name}.post_attention_layernorm", width, eps, place)
        self._mlp = Mlp(layer, spec, place)

    def __call__(self, hidden: Tensor, angle: Angle, attention: StepAttention) -> Tensor:
        hidden = hidden + self._attention(self._attention_norm(hidden), angle, attention)
        return hidden + self._mlp(self._mlp_norm(hidden))

    def pieces(self) -> Iterator[Piece]:
        for part in (self._attention_norm, self._attention, self._mlp_norm, self._mlp):
            yield from part.pieces()


class Decoder:
    """The rank's share of a model. Its parameters hold nothing until weights.load has filled them.

    Raises UnsupportedModel where the model cannot be split over the ranks.
    """

    def __init__(self, spec: ModelSpec, max_model_len: int, place: Placement) -> None:
        vocab, width = spec.vocab_size, spec.hidden_size
        self._embedding = VocabTable("model.embed_tokens.weight", vocab, width, place)
        self._layers = [Layer(i, spec, place) for i in range(spec.num_layers)]
        self._norm = RmsNorm("model.norm", width, spec.norm_eps, place)
        self._head = (
            self._embedding
            if spec.tied_embeddings
            else VocabTable("lm_head.weight", vocab, width, place)
        )
        self._rope = RotaryTable(spec.rope, spec.head_dim, max_model_len, place.device)

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Hidden states [T, hidden] of ``tokens`` [T], each at its place of ``positions`` [T]."""
        hidden = self._embedding.lookup(tokens)
        angle = self._rope.at(positions)
        for layer in self._layers:
            hidden = layer(hidden, angle, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor | None:
        """fp32 logits [n, vocab] of ``hidden`` [n, hidden] on rank 0, None elsewhere."""
        return self._head.logits(self._norm(hidden))

    def pieces(self) -> Iterator[Piece]:
        """Everything of the checkpoint that this rank holds."""
        yield from self._embedding.pieces()
        for layer in self._layers:
            yield from layer.pieces()
        yield from self._norm.pieces()
        if self._head is not self._embedding:
            yield from self._head.pieces()


def _heads_part(name: str, count: int, share: slice, head_dim: int) -> Part:
    """A projection to or from ``count`` heads, of which this rank holds ``share``."""
    features = slice(share.start * head_dim, share.stop * head_dim)
    return Part(name, count * head_dim, features)
