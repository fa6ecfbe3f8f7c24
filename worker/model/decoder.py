"""Decoder for every supported family, driven by a ModelSpec; flat tensors, no batch dimension.

The tokens of all sequences of a step are concatenated. Only attention depends on which sequence a
token belongs to. It is passed in as a StepAttention.

    h = embed(tokens)
    each layer:  h += out(attend(rotate(qkv(norm(h)))))
                 h += down(act(gate(x)) * up(x)),  x = norm(h)

A layer may have a mixture of experts (mixture.py) in place of the second branch's MLP.

The result of a branch is not added to h at once: the next norm adds it in the same pass over h.

The spec may add norms and clipping of queries and keys before rotation, norms of each branch's
result, and factors of the embedding, of each branch's result and of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from worker.attention.backend import AttentionForm, StepAttention
from worker.engine.plan import Ints
from worker.model.layers import (
    Adapter,
    ColumnLinear,
    Part,
    Placement,
    RmsNorm,
    RowLinear,
    VocabTable,
    column_parts,
)
from worker.model.lora import PackedParts, StepAdapters
from worker.model.matrix import Packing
from worker.model.mixture import Mixture
from worker.model.mlp import Mlp
from worker.model.piece import Piece
from worker.model.rope import Angle, RotaryTable
from worker.model.sharing import HeadShare, share_heads
from worker.model.spec import Experts, LayerSpec, ModelSpec
from worker.parallel.stand_in import ExchangedTensors


class HeadNorms:
    """RMS norms of each head, with one weight for all query heads and one for all key heads."""

    def __init__(self, name: str, spec: ModelSpec, place: Placement) -> None:
        self.query = _norm(f"{name}.q_norm", spec.head_dim, spec, place)
        self.key = _norm(f"{name}.k_norm", spec.head_dim, spec, place)

    def __call__(self, heads: Tensor, num_query: int) -> Tensor:
        """Return ``heads`` [T, heads, head_dim], each normed over its features.

        The first ``num_query`` heads are query heads; the others are key heads.
        """
        query, key = heads.tensor_split([num_query], dim=1)
        return torch.cat((self.query(query), self.key(key)), dim=1)

    def pieces(self) -> Iterator[Piece]:
        yield from self.query.pieces()
        yield from self.key.pieces()


class AllHeadsNorms:
    """RMS norms of all query heads together, and of all key heads, over the ranks.

    With several ranks a call is a collective: it sums the squares of each token's features.
    """

    def __init__(self, name: str, spec: ModelSpec, heads: HeadShare, place: Placement) -> None:
        self._head_dim = spec.head_dim
        self._group = place.group
        self._pointwise = place.pointwise
        self.eps = spec.norm_eps
        query, kv = heads.query.of(spec.head_dim), heads.kv.of(spec.head_dim)
        sizes = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._parts = (
            Part(f"{name}.q_norm.weight", sizes[0], query),
            Part(f"{name}.k_norm.weight", sizes[1], kv),
        )
        #: weights of queries and keys; those of padding are 0
        self.query, self.key = (place.empty(part.share.width).zero_() for part in self._parts)
        self._num_features = torch.tensor(sizes, device=place.device)
        # A key head that several ranks hold is summed by one of them.
        others = range(place.group.rank)
        shares = (
            share_heads(spec.num_heads, spec.num_kv_heads, place.group.size, r) for r in others
        )
        self._sums_keys = all(share.kv != heads.kv for share in shares)

    def __call__(self, heads: Tensor, num_query: int) -> Tensor:
        """Return ``heads`` [T, heads, head_dim], normed.

        The first ``num_query`` heads are query heads; the others are key heads.
        """
        query, key = (part.flatten(1) for part in heads.tensor_split([num_query], dim=1))
        if self._group.size == 1:
            query = self._pointwise.norm(query, self.query, self.eps, False)
            key = self._pointwise.norm(key, self.key, self.eps, False)
            return torch.cat((query, key), dim=1).view(heads.shape)
        query, key = query.float(), key.float()
        squares = torch.stack((query.square().sum(1), key.square().sum(1)), dim=1)
        if not self._sums_keys:
            squares[:, 1] = 0
        factors = (self._group.all_reduce(squares) / self._num_features + self.eps).rsqrt()
        query = query * factors[:, :1] * self.query
        key = key * factors[:, 1:] * self.key
        return torch.cat((query, key), dim=1).to(heads.dtype).view(heads.shape)

    def pieces(self) -> Iterator[Piece]:
        for part, weight in zip(self._parts, (self.query, self.key), strict=True):
            into = weight[: part.share.num_items]
            yield Piece(part.name, (part.size,), (part.local_features,), into)


class Attention:
    def __init__(self, layer: int, spec: ModelSpec, form: AttentionForm, place: Placement) -> None:
        name = f"{spec.tensors.model}.layers.{layer}.self_attn"
        group = place.group
        heads = share_heads(spec.num_heads, spec.num_kv_heads, group.size, group.rank)
        query, kv = heads.query.of(spec.head_dim), heads.kv.of(spec.head_dim)
        all_query, all_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = column_parts(
            name,
            "qkv_proj" if spec.tensors.fused else None,
            {"q_proj": (all_query, query), "k_proj": (all_kv, kv), "v_proj": (all_kv, kv)},
        )
        self._layer = layer
        self._sinks = Part(f"{name}.sinks", spec.num_heads, heads.query) if spec.sinks else None
        #: scores without a key of this rank's heads; those of padding are 0
        sinks = place.empty(heads.query.width).zero_() if spec.sinks else None
        self.form = replace(form, sinks=sinks)
        self._head_dim = spec.head_dim
        self.num_query = heads.query.width
        self.num_rotated = heads.query.width + heads.kv.width
        self.qkv = ColumnLinear(parts, spec.hidden_size, spec.qkv_bias, place)
        self.norms = _query_key_norms(name, spec, heads, place)
        clip = spec.qkv_clip
        self.clip = None if clip is None else _rounded(clip, place.dtype)
        out = Part(f"{name}.o_proj", all_query, query)
        self.out = RowLinear(out, spec.hidden_size, spec.out_bias, place)
        self.pointwise = place.pointwise

    def __call__(
        self, x: Tensor, angle: Angle, attention: StepAttention, adapters: StepAdapters | None
    ) -> Tensor:
        qkv = self.qkv(x, adapters).view(len(x), -1, self._head_dim)
        rotated, value = qkv.tensor_split([self.num_rotated], dim=1)
        if self.norms is not None:
            rotated = self.norms(rotated, self.num_query)
        if self.clip is not None:
            rotated, value = (part.clamp(-self.clip, self.clip) for part in (rotated, value))
        query = self.pointwise.rotate_and_write(
            rotated, self.num_query, value, angle, self._layer, attention
        )
        return self.out(attention.attend(self._layer, query, self.form).flatten(1), adapters)

    def pack(self, packing: Packing) -> None:
        self.qkv.pack(packing)
        self.out.pack(packing)

    def pieces(self) -> Iterator[Piece]:
        for part in (self.qkv, self.norms, self.out):
            if part is not None:
                yield from part.pieces()
        if self._sinks is not None and self.form.sinks is not None:
            own = self._sinks
            into = self.form.sinks[: own.share.num_items]
            yield Piece(own.name, (own.size,), (own.local_features,), into)


class Residual:
    """Residual branch of a layer: norm, computation, optional second norm, constant factor.

    ``norms`` has the tensor name of the norm before the computation and, if there are two, that of
    the norm after it.
    """

    def __init__(self, norms: tuple[str, ...], spec: ModelSpec, place: Placement) -> None:
        self.before, *after = (_norm(name, spec.hidden_size, spec, place) for name in norms)
        self.after = after[0] if after else None
        self.multiplier = spec.residual_multiplier

    def __call__(
        self, hidden: Tensor, added: Tensor | None, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Add the previous branch's result to ``hidden`` in place, and return this branch's result.

        ``added`` is the previous branch's result, or None for the first branch of the model.
        ``compute`` is this branch's computation; it receives the normed hidden states.
        """
        result = compute(self.before(hidden, added))
        if self.after is not None:
            result = self.after(result)
        return result if self.multiplier == 1.0 else result * self.multiplier

    def pieces(self) -> Iterator[Piece]:
        yield from self.before.pieces()
        if self.after is not None:
            yield from self.after.pieces()


