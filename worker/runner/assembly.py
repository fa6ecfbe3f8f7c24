"""Parts of a rank's runner: the loaded model, its KV cache and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from worker.attention.backend import AttentionBackend
from worker.attention.choice import cache_dtype, choose_attention
from worker.config import WorkerConfig
from worker.device.device import kind_of
from worker.device.kv_cache import KVCache
from worker.engine.limits import blocks_for
from worker.engine.step_times import STOPPED, Stopwatch
from worker.model.decoder import Decoder
from worker.model.layers import Placement
from worker.parallel.stand_in import StandIn
from worker.runner.decode_buckets import decode_buckets
from worker.runner.decode_graphs import CudaGraphs, DecodeGraphs, DecodingBackend
from worker.runner.decoder_adapters import DecoderAdapters
from worker.runner.host_cache import HostCache
from worker.runner.prompt_scores import SCORED_AT_ONCE
from worker.runner.runner import Model, TorchRunner
from worker.runner.sampled_tokens import LastTokens

#: Shape of the keys, and of the values, of one token: num_layers, kv_heads, head_dim.
KvShape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model of a rank.

    ``kv_shape`` is (layers, KV heads, head dimension): the shape of one token's keys, and also of
    its values, on this rank. ``adapters`` are its LoRA adapters, None if it has no slots for any.
    """

    model: Model
    vocab_size: int
    max_model_len: int
    kv_shape: KvShape
    parameter_bytes: int
    adapters: DecoderAdapters | None = None


@dataclass(frozen=True, slots=True)
class Assembly:
    """Loaded model with a KV cache and the other parts of a runner.

    ``last_tokens`` has the last sampled tokens on the device; it is None on a CPU, where a step is
    launched only after the previous one has ended. ``stand_in`` takes part in the collectives of a
    step that this rank cannot compute; it is None for a single rank.
    """

    config: WorkerConfig
    loaded: LoadedModel
    place: Placement
    cache: KVCache
    attention: AttentionBackend
    last_tokens: LastTokens | None
    stand_in: StandIn | None = None

    @classmethod
    def of(
        cls, config: WorkerConfig, loaded: LoadedModel, place: Placement, num_blocks: int
    ) -> Self:
        """Assemble the model with a new KV cache of ``num_blocks`` blocks."""
        device = place.device
        dtype = cache_dtype(config, place.dtype)
        cache = KVCache(num_blocks, *loaded.kv_shape, dtype, device)
        last_tokens = LastTokens(config.max_num_seqs, device) if device.type == "cuda" else None
        attention, stand_in = choose_attention(cache), _stand_in(config, loaded, place)
        return cls(config, loaded, place, cache, attention, last_tokens, stand_in)

    def runner(
        self,
        host_cache: HostCache | None = None,
        stopwatch: Stopwatch = STOPPED,
        graphs: DecodeGraphs | None = None,
    ) -> TorchRunner:
        return TorchRunner(
            self.loaded.vocab_size,
            self.loaded.max_model_len,
            self.loaded.model,
            self.cache,
            self.attention,
            self.place,
            host_cache,
            stopwatch,
            self.last_tokens,
            graphs,
            self.stand_in,
            self.loaded.adapters,
        )

    def capture(self) -> DecodeGraphs | None:
        """Capture the decode steps as graphs; return None on a CPU, or if a rank cannot capture.

        A collective: all ranks must call it. Transformers' modules, loops over experts, torch's
        attention and collectives that wait on the host cannot be captured. All ranks capture or
        none, because replaying a step includes its collectives.
        """
        if self.last_tokens is None:
            return None
        model, attention = self.loaded.model, self.attention
        is_able = isinstance(model, Decoder) and model.has_fixed_shapes
        is_able = is_able and isinstance(attention, DecodingBackend)
        if not self._all_can(is_able and self.place.group.on_device):
            return None
        assert isinstance(model, Decoder) and isinstance(attention, DecodingBackend)
        return DecodeGraphs(
            model,
            attention,
            self.last_tokens,
            decode_buckets(self.config.max_num_seqs),
            min(blocks_for(self.loaded.max_model_len), self.cache.num_blocks),
            self.place.device,
            CudaGraphs(),
        )

    def _all_can(self, can: bool) -> bool:
        group, device = self.place.group, self.place.device
        return int(group.all_reduce(torch.tensor([int(can)], device=device)).item()) == group.size


def _stand_in(config: WorkerConfig, loaded: LoadedModel, place: Placement) -> StandIn | None:
    if place.group.size == 1:
        return None
    assert isinstance(loaded.model, Decoder), "transformers' modules run on one rank only"
    most_tokens = config.batched_tokens(kind_of(place.device))
    num_sites = config.max_num_seqs * (1 + config.speculation.num_draft_tokens)
    most_logits = max(min(num_sites, most_tokens), SCORED_AT_ONCE)
    most = most_tokens, most_logits, num_sites
    return StandIn(place.group, loaded.model.exchanged, *most, place.device)
