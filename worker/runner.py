"""A plan in, tokens out: the step as torch does it, with the same tokens on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from everlift import logs
from everlift.errors import EngineFailed
from worker.attention.backend import AttentionBackend
from worker.attention.reference import ReferenceAttention
from worker.config import WorkerConfig
from worker.device import choose_device, choose_dtype, use_threads
from worker.kv_cache import KVCache, block_bytes
from worker.model import weights
from worker.model.decoder import Decoder
from worker.model.layers import Placement, kv_head_share
from worker.model.spec import ModelSpec, UnsupportedModel
from worker.parallel import Group
from worker.plan import Plan, Row
from worker.sampler import NO_TOKEN, sample

log = logs.get(__name__)


class TorchRunner:
    """One rank's Runner (worker.plan). It owns the model's share, the KV cache and the group."""

    def __init__(
        self,
        spec: ModelSpec,
        max_model_len: int,
        decoder: Decoder,
        cache: KVCache,
        attention: AttentionBackend,
        place: Placement,
    ) -> None:
        self._spec = spec
        self._max_model_len = max_model_len
        self._decoder = decoder
        self._cache = cache
        self._attention = attention
        self._group = place.group
        self._device = place.device

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[int]:
        """A token id for each row that samples. Raises EngineFailed if logits are not finite."""
        hidden = self._forward(plan)
        sampling = [row for row in plan.rows if row.samples]
        if not sampling:
            return []
        tokens = self._sample(hidden[self._last_tokens(plan)], sampling).tolist()
        if NO_TOKEN in tokens:
            raise EngineFailed(f"step {plan.step}: the model's logits are not finite numbers")
        return tokens

    def close(self) -> None:
        self._group.close()

    def _forward(self, plan: Plan) -> Tensor:
        """Hidden states of all of the step's tokens; their keys and values go to the cache."""
        tokens = [token for row in plan.rows for token in row.tokens]
        positions = [p for row in plan.rows for p in range(row.start, row.start + len(row.tokens))]
        attention = self._attention.prepare(plan.rows)
        return self._decoder.forward(self._tensor(tokens), self._tensor(positions), attention)

    def _last_tokens(self, plan: Plan) -> Tensor:
        """Where, among the step's tokens, each sampling row ends."""
        ends = accumulate(len(row.tokens) for row in plan.rows)
        last = [end - 1 for row, end in zip(plan.rows, ends, strict=True) if row.samples]
        return self._tensor(last)

    def _sample(self, hidden: Tensor, rows: Sequence[Row]) -> Tensor:
        """Rank 0 draws, the others take its word: rounding must not part the ranks."""
        logits = self._decoder.logits(hidden)
        if logits is None:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        else:
            tokens = sample(logits, rows)
        return self._group.broadcast(tokens)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def build_runner(config: WorkerConfig, group: Group) -> TorchRunner:
    """Loads the rank's share of ``config.model`` and allocates its KV cache.

    Raises UnsupportedModel, BadCheckpoint, or ValueError for a device that is not there. Sets
    torch's number of threads for the process.
    """
    use_threads(config.num_threads)
    device = choose_device(config.device)
    place = Placement(group, choose_dtype(config.dtype, device), device)
    spec = ModelSpec.from_hf(config.model)
    max_model_len = _max_model_len(config, spec)
    decoder = Decoder(spec, max_model_len, place)
    parameter_bytes = weights.load(decoder, config.model)
    cache = _build_cache(config, spec, place)
    log.info(
        "model loaded",
        model=config.name,
        rank=group.rank,
        device=str(device),
        dtype=str(place.dtype),
        parameter_mib=parameter_bytes >> 20,
        kv_blocks=cache.num_blocks,
        kv_cache_mib=cache.tensor.nbytes >> 20,
    )
    return TorchRunner(spec, max_model_len, decoder, cache, ReferenceAttention(cache), place)


def _max_model_len(config: WorkerConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise UnsupportedModel(
            f"max_model_len {config.max_model_len} is more than the model's {spec.max_position}"
        )
    return config.max_model_len


def _build_cache(config: WorkerConfig, spec: ModelSpec, place: Placement) -> KVCache:
    """``config.num_blocks`` blocks, or as many as its MiB, shared out evenly, hold on each rank."""
    heads = kv_head_share(spec.num_kv_heads, place.group)
    kv_heads = heads.stop - heads.start
    num_blocks = config.num_blocks
    if num_blocks is None:
        size = block_bytes(spec.num_layers, kv_heads, spec.head_dim, place.dtype)
        num_blocks = (config.kv_cache_mib << 20) // place.group.size // size
    if num_blocks < 1:
        raise ValueError(f"kv_cache_mib {config.kv_cache_mib} holds not one block of this model")
    return KVCache(num_blocks, spec.num_layers, kv_heads, spec.head_dim, place.dtype, place.device)