class Layer:
    def __init__(self, layer: int, spec: ModelSpec, form: AttentionForm, place: Placement) -> None:
        name = f"{spec.tensors.model}.layers.{layer}"
        self.around_attention, self.around_mlp = (
            Residual(tuple(f"{name}.{norm}" for norm in norms), spec, place)
            for norms in _norm_names(spec.post_norms)
        )
        self.attention = Attention(layer, spec, form, place)
        self.mlp = _mlp(name, spec, spec.layers[layer].experts, place)

    def __call__(
        self,
        hidden: Tensor,
        added: Tensor | None,
        angle: Angle,
        attention: StepAttention,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Compute attention and MLP, and return the MLP's result, not yet added to ``hidden``.

        ``added`` is the MLP's result of the previous layer, or None for the first layer. Both
        ``added`` and the attention's result are added to ``hidden`` in place.
        """
        attend = partial(self.attention, angle=angle, attention=attention, adapters=adapters)
        added = self.around_attention(hidden, added, attend)
        return self.around_mlp(hidden, added, partial(self.mlp, adapters=adapters))

    def adapted_linears(self) -> Iterator[ColumnLinear | RowLinear]:
        """Yield the linear layers that LoRA adapters may change: all but those of a mixture."""
        yield from (self.attention.qkv, self.attention.out)
        if isinstance(self.mlp, Mlp):
            yield from (self.mlp.gate_up, self.mlp.down)

    def pack(self, packing: Packing) -> None:
        self.attention.pack(packing)
        self.mlp.pack(packing)

    def pieces(self) -> Iterator[Piece]:
        for part in (self.around_attention, self.attention, self.around_mlp, self.mlp):
            yield from part.pieces()


class Stack(Protocol):
    """Implementation of a decoder: tokens to hidden states, and hidden states to logits."""

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        sites: Tensor | None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Return the hidden states of all tokens, or of those at ``sites``; see Decoder.forward."""
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return what Decoder.logits returns, but without the spec's logits divisor and softcap."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LayerByLayer:
    """Reference Stack, which runs the layers one by one from Python.

    ``tables`` are the distinct rotary tables. ``table_of_layer`` has, for each layer, the index of
    its table in ``tables``.
    """

    embedding: VocabTable
    embedding_multiplier: float
    tables: Sequence[RotaryTable]
    layers: Sequence[Layer]
    table_of_layer: Sequence[int]
    norm: RmsNorm
    head: VocabTable

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        sites: Tensor | None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        hidden = self.embedding.lookup(tokens)
        if self.embedding_multiplier != 1.0:
            hidden = hidden * self.embedding_multiplier
        angles = [table.at(positions) for table in self.tables]
        added = None
        for layer, table in zip(self.layers, self.table_of_layer, strict=True):
            added = layer(hidden, added, angles[table], attention, adapters)
        if added is not None:
            hidden.add_(added)
        return hidden if sites is None else hidden[sites]

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self.head.logits(self.norm(hidden))


class Decoder:
    """Decoder with this rank's share of a model's parameters.

    The parameters are undefined until weights.load or dummy.fill sets them. ``max_model_len`` is
    the length in tokens of the longest sequence. ``context`` (default: ``max_model_len``) is the
    length that selects the factors of a LongRopeScaling (RotaryTable).
    """

    def __init__(
        self, spec: ModelSpec, max_model_len: int, place: Placement, context: int | None = None
    ) -> None:
        vocab, width, names = spec.vocab_size, spec.hidden_size, spec.tensors
        place = replace(place, format=spec.weight_format)
        self.weight_format = spec.weight_format
        self._place = place
        #: prefixes of the names of checkpoint tensors that the model ignores
        self.unread = names.unread
        tables = f"{names.model}.embed_tokens.weight", f"{names.head}.weight"
        #: checkpoint names of embedding and head if they share one table, else None
        self.tied = tables if spec.tied_embeddings else None
        embedding = VocabTable(tables[0], vocab, width, place)
        self._own_head = partial(VocabTable, tables[1], vocab, width, place)
        ropes = list(dict.fromkeys(layer.rope for layer in spec.layers))
        self.layer_by_layer = LayerByLayer(
            embedding,
            _rounded(spec.embedding_multiplier, place.dtype),
            [RotaryTable(rope, max_model_len, place.device, context) for rope in ropes],
            [
                Layer(i, spec, _form(spec, layer, max_model_len), place)
                for i, layer in enumerate(spec.layers)
            ],
            [ropes.index(layer.rope) for layer in spec.layers],
            _norm(f"{names.model}.norm", width, spec, place),
            embedding if spec.tied_embeddings else self._own_head(),
        )
        self.stack: Stack = self.layer_by_layer
        self.exchanged = ExchangedTensors(
            len(spec.layers),
            width,
            embedding.share_width,
            place.dtype,
            sums_squares=spec.qk_norm == "all",
        )
        self._logits_divisor = spec.logits_divisor
        self._logits_softcap = spec.logits_softcap

    @property
    def has_fixed_shapes(self) -> bool:
        """Return whether the shapes of all operations follow from the number of tokens.

        Captured decode steps require this. In a loop over experts, shapes depend on the experts
        that are selected for the tokens.
        """
        mlps = [layer.mlp for layer in self.layer_by_layer.layers]
        return all(isinstance(mlp, Mlp) or mlp.kernels is not None for mlp in mlps)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        sites: Tensor | None = None,
        adapters: Ints | None = None,
    ) -> Tensor:
        """Return the hidden states [T, hidden] of ``tokens`` [T] at ``positions`` [T].

        With ``sites`` [n], ascending indices of tokens, only the hidden states [n, hidden] of these
        tokens are returned. The final norm is not applied yet; ``logits`` applies it. ``adapters``
        [T] has the slot of each token's LoRA adapter (see ``add_adapter_slots``), and 0 for the
        model itself; None: no token has one. A collective: all ranks must call it.
        """
        if adapters is None:
            return self.stack.hidden(tokens, positions, attention, sites)
        step = StepAdapters(adapters, tokens.device)
        return self.stack.hidden(tokens, positions, attention, sites, step)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return fp32 logits [n, vocab] of ``hidden`` [n, hidden] on rank 0, None elsewhere.

        A collective: all ranks must call it. The result is valid until the next call, which may
        reuse its memory.
        """
        logits = self.stack.logits(hidden)
        if logits is None:
            return None
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        cap = self._logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def untie(self) -> None:
        """Give the head weights of its own, instead of those that it shares with the embedding.

        Must be called before parameters are filled, because the new weights are empty.
        """
        self.tied = None
        self.layer_by_layer = replace(self.layer_by_layer, head=self._own_head())
        self.stack = self.layer_by_layer

    def add_adapter_slots(self, number: int) -> None:
        """Add slots for LoRA adapters; their numbers in ``forward`` count from 1.

        Must be called once, before a compiled stack is chosen.
        """
        for linear in self._adapted_linears():
            linear.add_adapter_slots(number, self._place)

    def packed_adapter(self, adapter: Adapter) -> list[PackedParts]:
        """Return this rank's share of an adapter for ``place_adapter``. May run in any thread."""
        return [linear.packed_adapter(adapter) for linear in self._adapted_linears()]

    def place_adapter(self, number: int, packed: Sequence[PackedParts] | None) -> None:
        """Fill slot ``number``, or empty it if ``packed`` is None; call it between two steps."""
        linears = [*self._adapted_linears()]
        for i, linear in enumerate(linears):
            assert linear.adapters is not None, "there are no slots"
            linear.adapters.place(number, None if packed is None else packed[i])

    def reserved_adapter_bytes(self, rank: int) -> int:
        """Return the bytes to reserve for adapters of LoRA rank ``rank`` in all slots.

        The adapters are assumed to change all linear layers. The bytes of the adapters that the
        slots have are subtracted.
        """
        return sum(
            linear.adapters.reserved_bytes(rank)
            for linear in self._adapted_linears()
            if linear.adapters is not None
        )

    def _adapted_linears(self) -> Iterator[ColumnLinear | RowLinear]:
        for layer in self.layer_by_layer.layers:
            yield from layer.adapted_linears()

    def pack(self, packing: Packing) -> None:
        """Convert the weights, which must be filled, to the layout of ``packing``.

        Weights that ``packing`` cannot pack stay plain. An embedding that is also the head is
        packed only if ``packing.supports_rows``; a separate embedding only if
        ``packing.packs_embeddings``. The weights cannot be filled again afterwards, so ``pieces``
        must no longer be called.
        """
        parts = self.layer_by_layer
        for layer in parts.layers:
            layer.pack(packing)
        if packing.supports_rows or parts.head is not parts.embedding:
            parts.head.pack(packing)
        if packing.packs_embeddings and parts.head is not parts.embedding:
            parts.embedding.pack(packing)

    def pieces(self) -> Iterator[Piece]:
        """Yield the slices of checkpoint tensors that this rank needs, and what each is read into.

        The target of a slice is a parameter or a part of one.
        """
        parts = self.layer_by_layer
        yield from parts.embedding.pieces()
        for layer in parts.layers:
            yield from layer.pieces()
        yield from parts.norm.pieces()
        if parts.head is not parts.embedding:
            yield from parts.head.pieces()


def _mlp(layer: str, spec: ModelSpec, experts: Experts | None, place: Placement) -> Mlp | Mixture:
    if experts is None:
        return Mlp(f"{layer}.mlp", spec.intermediate_size, spec, place)
    return Mixture(f"{layer}.{spec.tensors.mixture}", experts, spec, place)


def _norm(name: str, width: int, spec: ModelSpec, place: Placement) -> RmsNorm:
    return RmsNorm(name, width, spec.norm_eps, spec.norms_add_one, place)


def _query_key_norms(
    name: str, spec: ModelSpec, heads: HeadShare, place: Placement
) -> HeadNorms | AllHeadsNorms | None:
    if spec.qk_norm is None:
        return None
    if spec.qk_norm == "head":
        return HeadNorms(name, spec, place)
    return AllHeadsNorms(name, spec, heads, place)


def _norm_names(post_norms: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if post_norms:
        return (
            ("input_layernorm", "post_attention_layernorm"),
            ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
    return ("input_layernorm",), ("post_attention_layernorm",)  # the second is before the MLP


def _form(spec: ModelSpec, layer: LayerSpec, max_model_len: int) -> AttentionForm:
    window = layer.window if layer.window is not None and layer.window < max_model_len else None
    return AttentionForm(spec.attention_scale, window, spec.attention_softcap)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Return ``value`` rounded to ``dtype``, in which the model computes with it."""
    return torch.tensor(value, dtype=dtype).item()
